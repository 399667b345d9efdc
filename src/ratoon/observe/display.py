"""What a run tells whoever watches it. Plain calls; the terminal is one implementation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ratoon.observe.sinks import Values

Status = Mapping[str, str | int | float]


class Display(Protocol):
    """Shows progress. All calls are cheap and never fail a run.

    `status` keys that have a place of their own: `worker/<n>` (an activity of the timeline),
    `live_batch`, `finished`, `total` (responses), `acceptance_length`, `drafter_version`,
    `update_frac` (share of the update that is done, 0 to 1).
    """

    def phase(self, name: str, total: int | None = None, *, done: int = 0) -> None:
        """Begin a phase of `total` steps (None: unknown), `done` of them already, by a resume.

        Ends the phase before it.
        """
        ...

    def step(self, step: int, values: Values) -> None:
        """Show that `step` steps of the phase are done, with the metrics of the last."""
        ...

    def status(self, values: Status) -> None:
        """Show what is going on inside a step; replaces earlier values of the same keys."""
        ...

    def note(self, text: str) -> None:
        """Say something that must not be overlooked, such as a fallback."""
        ...

    def close(self, *, succeeded: bool = True) -> None:
        """End the display and leave the terminal as it was."""
        ...


class Silent:
    """Shows nothing: for tests and libraries."""

    def phase(self, name: str, total: int | None = None, *, done: int = 0) -> None:
        """Ignore it."""

    def step(self, step: int, values: Values) -> None:
        """Ignore it."""

    def status(self, values: Status) -> None:
        """Ignore it."""

    def note(self, text: str) -> None:
        """Ignore it."""

    def close(self, *, succeeded: bool = True) -> None:
        """Do nothing."""
