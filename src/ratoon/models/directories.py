"""Directories that appear whole or not at all."""

from __future__ import annotations

import errno
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ratoon.errors import CheckpointError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def refuse_occupied(destination: Path) -> None:
    """Raise `CheckpointError` if `destination` is a file or a directory that holds something."""
    if destination.is_dir() and not any(destination.iterdir()):
        return
    if destination.exists() or destination.is_symlink():
        raise CheckpointError(
            f"{destination} already exists and is left as it is. "
            "Give another path, or remove it first."
        )


@contextmanager
def whole_directory(destination: Path, needed_bytes: int = 0) -> Iterator[Path]:
    """A temporary directory beside `destination` that takes its name when the block succeeds.

    When the block raises, or the process dies, `destination` is as it was before; a directory
    that a killed process leaves behind is hidden and ends in `.part`.

    Raises:
        CheckpointError: if `destination` holds something, if less than `needed_bytes` are free,
            or if the disk fills up on the way.
    """
    refuse_occupied(destination)
    part: Path | None = None
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        require_free(destination.parent, needed_bytes)
        fresh = destination.parent / f".{destination.name}-{uuid.uuid4().hex[:8]}.part"
        fresh.mkdir()
        part = fresh
        yield part
        part.replace(destination)
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise CheckpointError(
                f"{destination}: the disk is full ({error.strerror}). Nothing was written there; "
                "free some space and run again."
            ) from error
        raise CheckpointError(f"{destination}: cannot be written ({error}).") from error
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)


def require_free(directory: Path, needed_bytes: int) -> None:
    """Raise `CheckpointError` if the file system of `directory` has less than `needed_bytes`."""
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise CheckpointError(
            f"{directory}: {needed_bytes / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB are free. "
            "Free some space, or give a path on another disk."
        )
