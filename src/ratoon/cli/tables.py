"""What all tables look like: columns without lines between."""

from __future__ import annotations

from rich.table import Table


def plain_table(title: str | None = None, *, header: bool = True) -> Table:
    """A table without columns yet."""
    return Table(
        title=title, title_justify="left", show_header=header, box=None, padding=(0, 2, 0, 0)
    )
