"""`ratoon pretrain`: pretraining on token files, in this process or in each of torchrun's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def pretrain(
    config: Annotated[Path, typer.Argument(help="YAML file; see docs/configuration.md.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings as section.key=value.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint of the run.")
    ] = False,
) -> None:
    """Pretrain a model, whole or with subnetworks that grow."""
    from ratoon.cli.running import finish, open_folder, watching
    from ratoon.config import PretrainConfig, load_config
    from ratoon.observe.observer import Observer

    settings = load_config(PretrainConfig, config, overrides or ())
    if int(os.environ.get("RANK", "0")) > 0:
        from ratoon.loop.pretrain_run import pretrain as work

        with Observer() as silent:
            work(settings, None, silent)
        return
    folder = open_folder(settings, resume=resume)
    with watching(folder) as observer:
        from ratoon.loop.pretrain_run import pretrain as work

        work(settings, folder, observer)
    finish(folder)
