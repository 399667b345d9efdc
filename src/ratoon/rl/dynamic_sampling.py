"""Drawing again where a group teaches nothing, in an order that no completion can change.

A step wants so many groups whose rewards differ. A round draws as many as are missing, from the
next prompts in data order, and what it draws depends on the rounds before only as a whole. After
the last round, groups with equal rewards fill the step up: they have advantage zero and count in
the loss's denominator, as without dynamic sampling.

Source: DAPO, Yu et al. 2025, https://arxiv.org/abs/2503.14476, section 3.2; the order and the
filling up are ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratoon.rl.advantages import is_constant


class DynamicSampling:
    """The rounds of one step; a single one is drawing without dynamic sampling.

    Example: with `wanted=2` and `max_rounds=2`, `add([[1, 0], [1, 1]])` leaves `missing == 1`, and
    after `add([[0, 0]])` the step learns from `chosen() == [0, 1]`.
    """

    def __init__(self, wanted: int, max_rounds: int) -> None:
        self._wanted = wanted
        self._max_rounds = max_rounds
        self._is_constant: list[bool] = []
        self.rounds = 0

    @property
    def missing(self) -> int:
        """How many groups the next round draws; 0 when there is none."""
        if self.rounds == self._max_rounds:
            return 0
        return self._wanted - self._is_constant.count(False)

    def add(self, groups: Sequence[Sequence[float]]) -> None:
        """Note a round: the rewards of each group, in data order."""
        self.rounds += 1
        self._is_constant += [is_constant(rewards) for rewards in groups]

    def chosen(self) -> list[int]:
        """The groups to learn from, by their place among all that were drawn, in data order."""
        places = range(len(self._is_constant))
        # Sorting is stable: groups whose rewards differ come first, in data order each.
        first = sorted(places, key=self._is_constant.__getitem__)[: self._wanted]
        return sorted(first)
