"""Replaying a recorded step with and without speculation: same tokens, both times.

Both arms start from the state before the step (policy, drafter, suffix index, calibration, the
planner's memory), so that neither has seen what it is about to generate.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ratoon.coordinator.memory import PlannerMemory
from ratoon.coordinator.versions import VersionLedger
from ratoon.errors import LosslessViolation
from ratoon.loop.drawing import joined
from ratoon.loop.rl_step import StepOutcome
from ratoon.loop.rollout import Rollout, RolloutResult
from ratoon.loop.run_context import RunContext
from ratoon.records import Completion

ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Replay:
    """Seconds of each arm's rounds, and tokens that differ from the recorded ones in any."""

    plain_s: tuple[float, ...]
    speculative_s: tuple[float, ...]
    responses: int
    tokens: int
    flips: int

    @property
    def rollout_speedup(self) -> float:
        """Median time without speculation over median time with it."""
        return statistics.median(self.plain_s) / statistics.median(self.speculative_s)

    def step_speedup(self, rest_s: float) -> float:
        """The same for the whole step, whose rest takes equally long in both."""
        plain, fast = statistics.median(self.plain_s), statistics.median(self.speculative_s)
        return (plain + rest_s) / (fast + rest_s)


def replay(
    run: RunContext, step: int, outcome: StepOutcome, memory: PlannerMemory, *, exact: bool
) -> Replay:
    """Replay the recorded step `ROUNDS` times per arm, interleaved; `memory` is from before it.

    Raises: LosslessViolation if `exact` (invariant numerics) and any token differs.
    """
    recorded = outcome.rollout.completions
    times: dict[bool, list[float]] = {False: [], True: []}
    flips = 0
    for _ in range(ROUNDS):
        for speculate in (False, True):
            run.workers.call_all("rewind")
            planned = copy.deepcopy(memory)
            results = [
                Rollout(
                    run.workers,
                    run.observer,
                    VersionLedger(policy=step - 1),
                    planned,
                    kind=run.config.planner,
                    slots=run.config.rollout.max_batch,
                    step=step,
                    activity="evaluation",
                    stop=run.stop,
                ).run(groups, speculate=speculate)
                for groups in outcome.rounds
            ]
            result = joined(results)
            times[speculate].append(result.seconds)
            flips += count_flips(recorded, result)
    if flips and exact:
        raise LosslessViolation(
            f"{flips} tokens of step {step} differ between its rollout and its replays, although "
            "the numerics are invariant; please report this with the run folder"
        )
    return Replay(
        plain_s=tuple(times[False]),
        speculative_s=tuple(times[True]),
        responses=len(recorded),
        tokens=sum(len(completion.token_ids) for completion in recorded),
        flips=flips,
    )


def count_flips(recorded: Sequence[Completion], replayed: RolloutResult) -> int:
    """Responses' first differing tokens: after one flip all that follows is another text."""
    return sum(
        old.token_ids != new.token_ids
        for old, new in zip(recorded, replayed.completions, strict=True)
    )
