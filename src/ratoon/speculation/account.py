"""What an engine's decode steps were and took, by live batch and tree; and why guessing changed.

A few additions per step, no tensors. Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratoon.observe.rollouts import PLAIN_TREE, SpeculationChange, StepTally, WorkerSteps
from ratoon.speculation.strategy import PLAIN, Strategy
from ratoon.speculation.tuner import PROBE, StepRecord, Tuner

# Changes that are kept of one rollout; all are counted.
_KEPT_CHANGES = 64


def tree_name(strategy: Strategy) -> str:
    """A tree as people read it. Example: `8 nodes, 3 levels, suffix + learned`."""
    if strategy.is_plain:
        return PLAIN_TREE
    drafters = {"suffix": strategy.use_suffix, "learned": strategy.use_learned}
    names = " + ".join(name for name, used in drafters.items() if used)
    return f"{_count(strategy.budget, 'node')}, {_count(strategy.depth, 'level')}, {names}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number > 1 else "")


def live_range(num_live: int) -> tuple[int, int]:
    """The range of live batches that is tallied together: 1, 2, 3 to 4, 5 to 8, ..."""
    high = 1 << (num_live - 1).bit_length()
    return high // 2 + 1, high


class StepAccount:
    """Tallies the decode steps of one rollout."""

    def __init__(self) -> None:
        self._steps = WorkerSteps()
        self._tallies: dict[tuple[object, ...], StepTally] = {}
        self._number = 0
        self._guesses = False
        self._expected_s: float | None = None
        self._plain_s: float | None = None

    def chosen(self, strategy: Strategy, num_live: int, tuner: Tuner) -> None:
        """Note the strategy of a step that begins, and what the tuner expects of it."""
        self._number += 1
        self._expected_s = tuner.seconds(strategy, num_live)
        self._plain_s = tuner.seconds(PLAIN, num_live)
        guesses = not strategy.is_plain
        if guesses == self._guesses:
            return
        why = tuner.why
        if why.cause == PROBE:
            self._steps.probes += 1
            return
        self._guesses = guesses
        self._steps.num_changes += 1
        if len(self._steps.changes) < _KEPT_CHANGES:
            change = SpeculationChange(self._number, num_live, guesses, why.cause, why.text)
            self._steps.changes.append(change)

    def made(self, record: StepRecord, drafted: int, known: Sequence[int]) -> None:
        """Add a step: `drafted` tokens verified, `known[k]` sequences that got k tokens."""
        tally = self._tally(record.strategy, record.num_live)
        tally.steps += 1
        tally.sequences += record.num_live
        tally.drafted += drafted
        tally.known.extend([0] * (len(known) - len(tally.known)))
        for tokens, count in enumerate(known):
            tally.known[tokens] += count
        tally.spent_s += record.draft_s + record.verify_s
        if self._expected_s is not None and self._plain_s is not None:
            plain_s = self._plain_s * record.tokens / record.num_live
            tally.expected_s = (tally.expected_s or 0.0) + self._expected_s
            tally.plain_s = (tally.plain_s or 0.0) + plain_s

    def result(self, tuner: Tuner) -> WorkerSteps:
        """All of it, and the tuner's reason for its last choice."""
        self._steps.tallies = sorted(self._tallies.values(), key=lambda tally: tally.live)
        self._steps.why = tuner.why.text
        return self._steps

    def _tally(self, strategy: Strategy, num_live: int) -> StepTally:
        live = live_range(num_live)
        tree = (strategy.depth, strategy.budget, strategy.use_learned, strategy.use_suffix)
        key = (live, tree if strategy.depth else None)
        if key not in self._tallies:
            self._tallies[key] = StepTally(live, tree_name(strategy))
        return self._tallies[key]
