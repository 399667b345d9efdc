"""`ratoon report`: a run folder as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run, such as runs/quickstart.")],
) -> None:
    """Write report.html into a run's folder, also while it is still running."""
    from ratoon.report import write_report

    Console().print(str(write_report(run)), soft_wrap=True, highlight=False)
