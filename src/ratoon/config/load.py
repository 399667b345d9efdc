"""YAML file and `a.b=value` overrides in, one validated configuration out.

The file is YAML with three traps closed: `1e-5` is a number, a key given twice is an error, and
a date stays text. Overrides are parsed as YAML too. Relative paths are relative to the working
directory.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from ratoon.config.base import MustExist, Settings
from ratoon.config.explain import explain
from ratoon.errors import ConfigError

S = TypeVar("S", bound=Settings)


class _Loader(yaml.SafeLoader):
    """Safe YAML without PyYAML's three surprises; see the module's docstring."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; a key given twice is an error, not silently the last one."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"line {line} has a list or section as a key; give plain text")
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(f"key `{key}` is given twice, again in line {line}; keep one")
            seen.add(key)
        return super().construct_mapping(node, deep)


_INT, _FLOAT, _DATE = (f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp"))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT, _DATE)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(r"^[-+]?\d+(_\d+)*$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"^[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?$|^[-+]?\.inf$|^\.nan$"),
    list("-+.0123456789"),
)
# Python's own reading: PyYAML would take 010 for octal.
_Loader.add_constructor(_INT, lambda _, node: int(node.value))


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML; `source` names it in errors.

    Raises:
        ConfigError: the text is not YAML, or gives a key twice.
    """
    try:
        # _Loader derives from SafeLoader: it builds plain values only.
        return yaml.load(text, Loader=_Loader)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from None


def load_config(
    kind: type[S],
    path: Path,
    overrides: Sequence[str] = (),
    *,
    may_miss: Collection[str] | None = (),
) -> S:
    """Read `path`, apply `overrides`, validate, and check that all named files exist.

    Files and folders that the keys `may_miss` name need not exist; None is for all keys.

    Raises:
        ConfigError: missing file, bad YAML, unknown key, wrong type or range, contradiction.
    """
    values = parse_yaml(_read_text(path), str(path))
    if not isinstance(values, dict):
        found = "nothing" if values is None else type(values).__name__
        raise ConfigError(f"{path} must hold `key: value` lines, but holds {found}")
    apply_overrides(kind, values, overrides)
    config = build_config(kind, values, source=str(path))
    if may_miss is not None:
        check_files(config, may_miss)
    return config


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"configuration file {path} does not exist") from None
    except IsADirectoryError:
        raise ConfigError(
            f"configuration file {path} is a directory; give a YAML file, such as one of recipes/"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"configuration file {path} cannot be read ({error.strerror}); give a readable file"
        ) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"configuration file {path} is not UTF-8 text (byte {error.object[error.start]:#04x} "
            f"in line {line}); save it as UTF-8"
        ) from None


def build_config(kind: type[S], values: Mapping[str, Any], source: str = "configuration") -> S:
    """Validate plain values (as YAML gives them) into a configuration of class `kind`.

    Raises:
        ConfigError: naming each wrong key, its value and what is allowed.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = explain(kind, values, error.errors(include_url=False))
        raise ConfigError("\n".join([f"{source}:", *(f"  {p}" for p in problems)])) from None


def apply_overrides(kind: type[Settings], values: dict[str, Any], overrides: Sequence[str]) -> None:
    """Write each `a.b=value` into `values`; list items are addressed by index, as in `rewards.0`.

    `section.enabled=false` also drops what the file says about that section and about the
    sections that only serve it, so that one override switches a feature off.

    Raises:
        ConfigError: an override is not of the form `a.b=value`, or leads through a plain value.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key or not all(key.split(".")):
            raise ConfigError(f"override `{override}` must look like `section.key=value`")
        value = parse_yaml(text, f"override `{override}`")
        _set(values, key, value)
        section, _, last = key.rpartition(".")
        if last == "enabled" and value is False and section:
            _set(values, section, {"enabled": False})
            for dependent in getattr(kind, "serves", {}).get(section, ()):
                values.pop(dependent, None)


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    node: Any = values
    for i, part in enumerate(parents):
        if isinstance(node, list):
            node = _item(node, part, key)
        else:
            if node.get(part) is None:
                node[part] = {}
            node = node[part]
        if not isinstance(node, dict | list):
            raise ConfigError(
                f"override `{key}`: `{'.'.join(parents[: i + 1])}` is the plain value {node!r} "
                "and holds no keys"
            )
    if isinstance(node, list):
        _item(node, last, key)
        node[int(last)] = value
    else:
        node[last] = value


def _item(items: list[Any], part: str, key: str) -> Any:
    if not part.isdigit() or int(part) >= len(items):
        raise ConfigError(
            f"override `{key}`: `{part}` must be an index from 0 to {len(items) - 1} of the list"
        )
    return items[int(part)]


def check_files(config: Settings, may_miss: Collection[str] = ()) -> None:
    """Check every path that must exist, but for those of the keys `may_miss`.

    Raises:
        ConfigError: naming the key, the path and what to do.
    """
    problems = [
        f"`{key}` = {str(path)!r} {problem}"
        for key, path, rule in _paths(config, "")
        if (problem := rule.problem(path)) and not (key in may_miss and not path.exists())
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _paths(value: Any, key: str) -> Iterator[tuple[str, Path, MustExist]]:
    if isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            item = getattr(value, name)
            inner = f"{key}.{name}" if key else name
            for rule in _rules(field):
                if isinstance(item, Path):
                    yield inner, item, rule
            yield from _paths(item, inner)
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _paths(item, f"{key}.{i}")


def _rules(field: Any) -> list[MustExist]:
    """Find the marks of a field, also those inside `X | None`."""
    found = [m for m in field.metadata if isinstance(m, MustExist)]
    for member in getattr(field.annotation, "__args__", ()):
        found += [m for m in getattr(member, "__metadata__", ()) if isinstance(m, MustExist)]
    return found


def resolved_yaml(config: Settings) -> str:
    """Every setting of `config`, defaults included, as YAML that loads to the same value."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
