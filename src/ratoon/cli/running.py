"""What the verbs that run something share: folder, display, report and the closing table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from ratoon.cli.live import make_display
from ratoon.cli.tables import plain_table
from ratoon.config import load_config
from ratoon.config.pretrain import PretrainConfig
from ratoon.config.rl import RLConfig
from ratoon.config.sft import SFTConfig
from ratoon.observe.observer import Observer
from ratoon.observe.run_folder import RunFolder
from ratoon.observe.summary import OPTIONAL, SUMMARY
from ratoon.stopping import Stop

Config = TypeVar("Config", RLConfig, SFTConfig, PretrainConfig)


def load_settings(kind: type[Config], path: Path, overrides: Sequence[str]) -> Config:
    """A run's configuration, with the number format and workers that suit this machine.

    Raises: ConfigError as `load_config` does.
    """
    config = load_config(kind, path, overrides)
    # Wrong settings are found without waiting for torch.
    from ratoon.loop.setup import with_machine
    from ratoon.models.compute_dtype import with_dtype

    return with_dtype(config) if isinstance(config, PretrainConfig) else with_machine(config)


@contextmanager
def stoppable(folder: RunFolder | None) -> Iterator[tuple[Observer, Stop]]:
    """As `watching`, and what tells of signals that ask the run to stop."""
    with watching(folder) as observer, Stop(observer.note).on_signals() as stop:
        yield observer, stop


@contextmanager
def watching(folder: RunFolder | None) -> Iterator[Observer]:
    """An observer with a display, which is closed whatever happens."""
    display = make_display(Console(stderr=True))
    try:
        with Observer(folder, display) as observer:
            yield observer
    except BaseException:
        display.close(succeeded=False)
        raise
    display.close()


def finish(folder: RunFolder) -> None:
    """Write the report, show the closing table, and say where everything lies."""
    from ratoon.report import write_report

    page = write_report(folder.path)
    console = Console()
    if folder.summary.is_file():
        console.print(summary_table(json.loads(folder.summary.read_text(encoding="utf-8"))))
    console.print(f"report: {page}", soft_wrap=True, highlight=False)


def summary_table(summary: dict[str, object]) -> Table:
    """The figures of `summary.json` with their meaning."""
    table = plain_table(header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for key, meaning in (SUMMARY | OPTIONAL).items():
        value = summary.get(key)
        if isinstance(value, list) or key not in summary:
            continue
        table.add_row(key, _figure(value), meaning)
    return table


def _figure(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
