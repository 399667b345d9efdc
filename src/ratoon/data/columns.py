"""Reading mapped columns of a row: texts, numbers, conversations, nested or joined."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ratoon.errors import DataError

# Values are whatever the file holds.
Row = Mapping[str, Any]
Messages = tuple[Mapping[str, str], ...]


def text_of(row: Row, column: str, where: str) -> str:
    """The value of a column as text; numbers are written as JSON writes them.

    `column` may be a path into nested columns, such as `reward_model.ground_truth`.

    Raises:
        DataError: if the row lacks the column, or holds null, a list or an object there.
    """
    return _as_text(_value(row, column, where), column, where)


def answer_of(row: Row, column: str | None, where: str) -> str | None:
    """As `text_of`; None for null, or without a column."""
    if column is None or _value(row, column, where) is None:
        return None
    return text_of(row, column, where)


def said_in(row: Row, column: str | Sequence[str], where: str) -> str | Messages:
    """What a column says: text, or a conversation if it holds a list of messages.

    Several columns are joined by a space.

    Raises:
        DataError: as `text_of`, or if a message is none: `{"role": ..., "content": text}`.
    """
    if not isinstance(column, str):
        return " ".join(text_of(row, name, where).strip() for name in column)
    value = _value(row, column, where)
    if not isinstance(value, list | tuple):
        return _as_text(value, column, where)
    if not value:
        raise DataError(f"{where}: column {column!r} holds a conversation without messages.")
    return tuple(_message(item, column, where) for item in value)


def _value(row: Row, column: str, where: str) -> Any:
    if column in row:
        return row[column]
    node: Any = row
    for part in column.split("."):
        if not isinstance(node, Mapping) or part not in node:
            found = ", ".join(map(repr, row)) or "none"
            raise DataError(f"{where}: has no column {column!r}; columns found: {found}.")
        node = node[part]
    return node


def _as_text(value: Any, column: str, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise DataError(f"{where}: column {column!r} holds {_short(value)}, expected text or a number.")


def _message(value: Any, column: str, where: str) -> Mapping[str, str]:
    role, content = (
        (value.get("role"), value.get("content")) if isinstance(value, Mapping) else (None, None)
    )
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(
            f"{where}: column {column!r} holds the message {_short(value)}, expected an object "
            'like {"role": "user", "content": "text"}.'
        )
    return {"role": role, "content": content}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
