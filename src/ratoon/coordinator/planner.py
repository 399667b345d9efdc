"""Who gets which responses to generate, and when: one interface, and the ways that predict nothing.

A planner proposes and is told what happened; it reads no clock. No proposal can change a token: a
response is a function of its prompt and key, wherever it is drawn.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ratoon.coordinator.lengths import Uid


@dataclass(frozen=True, slots=True)
class Work:
    """A group of responses to one prompt, as much as a planner knows of it beforehand.

    Example: `Work(uid=("jsonl/train", 41), prompt_tokens=60, size=8, max_tokens=512)`
    """

    uid: Uid
    prompt_tokens: int
    size: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class HandOut:
    """Give a worker these members of a group: behind what it has, if its slots are all taken."""

    worker: int
    group: int
    members: tuple[int, ...]


class Planner(Protocol):
    """Proposes hand-outs for one rollout. A worker decodes up to `slots` responses at once.

    All times are seconds of one clock, told by the caller. `work` are the groups by number.
    """

    @property
    def queued(self) -> int:
        """Responses that nobody has."""
        ...

    def next(self, now: float) -> HandOut | None:
        """The next hand-out, or None until something happens. Changes nothing."""
        ...

    def handed(self, hand: HandOut, now: float) -> None:
        """A proposal was carried out."""
        ...

    def finished(self, worker: int, group: int, tokens: int) -> None:
        """A worker has finished a response."""
        ...

    def returned(self, worker: int, group: int, members: tuple[int, ...]) -> None:
        """A worker was lost before it finished these; call `close` first."""
        ...

    def close(self, worker: int) -> None:
        """A worker cannot decode from here on."""
        ...

    def open(self, worker: int) -> None:
        """A worker can decode again."""
        ...


class Ranking:
    """Workers by a key that changes, the least first."""

    def __init__(self) -> None:
        self._sorted: list[tuple[float, int]] = []
        self._keys: dict[int, float] = {}

    def __iter__(self) -> Iterator[int]:
        return (worker for _, worker in self._sorted)

    def __contains__(self, worker: int) -> bool:
        return worker in self._keys

    def put(self, worker: int, key: float) -> None:
        """Add a worker, or give it another key."""
        self.remove(worker)
        insort(self._sorted, (key, worker))
        self._keys[worker] = key

    def remove(self, worker: int) -> None:
        """Take a worker out, if it is there."""
        key = self._keys.pop(worker, None)
        if key is not None:
            del self._sorted[bisect_left(self._sorted, (key, worker))]


class FirstCome:
    """Whole groups in the order of the data, each to the worker with the most free slots.

    A group larger than a worker's slots goes to a worker with nothing to do.
    """

    def __init__(self, work: Sequence[Work], num_workers: int, slots: int) -> None:
        self._slots = slots
        self._queue = deque((group, tuple(range(item.size))) for group, item in enumerate(work))
        self._unfinished = [0] * num_workers
        self._able = Ranking()
        self.queued = sum(item.size for item in work)
        for worker in range(num_workers):
            self._able.put(worker, 0)

    def next(self, now: float) -> HandOut | None:
        """See `Planner.next`."""
        best = next(iter(self._able), None)
        if best is None or not self._queue:
            return None
        group, members = self._queue[0]
        has = self._unfinished[best]
        if has == 0 or has + len(members) <= self._slots:
            return HandOut(best, group, members)
        return None

    def handed(self, hand: HandOut, now: float) -> None:
        """See `Planner.handed`."""
        self._queue.popleft()
        self.queued -= len(hand.members)
        self._add(hand.worker, len(hand.members))

    def finished(self, worker: int, group: int, tokens: int) -> None:
        """See `Planner.finished`."""
        self._add(worker, -1)

    def returned(self, worker: int, group: int, members: tuple[int, ...]) -> None:
        """See `Planner.returned`."""
        self._queue.appendleft((group, members))
        self.queued += len(members)
        self._unfinished[worker] -= len(members)

    def close(self, worker: int) -> None:
        """See `Planner.close`."""
        self._able.remove(worker)

    def open(self, worker: int) -> None:
        """See `Planner.open`."""
        self._able.put(worker, self._unfinished[worker])

    def _add(self, worker: int, count: int) -> None:
        self._unfinished[worker] += count
        if worker in self._able:
            self._able.put(worker, self._unfinished[worker])


class Static:
    """The data split in advance: each worker has equally many neighbouring groups, all at once.

    What a lost worker leaves goes to the others in turn.
    """

    def __init__(self, work: Sequence[Work], num_workers: int, slots: int) -> None:
        share = -(-len(work) // num_workers)
        self._queue = deque(
            (group // share, group, tuple(range(item.size))) for group, item in enumerate(work)
        )
        self._able = set(range(num_workers))
        self._turn = 0
        self._num_workers = num_workers
        self.queued = sum(item.size for item in work)

    def next(self, now: float) -> HandOut | None:
        """See `Planner.next`."""
        if not self._queue or not self._able:
            return None
        worker, group, members = self._queue[0]
        if worker not in self._able:
            turns = ((self._turn + step) % self._num_workers for step in range(self._num_workers))
            worker = next(other for other in turns if other in self._able)
        return HandOut(worker, group, members)

    def handed(self, hand: HandOut, now: float) -> None:
        """See `Planner.handed`."""
        self._queue.popleft()
        self.queued -= len(hand.members)
        self._turn = hand.worker + 1

    def finished(self, worker: int, group: int, tokens: int) -> None:
        """Changes nothing: all was handed out in advance."""

    def returned(self, worker: int, group: int, members: tuple[int, ...]) -> None:
        """See `Planner.returned`."""
        self._queue.append((worker, group, members))
        self.queued += len(members)

    def close(self, worker: int) -> None:
        """See `Planner.close`."""
        self._able.discard(worker)

    def open(self, worker: int) -> None:
        """See `Planner.open`."""
        self._able.add(worker)
