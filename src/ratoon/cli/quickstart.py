"""`ratoon quickstart`: the main job from end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def quickstart(
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="A tiny model trained in place: no download, two minutes."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the run. Default: the first free runs/quickstart[-tiny][-N]."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of order and noise.")] = 1,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with --output, by default with the newest of them."),
    ] = False,
) -> None:
    """Watch a model learn by reinforcement on this machine, and check that no token changed."""
    from ratoon.cli.running import finish, stoppable
    from ratoon.errors import ConfigError
    from ratoon.observe.run_folder import RunFolder, first_free, is_occupied, last_used

    default = Path("runs") / ("quickstart-tiny" if tiny else "quickstart")
    target = output or (last_used(default) if resume else first_free(default))
    if is_occupied(target) and not resume:
        is_run = RunFolder(target).config.is_file()
        raise ConfigError(
            f"--output {target} holds something, and nothing is overwritten; name another folder, "
            f"or leave --output out for the first free one{', or add --resume' * is_run}"
        )
    with stoppable(None) as (observer, stop):
        from ratoon.loop.quickstart import run_quickstart

        run_quickstart(tiny, target, observer, seed, resume=resume, stop=stop)
    finish(RunFolder(target))
