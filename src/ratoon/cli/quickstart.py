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
) -> None:
    """Watch a model learn by reinforcement on this machine, and check that no token changed."""
    from ratoon.cli.running import finish, watching
    from ratoon.errors import ConfigError
    from ratoon.observe.run_folder import RunFolder, first_free, is_occupied

    default = Path("runs") / ("quickstart-tiny" if tiny else "quickstart")
    target = output or first_free(default)
    if is_occupied(target):
        raise ConfigError(
            f"--output {target} holds something, and nothing is overwritten; name another folder, "
            "or leave --output out for the first free one"
        )
    with watching(None) as observer:
        from ratoon.loop.quickstart import run_quickstart

        run_quickstart(tiny, target, observer, seed)
    finish(RunFolder(target))
