"""`ratoon rl`: reinforcement learning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def rl(
    config: Annotated[Path, typer.Argument(help="YAML file; see docs/configuration.md.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings as section.key=value.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint of the run.")
    ] = False,
) -> None:
    """Train a policy by reinforcement learning."""
    from ratoon.cli.running import finish, load_settings, open_folder, watching
    from ratoon.config import RLConfig

    settings = load_settings(RLConfig, config, overrides or ())
    folder = open_folder(settings, resume=resume)
    with watching(folder) as observer:
        from ratoon.loop.rl_run import run_rl

        run_rl(settings, folder, observer)
    finish(folder)
