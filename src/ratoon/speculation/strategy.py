"""How much to draft, decided once per decode step from the live batch.

Verification is nearly free at small batches and not at large ones, so a strategy is chosen by the
number of live sequences. No choice made here can change a token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ratoon.errors import ConfigError

MAX_DEPTH = 16
MAX_BRANCHING = 32
MAX_BUDGET = 128


@dataclass(frozen=True, slots=True)
class Strategy:
    """Shape of the draft trees of one step; `depth = 0` is plain decoding.

    `depth` levels below the root; up to `branching` children that each drafter proposes per node;
    `beam` nodes of a level that get children; `budget` drafted nodes kept per sequence (the root
    not counted). With `cap` the live sequences share their budgets: the nodes with the highest
    chances of all trees are kept, at most `cap` of one tree. Nodes that the target visits with a
    chance below `min_chance` are not verified: it should be near the cost of one more row of a
    forward pass, in tokens.
    """

    depth: int
    branching: int = 4
    beam: int = 4
    budget: int = 16
    use_learned: bool = True
    use_suffix: bool = True
    min_chance: float = 0.01
    cap: int | None = None

    def __post_init__(self) -> None:
        """Check ranges. Raises ConfigError."""
        bounds = {
            "depth": (0, MAX_DEPTH),
            "branching": (1, MAX_BRANCHING),
            "beam": (1, MAX_BUDGET),
            "budget": (1, MAX_BUDGET),
        }
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(
                    f"strategy {name}={value} is out of range; allowed: {low} to {high}"
                )
        if not 0 < self.min_chance < 1:
            raise ConfigError(
                f"strategy min_chance={self.min_chance} is out of range; allowed: above 0, below 1"
            )
        if self.depth > 0 and not (self.use_learned or self.use_suffix):
            raise ConfigError(
                f"strategy depth={self.depth} has no drafter; set use_learned or use_suffix, "
                "or depth=0 for plain decoding"
            )
        if self.cap is not None and not self.budget <= self.cap <= MAX_BUDGET:
            raise ConfigError(
                f"strategy cap={self.cap} is out of range; allowed: budget={self.budget} to "
                f"{MAX_BUDGET}"
            )
        if self.largest_tree < self.depth:
            raise ConfigError(
                f"strategy budget={self.budget} cannot reach depth={self.depth}; "
                "set budget, or cap, to at least depth"
            )

    @property
    def is_plain(self) -> bool:
        """Whether the step decodes one token per sequence without drafting."""
        return self.depth == 0

    @property
    def largest_tree(self) -> int:
        """The most nodes that one sequence's tree can have, its root not counted."""
        return self.cap or self.budget

    def within(self, budget: int, depth: int) -> Strategy:
        """The same tree with so many nodes per sequence, and at most so many levels."""
        return replace(
            self,
            budget=budget,
            depth=min(depth, self.cap or budget),
            branching=min(self.branching, budget),
            beam=min(self.beam, budget),
        )


PLAIN = Strategy(depth=0, use_learned=False, use_suffix=False)


class StrategyPicker(Protocol):
    """Chooses the strategy of a step. `state` is 0 at first, then what `pick` returned."""

    def pick(self, live_batch: int, state: int) -> tuple[Strategy, int]:
        """Strategy for `live_batch` sequences, and the state to pass next time."""
        ...


class StrategyTable:
    """Strategies by live batch, with hysteresis.

    `tiers` are pairs (largest live batch, strategy) in ascending order of batch; above the last
    one decoding is plain. A tier is left upwards only when the batch is more than `slack` above
    its limit, and downwards at once, so that a batch that hovers about a border does not switch at
    every step and the last sequences of a rollout get the tier made for them.

    Example: `StrategyTable([(2, deep), (8, shallow)], slack=1)`
    """

    def __init__(self, tiers: Sequence[tuple[int, Strategy]], slack: int = 0) -> None:
        limits = [limit for limit, _ in tiers]
        if any(low >= high for low, high in zip([0, *limits], limits, strict=False)):
            raise ConfigError(
                f"strategy thresholds {limits} must be positive and ascending; "
                "give each tier a larger live batch than the one before"
            )
        if slack < 0:
            raise ConfigError(f"strategy slack={slack} is negative; allowed: 0 or more")
        self._lows = [0, *limits]
        self._highs: list[float] = [*limits, float("inf")]
        self._strategies = [*(strategy for _, strategy in tiers), PLAIN]
        self._slack = slack

    def pick(self, live_batch: int, state: int) -> tuple[Strategy, int]:
        """See `StrategyPicker.pick`; the state is the current tier plus one."""
        current = state - 1
        if current >= 0 and (
            self._lows[current] < live_batch <= self._highs[current] + self._slack
        ):
            return self._strategies[current], state
        fitting = next(i for i, high in enumerate(self._highs) if live_batch <= high)
        return self._strategies[fitting], fitting + 1


class RandomStrategies:
    """Switches at random between strategies, a function of `seed` and the step: for tests."""

    def __init__(self, strategies: Sequence[Strategy], seed: int) -> None:
        if not strategies:
            raise ConfigError("no strategies to choose from; give at least one")
        self._strategies = tuple(strategies)
        self._seed = seed

    def pick(self, live_batch: int, state: int) -> tuple[Strategy, int]:
        """See `StrategyPicker.pick`; the state counts steps."""
        generator = random.Random(f"{self._seed}/{state}")
        return generator.choice(self._strategies), state + 1
