"""`ratoon sft`: supervised fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sft(
    config: Annotated[Path, typer.Argument(help="YAML file; see docs/configuration.md.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings as section.key=value.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint of the run.")
    ] = False,
) -> None:
    """Fine-tune a model on examples."""
    from ratoon.cli.running import finish, load_settings, open_folder, watching
    from ratoon.config import SFTConfig

    settings = load_settings(SFTConfig, config, overrides or ())
    folder = open_folder(settings, resume=resume)
    with watching(folder) as observer:
        from ratoon.loop.sft_run import run_sft

        run_sft(settings, folder, observer)
    finish(folder)
