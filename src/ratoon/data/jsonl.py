"""Files with one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ratoon.errors import DataError

# Values are whatever JSON holds.
Row = dict[str, Any]


def read_lines_of(path: Path) -> Iterator[tuple[int, Row]]:
    """Rows with their index; blank lines are skipped and still count.

    Row 0 is the first line, so a row's index never depends on the rows before it.

    Raises:
        DataError: if the file is missing, or a line is no JSON object.
    """
    try:
        with path.open("rb") as file:
            for index, data in enumerate(file):
                line = _decoded(data, path, index)
                if line.strip():
                    yield index, _parse(line, path, index)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file. Expected one JSON object a line.") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from None


def _decoded(data: bytes, path: Path, index: int) -> str:
    try:
        return data.decode("utf-8" if index else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, row {index} (line {index + 1}): is not UTF-8 text (byte "
            f"{data[error.start]:#04x}); save the file as UTF-8."
        ) from None


def _parse(line: str, path: Path, index: int) -> Row:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, row {index} (line {index + 1}): not valid JSON: {error.msg} at column "
            f"{error.colno}. Expected one JSON object a line."
        ) from None
    if not isinstance(value, dict):
        raise DataError(
            f"{path}, row {index} (line {index + 1}): holds a {type(value).__name__}, expected an "
            'object such as {"prompt": ..., "answer": ...}.'
        )
    return value
