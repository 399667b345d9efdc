"""The planner that predicts: longest first, to whom it suits, in step with measured speeds.

A worker is handed work when it has a free slot, so nothing has to be taken back: the longest group
that it will finish before the rollout ends anyway. On a slow worker that is a shorter one, and near
the end none. Groups stay whole, since each part computes the prompt again, until the wait for slots
would cost more than that.

Source: longest processing time first (Graham 1969) on machines of unequal speed; which lengths are
predicted from, and when a group is split, is ours.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence

from ratoon.coordinator.lengths import LengthModel
from ratoon.coordinator.pace import Pace
from ratoon.coordinator.planner import HandOut, Ranking, Work

# A worker this much slower than the fastest is not worth waiting for; measurements err by as much.
_TOLERANCE = 1.1
# Of what a step costs anyway: live sequences are taken to cost at least so much each. Less is
# within the error of a line through noisy times, and would leave a worker idle that seems a little
# slower, of which then nothing more is learned.
_LEAST_SHARE = 1 / 16


class LongestFirst:
    """See `Planner`. `lengths` and `pace` are read, never changed."""

    def __init__(
        self,
        work: Sequence[Work],
        num_workers: int,
        slots: int,
        lengths: LengthModel,
        pace: Pace,
    ) -> None:
        self._work, self._slots = work, slots
        self._lengths, self._pace = lengths, pace
        self._predicted = [self._predict(group) for group in range(len(work))]
        # Ascending, so that the longest goes cheaply; of equals the first of the data is last.
        self._queue: list[tuple[float, int]] = []
        self._members: dict[int, tuple[int, ...]] = {}
        self.queued = 0
        self._queued_tokens = 0.0
        for group, item in enumerate(work):
            self._put(group, tuple(range(item.size)))
        self._all_tokens = self._queued_tokens
        self._at_once = self.queued <= slots * num_workers
        self._live = max(1, min(slots, -(-self.queued // num_workers)))
        self._unfinished = [0] * num_workers
        # Predicted tokens of what a worker has, and the longest of it.
        self._tokens = [0.0] * num_workers
        self._longest = [0.0] * num_workers
        self._able = set(range(num_workers))
        self._free = Ranking()
        self._ends = -math.inf
        self._refresh()
        for worker in range(num_workers):
            self._rank(worker)

    def next(self, now: float) -> HandOut | None:
        """See `Planner.next`."""
        if not self._queue:
            return None
        horizon = self._horizon(now)
        too_slow = math.inf
        for worker in self._free:
            if self._slow[worker] >= too_slow:
                continue
            place = bisect_left(self._queue, (horizon / self._seconds(worker, 1.0), 1))
            if place:
                group = -self._queue[place - 1][1]
                members = self._members[group]
                count = self._count(worker, group, len(members), horizon)
                return HandOut(worker, group, members[:count])
            too_slow = self._slow[worker]
        return None

    def handed(self, hand: HandOut, now: float) -> None:
        """See `Planner.handed`."""
        worker, group, count = hand.worker, hand.group, len(hand.members)
        length = self._predicted[group]
        rest = self._pull(group)[count:]
        if rest:
            self._put(group, rest)
        if self._pace.is_measured:
            waiting = max(0, self._unfinished[worker] + count - self._slots)
            ends = now + self._wait(worker, waiting) + self._seconds(worker, length)
            self._ends = max(self._ends, ends)
        self._unfinished[worker] += count
        self._tokens[worker] += count * length
        self._longest[worker] = max(self._longest[worker], length)
        self._rank(worker)

    def finished(self, worker: int, group: int, tokens: int) -> None:
        """See `Planner.finished`. Siblings that still wait are predicted again."""
        self._drop(worker, group, 1)
        if group in self._members:
            members = self._pull(group)
            self._predicted[group] = self._predict(group)
            self._put(group, members)
        self._news += 1
        if self._news >= len(self._unfinished):
            self._refresh()
        self._rank(worker)

    def returned(self, worker: int, group: int, members: tuple[int, ...]) -> None:
        """See `Planner.returned`."""
        self._drop(worker, group, len(members))
        self._put(group, members + (self._pull(group) if group in self._members else ()))

    def close(self, worker: int) -> None:
        """See `Planner.close`."""
        self._able.discard(worker)
        self._free.remove(worker)
        self._refresh()

    def open(self, worker: int) -> None:
        """See `Planner.open`."""
        self._able.add(worker)
        self._refresh()
        self._rank(worker)

    def _predict(self, group: int) -> float:
        item = self._work[group]
        return self._lengths.predict(item.uid, item.prompt_tokens, item.max_tokens)

    def _put(self, group: int, members: tuple[int, ...]) -> None:
        length = self._predicted[group]
        self._members[group] = members
        insort(self._queue, (length, -group))
        self._queued_tokens += length * len(members)
        self.queued += len(members)

    def _pull(self, group: int) -> tuple[int, ...]:
        length, members = self._predicted[group], self._members.pop(group)
        del self._queue[bisect_left(self._queue, (length, -group))]
        self._queued_tokens -= length * len(members)
        self.queued -= len(members)
        return members

    def _drop(self, worker: int, group: int, count: int) -> None:
        self._unfinished[worker] -= count
        self._tokens[worker] = max(0.0, self._tokens[worker] - count * self._predicted[group])
        if self._unfinished[worker] == 0:
            self._tokens[worker] = self._longest[worker] = 0.0

    def _rank(self, worker: int) -> None:
        """Order workers with a free slot by when they would be done with the next group too."""
        if worker not in self._able or self._unfinished[worker] >= self._slots:
            self._free.remove(worker)
            return
        head = self._queue[-1][0] if self._queue else 0.0
        fixed, each = self._step
        each = max(each, _LEAST_SHARE * fixed)
        tokens, longest = self._tokens[worker] + head, max(self._longest[worker], head)
        self._free.put(worker, self._slow[worker] * (fixed * longest + each * tokens))

    def _refresh(self) -> None:
        """Read the measured speeds: not at every event, since they concern all workers."""
        self._news = 0
        self._slow = [self._pace.slowness(worker) for worker in range(len(self._unfinished))]
        self._step = self._pace.step()
        able = [self._slow[worker] for worker in self._able] or [1.0]
        self._best = min(able)
        self._speeds = sum(1 / value for value in able)

    def _seconds(self, worker: int, length: float) -> float:
        """Seconds that a worker takes for a response, with as many live as is usual."""
        return self._slow[worker] * self._token_s * length

    @property
    def _token_s(self) -> float:
        fixed, each = self._step
        return fixed + each * self._live

    def _wait(self, worker: int, waiting: int) -> float:
        """Seconds until so many slots have become free at a worker whose slots are taken."""
        if not waiting:
            return 0.0
        length = self._tokens[worker] / max(1, self._unfinished[worker])
        return self._seconds(worker, length) * waiting / self._slots

    def _horizon(self, now: float) -> float:
        """Seconds until the rollout can end at the earliest.

        What was handed out ends, the longest of the queue is drawn by the fastest worker, or the
        queue is worked off by all, and the last of it is drawn.
        """
        longest, shortest = self._queue[-1][0], self._queue[0][0]
        queue_s = self._queued_tokens * self._token_s / (self._live * self._speeds)
        fastest_s = self._best * self._token_s
        needed = max(longest * fastest_s, queue_s + shortest * fastest_s, self._ends - now)
        return _TOLERANCE * needed

    def _count(self, worker: int, group: int, size: int, horizon: float) -> int:
        """How many members of a group to hand out: all, unless splitting earns more than it costs.

        Another part computes the prompt once more.
        """
        free = self._slots - self._unfinished[worker]
        length = self._predicted[group]
        if self._at_once:
            share = self._all_tokens / (self._slow[worker] * self._speeds)
            part = max(1, round((share - self._tokens[worker]) / length))
            part = min(part, free, size)
            earned = (size - part) * length * self._step[1] * self._slow[worker]
        else:
            part = min(free, size)
            alone = self._seconds(worker, length)
            earned = self._wait(worker, size - part) + alone - max(horizon, alone)
        cost = self._work[group].prompt_tokens * self._pace.prefill_s()
        return part if part < size and earned > cost else size
