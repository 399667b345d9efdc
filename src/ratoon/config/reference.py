"""The reference of all settings as Markdown, written from the classes themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ratoon.config import CONFIGS

_HEAD = """# Configuration

Written by `python docs/generate_configuration.py` from the classes in `src/ratoon/config`; edit
those. Every key can be given in the YAML file or on the command line as `section.key=value`.
Relative paths are relative to the working directory. A setting that would have no effect in a
run is an error. `section.enabled=false` on the command line also drops what the file says about
that section.
"""


def markdown() -> str:
    """The whole reference, one chapter for each command."""
    chapters = [_HEAD]
    for command, config in CONFIGS.items():
        chapters.append(f"\n## `ratoon {command} CONFIG`\n\n{config.__doc__}\n")
        chapters.extend(_tables(config, ""))
    return "".join(chapters)


def _tables(section: type[BaseModel], prefix: str) -> Iterator[str]:
    fields = {n: f for n, f in section.model_fields.items() if n != "kind"}
    plain = [(n, f) for n, f in fields.items() if not _inner(f)]
    if plain:
        yield "\n| key | default | allowed | meaning |\n| --- | --- | --- | --- |\n"
        for name, field in plain:
            cells = (f"`{prefix}{name}`", _default(field), _allowed(field), field.description or "")
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
    described: dict[tuple[type[BaseModel], ...], str] = {}
    for name, field in fields.items():
        inner = _inner(field)
        if not inner:
            continue
        key = prefix + name
        is_list = "tuple" in str(field.annotation)
        yield f"\n### `{key}`{' (a list)' if is_list else ''}\n\n{field.description}\n"
        if (twin := described.setdefault(tuple(inner), key)) != key:
            yield f"\nThe same settings as `{twin}`.\n"
            continue
        if len(inner) == 1:
            yield from _tables(inner[0], key + ".")
            continue
        for choice in inner:
            kind = choice.model_fields["kind"].default
            yield f"\n**`kind: {kind}`**: {' '.join((choice.__doc__ or '').split())}\n"
            yield from _tables(choice, f"{key}{'.0' if is_list else ''}.")


def _inner(field: FieldInfo) -> list[type[BaseModel]]:
    """Classes of the section or sections that a field holds."""
    found: list[type[BaseModel]] = []

    def visit(annotation: Any) -> None:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            found.append(annotation)
        for member in getattr(annotation, "__args__", ()):
            visit(member)

    visit(field.annotation)
    return found


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return f"`{_yaml(field.get_default(call_default_factory=True))}`"


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(_yaml(item) for item in value) + "]"
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-")
    return str(value) if not isinstance(value, Path) else value.as_posix()


_SIGNS = {Ge: (">=", "ge"), Gt: (">", "gt"), Le: ("<=", "le"), Lt: ("<", "lt")}


def _allowed(field: FieldInfo) -> str:
    words = [_type_words(field.annotation)]
    members = getattr(field.annotation, "__args__", ())
    inner = [m for member in members for m in getattr(member, "__metadata__", ())]
    for rule in [*field.metadata, *inner]:
        for kind, (sign, attribute) in _SIGNS.items():
            if isinstance(rule, kind):
                bound = getattr(rule, attribute)
                words.append(f"{sign} {'2^63' if bound == 2**63 else bound}")
        if isinstance(rule, MinLen):
            words.append(f"at least {rule.min_length}")
        if isinstance(rule, MaxLen):
            words.append(f"at most {rule.max_length} characters")
        if (pattern := getattr(rule, "pattern", None)) is not None:
            words.append(f"matches `{pattern}`")
    return ", ".join(words)


_TYPES = {int: "integer", float: "number", bool: "true or false", str: "text", Path: "path"}


def _type_words(annotation: Any) -> str:
    if annotation in _TYPES:
        return _TYPES[annotation]
    if annotation is type(None):
        return "null"
    arguments = getattr(annotation, "__args__", ())
    origin = str(getattr(annotation, "__origin__", annotation))
    if "Literal" in origin:
        return ", ".join(f"`{value}`" for value in arguments)
    if "tuple" in origin:
        items = [a for a in arguments if a is not Ellipsis]
        return f"list of {_type_words(items[0])}" + (f" ({len(items)})" if len(items) > 1 else "")
    if "dict" in origin:
        return "mapping"
    if hasattr(annotation, "__metadata__"):
        return _type_words(annotation.__origin__)
    return " or ".join(_type_words(a) for a in arguments)
