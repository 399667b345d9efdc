"""A simulated worker: it decodes what it has at the table's speed, and computes prompts before."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from ratoon.coordinator.coordinator import Task
from ratoon.coordinator.pace import Report


class Machine:
    """One worker's slots. Between two events all live sequences grow at the same speed."""

    def __init__(
        self, slots: int, slowness: float, table: Sequence[float], prompt_s: float
    ) -> None:
        self._slots, self._slowness, self._prompt_s = slots, slowness, prompt_s
        self._table = table
        # Tokens that each live sequence has grown by so far, and at how many each of them ends.
        self._grown = 0.0
        self._ends: list[tuple[float, Task]] = []
        self._waiting: deque[tuple[Task, int]] = deque()
        # Prompts under computation end here; until then nothing grows.
        self._since = 0.0
        self._seconds = self._row_seconds = self._unsaid = 0.0
        self._prefill = (0.0, 0)

    @property
    def live(self) -> int:
        """Sequences being decoded."""
        return len(self._ends)

    def give(self, tasks: Sequence[tuple[Task, int]], now: float, prompt_tokens: int) -> None:
        """Responses of a group and their lengths; the prompt is computed once for all of them."""
        self.advance(now)
        seconds = self._slowness * self._prompt_s * prompt_tokens
        self._since = max(self._since, now) + seconds
        self._prefill = (self._prefill[0] + seconds, self._prefill[1] + prompt_tokens)
        self._waiting.extend(tasks)
        self._fill()

    def advance(self, now: float) -> None:
        """Decode until `now`."""
        seconds = now - self._since
        if seconds <= 0:
            return
        if self._ends:
            live = len(self._ends)
            grown = seconds / self._token_s()
            self._grown += grown
            self._unsaid += live * grown
            self._seconds += seconds
            self._row_seconds += live * seconds
        self._since = now

    def use(self, table: Sequence[float], now: float) -> None:
        """Decode at another speed from now on."""
        self.advance(now)
        self._table = table

    def next_end(self) -> float:
        """When the next response ends."""
        if not self._ends:
            return math.inf
        return self._since + (self._ends[0][0] - self._grown) * self._token_s()

    def finish(self, now: float) -> list[Task]:
        """Responses that end now; their slots are filled again."""
        self.advance(now)
        done = []
        while self._ends and self._ends[0][0] <= self._grown + 1e-6:
            done.append(heappop(self._ends)[1])
        self._fill()
        return done

    def report(self) -> Report:
        """What was done since the last report."""
        report = Report(self._seconds, self._row_seconds, round(self._unsaid), *self._prefill)
        self._seconds = self._row_seconds = self._unsaid = 0.0
        self._prefill = (0.0, 0)
        return report

    def _fill(self) -> None:
        while self._waiting and len(self._ends) < self._slots:
            task, length = self._waiting.popleft()
            heappush(self._ends, (self._grown + length, task))

    def _token_s(self) -> float:
        return self._slowness * self._table[len(self._ends)]
