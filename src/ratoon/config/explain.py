"""Validation errors as a user reads them: the key, the value, what is allowed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails


def explain(
    kind: type[BaseModel], values: Mapping[str, Any], details: list[ErrorDetails]
) -> list[str]:
    """One line for each thing that is wrong with `values`, which should make a `kind`."""
    return [_describe(kind, values, detail) for detail in _root_causes(details)]


def _describe(kind: type[BaseModel], values: Mapping[str, Any], detail: ErrorDetails) -> str:
    key, siblings = _locate(values, detail["loc"])
    problem = detail["type"]
    shown = _short(detail["input"])
    message = detail["msg"].removeprefix("Value error, ")
    if problem == "extra_forbidden":
        return f"`{key}` = {shown}: unknown key{_suggestion(kind, detail['loc'], siblings)}"
    if problem == "missing":
        return f"`{key}` is required{_purpose(kind, detail['loc'])}"
    if problem.startswith("union_tag"):
        allowed = detail.get("ctx", {}).get("expected_tags", "those in the reference")
        return f"`{key}` = {shown}: needs `kind`, one of {allowed}"
    if problem == "value_error":
        return message if not key or message.startswith(key) else f"`{key}`: {message}"
    if problem in ("model_type", "model_attributes_type", "dict_type"):
        keys = _keys(kind, detail["loc"])
        return f"`{key}` = {shown}: must be a section of `key: value` lines{keys}"
    if problem == "too_short":
        return f"`{key}` = {shown}: needs at least {detail['ctx']['min_length']} item(s)"
    return f"`{key}` = {shown}: {re.sub(r'^(Input|String|Value) should', 'must', message)}"


def _root_causes(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Leave out lists that are too short only because an item of theirs is wrong."""
    locations = [detail["loc"] for detail in details]
    return [
        detail
        for detail in details
        if detail["type"] != "too_short"
        or not any(
            len(loc) > len(detail["loc"]) and loc[: len(detail["loc"])] == detail["loc"]
            for loc in locations
        )
    ]


def _locate(values: Any, loc: Sequence[int | str]) -> tuple[str, Any]:
    """Turn pydantic's location into a key path, leaving out the names of union members.

    Also returns the values beside the key.
    """
    parts: list[str] = []
    node = values
    for i, part in enumerate(loc):
        is_last = i == len(loc) - 1
        if isinstance(node, Mapping) and part not in node and part == node.get("kind"):
            continue
        parts.append(str(part))
        if is_last:
            break
        if isinstance(node, Mapping):
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
    return ".".join(parts), node


def _section(kind: type[BaseModel], loc: Sequence[int | str]) -> type[BaseModel] | None:
    """Class of the section that holds the last part of `loc`."""
    section: type[BaseModel] | None = kind
    candidates: list[type[BaseModel]] = [kind]
    for part in loc[:-1]:
        if section is not None and isinstance(part, str) and part in section.model_fields:
            candidates = list(_models(section.model_fields[part].annotation))
            section = candidates[0] if len(candidates) == 1 else None
        elif isinstance(part, str):
            tagged = [c for c in candidates if c.model_fields["kind"].default == part]
            section = tagged[0] if tagged else None
    return section


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for member in getattr(annotation, "__args__", ()):
        yield from _models(member)


def _suggestion(kind: type[BaseModel], loc: Sequence[int | str], siblings: Any) -> str:
    section = _section(kind, loc)
    if section is None:
        return ""
    allowed = list(section.model_fields)
    elsewhere = sorted(
        (path for path in _key_paths(kind) if path.rpartition(".")[2] == loc[-1]),
        key=lambda path: path.count("."),
    )
    near = difflib.get_close_matches(str(loc[-1]), allowed, n=1, cutoff=0.6) or elsewhere
    hint = f"; did you mean `{near[0]}`?" if near else "."
    free = [name for name in allowed if not isinstance(siblings, Mapping) or name not in siblings]
    return f"{hint} Keys not yet set here: {', '.join(free) or 'none'}"


def _key_paths(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        inner = list(_models(field.annotation))
        if len(inner) == 1:
            yield from _key_paths(inner[0], f"{prefix}{name}.")


def _purpose(kind: type[BaseModel], loc: Sequence[int | str]) -> str:
    section = _section(kind, loc)
    field = section.model_fields.get(str(loc[-1])) if section else None
    return f": {field.description}" if field and field.description else ""


def _keys(kind: type[BaseModel], loc: Sequence[int | str]) -> str:
    section = _section(kind, [*loc, ""])
    return f", with keys of {', '.join(section.model_fields)}" if section else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
