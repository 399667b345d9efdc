"""`ratoon pretrain`: pretraining on token files, in this process or in each of torchrun's."""

from __future__ import annotations

import os
from collections.abc import Sequence
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
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything, say what would be trained, and stop."),
    ] = False,
    vocabulary: Annotated[
        int | None,
        typer.Option(min=1, help="Of a dry run without data: size of the tokenizer. Tokens."),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Of a dry run: as many as torchrun would start; default 1."),
    ] = None,
) -> None:
    """Pretrain a model, whole or with subnetworks that grow."""
    if dry_run:
        _plan(config, overrides or (), vocabulary, processes or 1, resume=resume)
        return
    _refuse_idle(vocabulary, processes)
    from ratoon.cli.running import finish, load_settings, watching
    from ratoon.config import PretrainConfig
    from ratoon.loop.open_run import open_folder
    from ratoon.observe.observer import Observer

    settings = load_settings(PretrainConfig, config, overrides or ())
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


def _refuse_idle(vocabulary: int | None, processes: int | None) -> None:
    """Raise ConfigError for what belongs to a dry run only."""
    from ratoon.errors import ConfigError

    for name, value in (("--vocabulary", vocabulary), ("--processes", processes)):
        if value is not None:
            raise ConfigError(f"{name} has an effect with --dry-run only; remove it")


def _plan(
    path: Path,
    overrides: Sequence[str],
    vocabulary: int | None,
    processes: int,
    *,
    resume: bool,
) -> None:
    """Print what would be trained."""
    from rich.console import Console

    from ratoon.cli.planned import plan_tables
    from ratoon.config import PretrainConfig, load_config
    from ratoon.errors import ConfigError
    from ratoon.loop.pretrain_plan import plan_run

    if resume:
        raise ConfigError("--dry-run trains nothing, so there is nothing to resume; leave one out")
    config = load_config(PretrainConfig, path, overrides, may_miss=("data.path",))
    console = Console()
    for table in plan_tables(plan_run(config, vocab_size=vocabulary, processes=processes)):
        console.print(table)
