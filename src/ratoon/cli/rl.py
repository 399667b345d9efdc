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
    from ratoon.cli.running import finish, load_settings, stoppable
    from ratoon.config import RLConfig
    from ratoon.loop.open_run import open_folder

    settings = load_settings(RLConfig, config, overrides or ())
    folder = open_folder(settings, resume=resume)
    with stoppable(folder) as (observer, stop):
        from ratoon.loop.rl_run import run_rl

        run_rl(settings, folder, observer, stop)
    finish(folder)
