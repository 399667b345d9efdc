"""Seconds per token of a simulated worker: what the real tuner makes of a table of costs.

A rollout of a thousand workers has more decode steps than a simulation can make, so the tuner runs
once for each quality of the drafter, at some live batches, and the rest lies between.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ratoon.speculation.cost_model import CostModelTuner, Latency
from ratoon.speculation.strategy import Strategy
from ratoon.speculation.tuner import StepRecord

# The default shape of `speculation`.
_LARGEST = Strategy(depth=4, branching=4, beam=4, budget=12)
_MAX_ROWS = 64
# The next guess on a path is right so much less often than the one before.
_DEEPER = 0.85
# Of one drafted level, as a share of a forward pass of one row.
_DRAFT_SHARE = 0.056
_STEPS, _SETTLED = 160, 60
# Qualities are told apart in steps of this.
GRAIN = 0.05


class Speeds:
    """`seconds(quality, live)` per token of each live sequence."""

    def __init__(self, costs: Sequence[tuple[int, float]], slots: int) -> None:
        self._costs, self._slots = costs, slots
        self._tables: dict[int, list[float]] = {}

    def table(self, quality: float) -> list[float]:
        """Seconds per token by live sequences, from 0, which is never used, to all slots.

        `quality` is the chance that a first guess is right.
        """
        grade = round(quality / GRAIN)
        if grade not in self._tables:
            self._tables[grade] = self._measure(grade * GRAIN)
        return self._tables[grade]

    def _measure(self, quality: float) -> list[float]:
        sizes = sorted({2**power for power in range(self._slots.bit_length())} | {self._slots})
        sizes = [size for size in sizes if size <= self._slots]
        costs = Latency(self._costs)
        tuner = CostModelTuner(_LARGEST, _MAX_ROWS, Latency(self._costs))
        chances = [quality * _DEEPER**level for level in range(_LARGEST.depth)]
        source = random.Random(0)
        found = {}
        # As in a rollout, from many to few.
        for live in reversed(sizes):
            made = [_step(tuner, costs, chances, live, source) for _ in range(_STEPS)][_SETTLED:]
            tokens, seconds = (sum(part) for part in zip(*made, strict=True))
            found[live] = live * seconds / tokens
        between = Latency([(size, found[size]) for size in sizes])
        return [0.0, *(between(live) for live in range(1, self._slots + 1))]


def _step(
    tuner: CostModelTuner,
    costs: Latency,
    chances: Sequence[float],
    live: int,
    source: random.Random,
) -> tuple[float, float]:
    """Tokens and seconds of one decode step; drafted trees are paths."""
    strategy = tuner.choose(live)
    path = list(chances[: min(strategy.depth, strategy.budget)]) if not strategy.is_plain else []
    path = [chance for chance in path if chance >= strategy.min_chance]
    reached, visited = live, 0
    for level, chance in enumerate(path):
        # The chance of a node is that of its path, so it is right this often once reached.
        once = chance / path[level - 1] if level else chance
        reached = sum(source.random() < once for _ in range(reached))
        visited += reached
    draft_s = strategy.depth * _DRAFT_SHARE * costs(1)
    rows = live * (1 + len(path))
    record = StepRecord(strategy, live, rows, live + visited, draft_s, costs(rows))
    if not strategy.is_plain:
        record = StepRecord(
            strategy,
            live,
            rows,
            live + visited,
            draft_s,
            costs(rows),
            expected=sum(path),
            visited=visited / live,
            promised=[
                [sum(chances[: min(nodes, depth)]) for nodes in range(1, _LARGEST.budget + 1)]
                for depth in range(1, strategy.depth + 1)
            ],
        )
    tuner.observe(record)
    return live + visited, draft_s + costs(rows)
