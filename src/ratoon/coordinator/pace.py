"""How fast workers are, from what they were seen to do.

A token of each of n live sequences takes `fixed + n * each` seconds, times the worker's slowness,
speculation included. So a worker that decodes lengths l all at once takes
slowness * (fixed max(l) + each sum(l)). All workers serve the same weights, so that one line serves
all of them but for a factor. Source: ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Weight that a new report has against the older ones of its worker, and of all.
_FOLLOW = 0.2
_KEEP = 0.98
# Reports are added up to so many tokens: shorter ones are mostly noise.
_MIN_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker did since its last report.

    `seconds` of decode steps that gave `tokens`; `row_seconds` is the same time once for each live
    sequence. `prefill_seconds` computed `prefill_tokens` of prompts.
    """

    seconds: float = 0.0
    row_seconds: float = 0.0
    tokens: int = 0
    prefill_seconds: float = 0.0
    prefill_tokens: int = 0


class Pace:
    """Seconds per token, by worker and live sequences. Until something is seen, all are alike."""

    def __init__(self, num_workers: int) -> None:
        self._slowness: list[float | None] = [None] * num_workers
        # Seconds, row seconds and tokens of each worker that are not enough yet to tell anything.
        self._pending = [(0.0, 0.0, 0) for _ in range(num_workers)]
        # Decayed sums of 1, n, p, n n, n p over reports of p seconds per token at n live.
        self._sums = [0.0] * 5
        self._prefill = (0.0, 0)

    @property
    def is_measured(self) -> bool:
        """Whether seconds are seconds: before that they only compare."""
        return self._sums[0] > 0

    def slowness(self, worker: int) -> float:
        """Seconds that a worker takes for what others do in one, about."""
        found = self._slowness[worker]
        return 1.0 if found is None else found

    def step(self) -> tuple[float, float]:
        """`fixed` and `each`: what a token of each of n sequences takes is fixed + n * each."""
        weight, n, p, nn, np = self._sums
        if weight == 0:
            return 1.0, 0.0
        n, p, nn, np = n / weight, p / weight, nn / weight, np / weight
        spread = nn - n * n
        each = max(0.0, (np - n * p) / spread) if spread > 1e-3 * nn else 0.0
        each = min(each, p / n)
        return p - each * n, each

    def prefill_s(self) -> float:
        """Seconds for a token of a prompt."""
        seconds, tokens = self._prefill
        return seconds / tokens if tokens else 0.0

    def observe(self, worker: int, report: Report) -> None:
        """A worker's report."""
        if report.prefill_tokens:
            seconds, computed = self._prefill
            self._prefill = (seconds + report.prefill_seconds, computed + report.prefill_tokens)
        seconds, row_seconds, tokens = self._pending[worker]
        seconds += report.seconds
        row_seconds += report.row_seconds
        tokens += report.tokens
        if tokens < _MIN_TOKENS:
            self._pending[worker] = (seconds, row_seconds, tokens)
            return
        self._pending[worker] = (0.0, 0.0, 0)
        self._learn(worker, live=row_seconds / seconds, taken=row_seconds / tokens)

    def _learn(self, worker: int, *, live: float, taken: float) -> None:
        """A worker took so many seconds for a token of each of so many sequences."""
        known, before = self._slowness[worker], taken
        if self.is_measured:
            fixed, each = self.step()
            before = max(1e-12, fixed + each * live)
        moved = math.log(taken / before)
        if known is None:
            self._slowness[worker] = math.exp(moved)
        else:
            self._slowness[worker] = known * math.exp(_FOLLOW * (moved - math.log(known)))
        alike = taken / self.slowness(worker)
        new = (1.0, live, alike, live * live, live * alike)
        self._sums = [_KEEP * old + value for old, value in zip(self._sums, new, strict=True)]

    def state(self) -> dict[str, Any]:
        """JSON values that `load_state` continues from."""
        return {
            "slowness": list(self._slowness),
            "sums": list(self._sums),
            "prefill": list(self._prefill),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave; speeds of workers that are no more are forgotten."""
        known, count = list(state["slowness"]), len(self._slowness)
        self._slowness = (known + [None] * count)[:count]
        self._sums = list(state["sums"])
        seconds, tokens = state["prefill"]
        self._prefill = (float(seconds), int(tokens))


def least_seconds(
    lengths: Sequence[int],
    slowness: Sequence[float],
    *,
    slots: int,
    alone: float,
    together: float,
) -> float:
    """What no schedule can beat, with all lengths known, in seconds.

    The longest response on the fastest worker at `alone` seconds per token, or all tokens at every
    worker's best speed, `together` seconds per token with `slots` live: the larger one.
    """
    longest = alone * max(lengths) * min(slowness)
    everything = together / slots * sum(lengths) / sum(1 / value for value in slowness)
    return max(longest, everything)
