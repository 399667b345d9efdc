"""Who decides how much to draft in a step: one interface, and the choices that learn nothing.

A tuner is told what each step was and took. No choice made here can change a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ratoon.speculation.strategy import PLAIN, Strategy, StrategyPicker


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one decode step was and took.

    `num_live` sequences, `rows` of the forward pass, `tokens` that became known; `draft_s` seconds
    of drafting and `verify_s` of all the rest. `visits[r][k]` are the visited nodes per sequence of
    rank r, by chance (see `visits_by_rank`), at depth k + 1; `present[r]` the drafted ones. Both
    are empty in a plain step, and for a tuner that does not count visits.
    """

    strategy: Strategy
    num_live: int
    rows: int
    tokens: int
    draft_s: float
    verify_s: float
    visits: Sequence[Sequence[float]] = ()
    present: Sequence[float] = ()


class Tuner(Protocol):
    """Chooses the strategy of each decode step. `counts_visits` says that records need them."""

    counts_visits: bool

    def choose(self, num_live: int) -> Strategy:
        """The strategy for so many live sequences."""
        ...

    def observe(self, record: StepRecord) -> None:
        """Learn from the step just made."""
        ...


class RuleTuner:
    """A function of the live batch. Example: `RuleTuner(lambda num_live: PLAIN)`."""

    counts_visits = False

    def __init__(self, rule: Callable[[int], Strategy]) -> None:
        self._rule = rule

    def choose(self, num_live: int) -> Strategy:
        """See `Tuner.choose`."""
        return self._rule(num_live)

    def observe(self, record: StepRecord) -> None:
        """Nothing is learned."""


class TableTuner:
    """A picker's choice, such as `StrategyTable`'s: what TLT calls a static threshold."""

    counts_visits = False

    def __init__(self, picker: StrategyPicker) -> None:
        self._picker = picker
        self._state = 0

    def choose(self, num_live: int) -> Strategy:
        """See `Tuner.choose`."""
        strategy, self._state = self._picker.pick(num_live, self._state)
        return strategy

    def observe(self, record: StepRecord) -> None:
        """Nothing is learned."""


def never() -> RuleTuner:
    """Plain decoding."""
    return RuleTuner(lambda num_live: PLAIN)
