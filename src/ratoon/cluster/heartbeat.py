"""Signs of life: a worker touches a file of its own, and the driver looks how long ago.

The file's time is the machine's monotonic clock, so neither a changed wall clock nor a suspended
machine looks like a lost worker. A stopped process (SIGSTOP, a frozen container) stops beating.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

_EVERY_S = 1.0


def start_beating(folder: Path, index: int) -> None:
    """Beat in the background for as long as this process lives."""
    path = _path(folder, index)
    path.touch()

    def beat() -> None:
        never = threading.Event()
        # Until the driver removes the folder.
        with contextlib.suppress(FileNotFoundError):
            while True:
                now = time.monotonic_ns()
                os.utime(path, ns=(now, now))
                never.wait(_EVERY_S)

    threading.Thread(target=beat, name="ratoon-heartbeat", daemon=True).start()


def silent_s(folder: Path, index: int) -> float:
    """Seconds since the worker's last beat; 0 before its first."""
    try:
        beaten = _path(folder, index).stat().st_mtime_ns
    except FileNotFoundError:
        return 0.0
    # A file that was touched and not yet beaten has the time of the wall clock, in the future.
    return max(0.0, (time.monotonic_ns() - beaten) / 1e9)


def forget(folder: Path, index: int) -> None:
    """Remove what a worker that has ended leaves."""
    _path(folder, index).unlink(missing_ok=True)


def _path(folder: Path, index: int) -> Path:
    return folder / f"alive_{index}"
