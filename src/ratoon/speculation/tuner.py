"""Who decides how much to draft in a step: one interface, and the choices that learn nothing.

A tuner is told what each step was and took. No choice made here can change a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ratoon.speculation.strategy import PLAIN, Strategy, StrategyPicker


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one decode step was and took.

    `num_live` sequences, `rows` of the forward pass, `tokens` that became known; `draft_s` seconds
    of drafting and `verify_s` of all the rest. `expected` is the sum of the drafted nodes' chances
    per sequence, `visited` how many of them were; `promised[d - 1][b - 1]` what trees of d levels
    and b nodes per sequence would have been expected to (see `promised_visits`). All three are
    empty in a plain step, and for a tuner that does not ask.
    """

    strategy: Strategy
    num_live: int
    rows: int
    tokens: int
    draft_s: float
    verify_s: float
    expected: float = 0.0
    visited: float = 0.0
    promised: Sequence[Sequence[float]] = ()


# The cause of a choice that holds for one step, to learn what it costs or gains.
PROBE = "probe"


class Why(NamedTuple):
    """Why a choice was made: what moved the tuner, in a word or two, and the reason in figures."""

    cause: str
    text: str


class Tuner(Protocol):
    """Chooses the strategy of each decode step.

    Records say what was promised for up to `promise_budget` nodes per sequence; 0: nothing.
    """

    promise_budget: int

    @property
    def why(self) -> Why:
        """Why the last choice was made; asked before the step is observed."""
        ...

    def seconds(self, strategy: Strategy, num_live: int) -> float | None:
        """What a step is expected to take; None for a tuner that measures no times."""
        ...

    def choose(self, num_live: int) -> Strategy:
        """The strategy for so many live sequences."""
        ...

    def observe(self, record: StepRecord) -> None:
        """Learn from the step just made."""
        ...


class StatefulTuner(Tuner, Protocol):
    """A tuner whose choices depend on the steps before, so that a run can go on with it."""

    def state_dict(self) -> dict[str, Any]:
        """A copy of what was learned, in values that JSON keeps."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        ...


class Unmeasured:
    """What tuners share that measure no times and ask for no promises."""

    promise_budget = 0

    def seconds(self, strategy: Strategy, num_live: int) -> float | None:
        """See `Tuner.seconds`."""
        return None


class RuleTuner(Unmeasured):
    """A function of the live batch. Example: `RuleTuner(lambda num_live: PLAIN)`."""

    why = Why("rule", "a fixed rule of the live batch decides")

    def __init__(self, rule: Callable[[int], Strategy]) -> None:
        self._rule = rule

    def choose(self, num_live: int) -> Strategy:
        """See `Tuner.choose`."""
        return self._rule(num_live)

    def observe(self, record: StepRecord) -> None:
        """Nothing is learned."""


class TableTuner(Unmeasured):
    """A picker's choice, such as `StrategyTable`'s: what TLT calls a static threshold."""

    why = Why("live batch", "the table's tree for this live batch")

    def __init__(self, picker: StrategyPicker) -> None:
        self._picker = picker
        self._state = 0

    def choose(self, num_live: int) -> Strategy:
        """See `Tuner.choose`."""
        strategy, self._state = self._picker.pick(num_live, self._state)
        return strategy

    def observe(self, record: StepRecord) -> None:
        """Nothing is learned."""

    def state_dict(self) -> dict[str, Any]:
        """See `StatefulTuner.state_dict`."""
        return {"picker": self._state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `StatefulTuner.load_state_dict`."""
        self._state = state["picker"]


def never() -> RuleTuner:
    """Plain decoding."""
    return RuleTuner(lambda num_live: PLAIN)
