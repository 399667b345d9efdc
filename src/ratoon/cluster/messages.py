"""What the driver and its workers say to each other. Plain values over private pipes.

A worker answers every `Call` with one `Returned`, in order. While it decodes or trains it also
sends news of its own accord: `Responses`, `DrafterPublished`. A worker that fails sends `Failed`
and ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ratoon.coordinator.pace import Report
from ratoon.records import Completion, Request


@dataclass(frozen=True, slots=True)
class Call:
    """Run a method of the worker that is marked as callable."""

    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Returned:
    """The answer to a `Call`."""

    method: str
    value: Any


@dataclass(frozen=True, slots=True)
class Generate:
    """Responses to generate, behind those handed out before. Has no answer but the responses."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Responses:
    """Finished responses, what the worker's drafter buffer holds by now, and what all that took."""

    completions: tuple[Completion, ...]
    trainable_tokens: int
    report: Report


@dataclass(frozen=True, slots=True)
class DrafterPublished:
    """New drafter weights lie in a slot of the exchange."""

    version: int
    checksum: str
    slot: int


@dataclass(frozen=True, slots=True)
class TakeDrafter:
    """Draft with the weights in a slot from the next step on. Has no answer.

    Raises in the worker: StaleVersionError if the checksum of the slot is another.
    """

    version: int
    checksum: str
    slot: int


@dataclass(frozen=True, slots=True)
class SpotResult:
    """What one session of drafter training did; the answer to `stop_spot`.

    `ended_s` is when the session ended, on the machine's monotonic clock. `acceptance` is the mean
    share of drawn drafts that would be accepted, by unroll depth. `rested_s` is the time that it
    left to others between pieces of work.
    """

    tokens: int
    steps: int
    published: int
    loss: float | None
    acceptance: tuple[float, ...]
    ended_s: float
    rested_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker ends: the exception, its traceback as text, and when, on the monotonic clock."""

    error: BaseException
    traceback: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End the worker."""
