"""Small files that are never half written, and what tells files and values from others."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ratoon.errors import ConfigError, DataError


class FolderLock:
    """The right to write into a folder, which one process has at a time.

    It leaves no file behind and ends with the process, however that ends.

    Raises: ConfigError if another process has it.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise ConfigError(
                f"another process is writing into {folder}; wait until it has ended, or end it, "
                "and then resume"
            ) from None

    def release(self) -> None:
        """Let others write."""
        os.close(self._descriptor)


def check_target(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written, before the work that it is to hold.

    Raises: ConfigError that names the option.
    """
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(f"{option} {path}: must be a file in a folder that exists")


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`, whole or not at all, also when the machine stops midway."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """JSON without NaN or infinities.

    Raises:
        ValueError: the value holds one.
    """
    return json.dumps(value, allow_nan=False, ensure_ascii=False, indent=indent)


def digest(values: Any) -> str:
    """SHA-256 in hex of JSON values; what is none counts by its text."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def files_of(folder: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of change of a folder's files: what tells that they are others now."""
    files = sorted(file for file in folder.glob("*") if file.is_file())
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def write_lines(path: Path, rows: Iterable[Any]) -> None:
    """Write one JSON value a line, atomically."""
    write_atomically(path, "".join(to_json(row) + "\n" for row in rows))


def read_lines(path: Path, *keys: str) -> Iterator[dict[str, Any]]:
    """Read one JSON object a line, each with `keys`; an unfinished last line is left out.

    Raises:
        DataError: any other line is not such an object.
    """
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            value = json.loads(line.decode("utf-8"))
        except ValueError as error:
            if number == len(lines):
                return
            raise DataError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(value, dict) or not value.keys() >= set(keys):
            wanted = f"an object with {', '.join(keys)}" if keys else "an object"
            raise DataError(f"{path}, line {number}: must be {wanted}, but is {line[:60]!r}")
        yield value
