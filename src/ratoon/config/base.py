"""The strict base of all settings, and the few checks that several of them share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Base of every configuration section: unknown keys, wrong types and changes are errors."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    def changed_keys(self) -> list[str]:
        """Names of the fields whose value differs from the default, in the order of the class.

        A field that is spelt out but equal to its default does not count, so that a resolved
        configuration, which spells out everything, can be loaded again.
        """
        return [
            name
            for name, field in type(self).model_fields.items()
            if not field.is_required()
            and getattr(self, name) != field.get_default(call_default_factory=True)
        ]


class MustExist:
    """Marks a path that is checked when a configuration is loaded for work."""

    def __init__(self, kind: Literal["file", "directory"], advice: str) -> None:
        self.kind = kind
        self.advice = advice

    def problem(self, path: Path) -> str | None:
        """Say what is wrong with `path`, or None."""
        if self.kind == "file" and path.is_file():
            return None
        if self.kind == "directory" and path.is_dir():
            return None
        found = "is something else" if path.exists() else "does not exist"
        return f"must be an existing {self.kind}, but it {found}; {self.advice}"


# The only leniencies of the strict base: YAML has text for paths and lists for tuples.
PathText = Annotated[Path, Field(strict=False)]
T = TypeVar("T")
Items = Annotated[tuple[T, ...], Field(strict=False)]
Pair = Annotated[tuple[T, T], Field(strict=False)]

ExistingFile = Annotated[PathText, MustExist("file", "paths are relative to the working directory")]
ModelDirectory = Annotated[
    PathText,
    MustExist("directory", "fetch a model with `ratoon models fetch smollm2-135m`"),
]
DrafterDirectory = Annotated[
    PathText,
    MustExist("directory", "give the `drafter` folder of a checkpoint, or null to start afresh"),
]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


def require(condition: bool, message: str) -> None:
    """Raise what pydantic reports as a cross-check that failed.

    Raises:
        ValueError: `condition` is false.
    """
    if not condition:
        raise ValueError(message)


def forbid_without_effect(section: str, settings: Settings, reason: str, *keep: str) -> None:
    """Refuse settings that change nothing in this run; `keep` names those that still matter.

    Raises:
        ValueError: a field other than `keep` differs from its default.
    """
    idle = [f"{section}.{key}" for key in settings.changed_keys() if key not in keep]
    require(
        not idle,
        f"{', '.join(idle)} would have no effect because {reason}; remove it or change that",
    )
