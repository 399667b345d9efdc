"""Files with one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ratoon.errors import DataError

# Values are whatever JSON holds.
Row = dict[str, Any]


def read_rows(path: Path, limit: int | None = None) -> Iterator[tuple[int, Row]]:
    """Rows with their index; blank lines are skipped and still count.

    Row 0 is the first line, so a row's index never depends on the rows before it.

    Raises:
        DataError: if the file is missing, holds no row, or a line is no JSON object.
    """
    found = 0
    try:
        with path.open("rb") as file:
            for index, data in enumerate(file):
                if limit is not None and found == limit:
                    return
                line = _decoded(data, path, index)
                if line.strip():
                    found += 1
                    yield index, _parse(line, path, index)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file. Expected one JSON object a line.") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from None
    if found == 0:
        raise DataError(f"{path}: holds no rows. Expected one JSON object a line.")


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


def text_of(row: Row, column: str, path: Path, index: int) -> str:
    """The value of a column as text; numbers are written as JSON writes them.

    Raises:
        DataError: if the row lacks the column, or holds null, a list or an object there.
    """
    where = f"{path}, row {index} (line {index + 1})"
    if column not in row:
        found = ", ".join(map(repr, row)) or "none"
        raise DataError(f"{where}: has no column {column!r}; columns found: {found}.")
    value = row[column]
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise DataError(f"{where}: column {column!r} holds {value!r}, expected text or a number.")
