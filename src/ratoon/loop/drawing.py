"""All that a step drew, in one round or, with dynamic sampling, several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ratoon.loop.order import Group
from ratoon.loop.rollout import RolloutResult
from ratoon.observe.completions import StoredCompletion
from ratoon.observe.sinks import Values
from ratoon.records import Completion
from ratoon.rl.advantages import is_constant
from ratoon.rl.rewards.pool import RewardResult


@dataclass(frozen=True, slots=True)
class Round:
    """One rollout with its rewards; `reward_s` is the time spent waiting for them after it."""

    groups: tuple[Group, ...]
    rollout: RolloutResult
    results: tuple[RewardResult, ...]
    records: tuple[StoredCompletion, ...]
    reward_s: float

    def rewards(self) -> list[list[float]]:
        """Of each group's responses."""
        scores = iter(self.results)
        return [[next(scores).score for _ in group] for group in self.groups]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step's rounds, and the groups that it learns from, by their place among those drawn."""

    rounds: tuple[Round, ...]
    chosen: tuple[int, ...]

    def learned(self) -> tuple[list[Completion], list[float]]:
        """Completions and rewards of the chosen groups, in data order."""
        members = [
            list(zip(members, rewards, strict=True))
            for drawn in self.rounds
            for members, rewards in zip(_by_group(drawn), drawn.rewards(), strict=True)
        ]
        pairs = [pair for place in self.chosen for pair in members[place]]
        return [completion for completion, _ in pairs], [reward for _, reward in pairs]

    def results(self) -> list[RewardResult]:
        """The rewards of all responses, in data order."""
        return [result for drawn in self.rounds for result in drawn.results]

    def records(self) -> list[StoredCompletion]:
        """All responses as they are stored, in data order."""
        return [record for drawn in self.rounds for record in drawn.records]

    def reward_s(self) -> float:
        """Time spent waiting for rewards."""
        return sum(drawn.reward_s for drawn in self.rounds)

    def metrics(self) -> Values:
        """Rounds, and the groups whose rewards are all equal."""
        rewards = [scores for drawn in self.rounds for scores in drawn.rewards()]
        constant = [is_constant(scores) for scores in rewards]
        return {
            "reward/constant_groups_frac": sum(constant) / len(rewards),
            "sampling/rounds": len(self.rounds),
            "sampling/resampled_groups": len(rewards) - len(self.chosen),
            "sampling/constant_groups": sum(constant[place] for place in self.chosen),
        }


def _by_group(drawn: Round) -> list[list[Completion]]:
    completions = iter(drawn.rollout.completions)
    return [[next(completions) for _ in group] for group in drawn.groups]


def joined(rollouts: Sequence[RolloutResult]) -> RolloutResult:
    """Several rollouts, one after the other, as one."""
    if len(rollouts) == 1:
        return rollouts[0]
    least = [rollout.least_s for rollout in rollouts]
    errors = [(rollout.length_error, rollout.tokens) for rollout in rollouts]
    known = [(error, tokens) for error, tokens in errors if error is not None]
    return RolloutResult(
        completions=tuple(c for rollout in rollouts for c in rollout.completions),
        seconds=sum(rollout.seconds for rollout in rollouts),
        idle_s=sum(rollout.idle_s for rollout in rollouts),
        filled_s=sum(rollout.filled_s for rollout in rollouts),
        spot=tuple(session for rollout in rollouts for session in rollout.spot),
        stop_s=tuple(seconds for rollout in rollouts for seconds in rollout.stop_s),
        stats=tuple(stats for rollout in rollouts for stats in rollout.stats),
        least_s=None if None in least else sum(filter(None, least)),
        length_error=sum(e * n for e, n in known) / sum(n for _, n in known) if known else None,
    )
