"""Options that several verbs have, and lists of numbers in options."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON record.")]
Page = Annotated[Path | None, typer.Option(help="Write the plots into this HTML file.")]


def numbers(option: str, text: str) -> tuple[float, ...]:
    """The numbers of an option. Raises: ConfigError if one is none, or not finite."""
    from ratoon.errors import ConfigError

    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(map(math.isfinite, found)):
        raise ConfigError(f"{option} {text}: must be numbers with commas between, such as 0.5,1")
    return found


def whole_numbers(
    option: str, text: str, least: int = 1, most: int | None = None
) -> tuple[int, ...]:
    """The whole numbers of an option, each within bounds. Raises: ConfigError if one is not."""
    from ratoon.errors import ConfigError

    found = numbers(option, text)
    highest = math.inf if most is None else most
    if not all(value == int(value) and least <= value <= highest for value in found):
        bounds = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{option} {text}: must be whole numbers {bounds}")
    return tuple(int(value) for value in found)
