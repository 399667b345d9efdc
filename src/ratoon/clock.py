"""An injected clock, so that code that decides by time can be tested without sleeping."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some fixed moment; never goes backwards."""

    def now(self) -> float:
        """Return the current time in seconds."""
        ...


class MonotonicClock:
    """The machine's monotonic clock; the same for all processes of one machine."""

    def now(self) -> float:
        """Return seconds since an arbitrary moment that all processes share."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to, for tests and simulations."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """Return the time it was last moved to, in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` (>= 0).

        Raises:
            ValueError: `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: advance({seconds})")
        self._now += seconds
