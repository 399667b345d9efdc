"""Advantages: the formulas, and what must not disturb them."""

from __future__ import annotations

import statistics

import pytest

from ratoon.errors import RewardError
from ratoon.rl.advantages import group_advantages

REWARDS = [1.0, 0.0, 0.5, 0.25, 3.0, 1.0]
GROUPS = ["a", "b", "a", "b", "a", "b"]


def test_grpo_is_centred_and_scaled_by_the_sample_deviation_of_its_group() -> None:
    advantages = group_advantages(REWARDS, GROUPS, algorithm="grpo")
    for group in "ab":
        members = [i for i, name in enumerate(GROUPS) if name == group]
        values = [REWARDS[i] for i in members]
        mean, std = statistics.mean(values), statistics.stdev(values)
        for i in members:
            assert advantages[i] == pytest.approx((REWARDS[i] - mean) / (std + 1e-4), rel=1e-12)


def test_dr_grpo_is_centred_only() -> None:
    advantages = group_advantages(REWARDS, GROUPS, algorithm="dr_grpo")
    assert advantages == pytest.approx([-0.5, -5 / 12, -1.0, -1 / 6, 1.5, 7 / 12])


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo"])
def test_equal_rewards_give_exactly_zero(algorithm: str) -> None:
    rewards = [0.1] * 7  # their mean is not 0.1 in floating point
    advantages = group_advantages(rewards, ["g"] * 7, algorithm=algorithm)  # type: ignore[arg-type]
    assert advantages == [0.0] * 7


def test_rewards_that_differ_by_rounding_are_not_blown_up() -> None:
    rewards = [0.3, 0.1 + 0.2, 0.3, 0.3]
    advantages = group_advantages(rewards, ["g"] * 4, algorithm="grpo")
    assert max(map(abs, advantages)) < 1e-9


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo"])
def test_a_missing_member_changes_no_other_group_and_a_lone_one_learns_nothing(
    algorithm: str,
) -> None:
    whole = group_advantages(REWARDS, GROUPS, algorithm=algorithm)  # type: ignore[arg-type]
    kept = [i for i in range(len(REWARDS)) if i != 2]
    part = group_advantages(
        [REWARDS[i] for i in kept],
        [GROUPS[i] for i in kept],
        algorithm=algorithm,  # type: ignore[arg-type]
    )
    for place, i in enumerate(kept):
        if GROUPS[i] == "b":
            assert part[place] == whole[i]
    assert group_advantages([1.0, 0.0, 1.0], ["x", "y", "x"], algorithm="grpo") == [0.0] * 3


def test_a_reward_that_is_no_number_is_named() -> None:
    with pytest.raises(RewardError, match=r"response 1 \(group b\) is nan"):
        group_advantages([0.0, float("nan")], ["a", "b"], algorithm="grpo")
