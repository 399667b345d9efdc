"""What planners remember from one rollout to the next, and the planners by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from ratoon.coordinator.lengths import LengthModel
from ratoon.coordinator.longest_first import LongestFirst
from ratoon.coordinator.pace import Pace
from ratoon.coordinator.planner import FirstCome, Planner, Static, Work

Kind = Literal["longest_first", "first_come", "static"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class PlannerMemory:
    """Lengths and speeds seen so far. Kept in any case, since metrics tell of both."""

    def __init__(self, num_workers: int) -> None:
        self.lengths = LengthModel()
        self.pace = Pace(num_workers)
        self._num_workers = num_workers

    def planner(self, kind: Kind, work: Sequence[Work], slots: int) -> Planner:
        """The planner of one rollout on workers with so many slots each."""
        if kind == "longest_first":
            return LongestFirst(work, self._num_workers, slots, self.lengths, self.pace)
        return (FirstCome if kind == "first_come" else Static)(work, self._num_workers, slots)

    def state(self) -> dict[str, Any]:
        """JSON values that `load_state` continues from. Between rollouts only."""
        return {"lengths": self.lengths.state(), "pace": self.pace.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave; the number of workers may be another."""
        self.lengths.load_state(state["lengths"])
        self.pace.load_state(state["pace"])
