"""Advantages: the formulas, and what must not disturb them."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import pytest

from ratoon.errors import RewardError
from ratoon.rl.advantages import batch_normalised, best_of_group, group_relative, leave_one_out

REWARDS = [1.0, 0.0, 0.5, 0.25, 3.0, 1.0]
GROUPS = ["a", "b", "a", "b", "a", "b"]

Estimator = Callable[[Sequence[float], Sequence[Hashable]], Sequence[float]]
BY_GROUP: dict[str, Estimator] = {
    "group": partial(group_relative, scale="group"),
    "batch": partial(group_relative, scale="batch"),
    "none": partial(group_relative, scale="none"),
    "leave_one_out": leave_one_out,
    "best_of_group": best_of_group,
}
by_group = pytest.mark.parametrize("estimate", BY_GROUP.values(), ids=BY_GROUP)


def test_grpo_is_centred_and_scaled_by_the_sample_deviation_of_its_group() -> None:
    advantages = group_relative(REWARDS, GROUPS, scale="group")
    for group in "ab":
        members = [i for i, name in enumerate(GROUPS) if name == group]
        values = [REWARDS[i] for i in members]
        mean, std = statistics.mean(values), statistics.stdev(values)
        for i in members:
            assert advantages[i] == pytest.approx((REWARDS[i] - mean) / (std + 1e-4), rel=1e-12)


def test_dr_grpo_is_centred_only() -> None:
    advantages = group_relative(REWARDS, GROUPS, scale="none")
    assert advantages == pytest.approx([-0.5, -5 / 12, -1.0, -1 / 6, 1.5, 7 / 12])


def test_a_scale_of_the_batch_is_the_deviation_of_all_rewards() -> None:
    plain = group_relative(REWARDS, GROUPS, scale="none")
    divisor = statistics.stdev(REWARDS) + 1e-4
    scaled = group_relative(REWARDS, GROUPS, scale="batch")
    assert scaled == pytest.approx([value / divisor for value in plain], rel=1e-12)


def test_leave_one_out_compares_with_the_mean_of_the_others_and_scales_nothing() -> None:
    advantages = leave_one_out(REWARDS, GROUPS)
    for i, (reward, group) in enumerate(zip(REWARDS, GROUPS, strict=True)):
        others = [r for j, r in enumerate(REWARDS) if GROUPS[j] == group and j != i]
        assert advantages[i] == pytest.approx(reward - statistics.mean(others), rel=1e-12)
    larger = leave_one_out([10 * reward for reward in REWARDS], GROUPS)
    assert larger == pytest.approx([10 * value for value in advantages], rel=1e-12)


def test_the_best_of_a_group_is_chosen_and_the_first_of_equals() -> None:
    assert best_of_group(REWARDS, GROUPS) == [0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    assert best_of_group([0.0, 1.0, 1.0], ["g"] * 3) == [0.0, 1.0, 0.0]


def test_returns_take_the_penalties_still_to_come_and_are_normalised_over_all_tokens() -> None:
    penalties = [(0.5, -0.25), (0.125, 0.0, 1.0)]
    returns = [1.0 - 0.25, 1.0 + 0.25, 2.0 - 1.125, 2.0 - 1.0, 2.0 - 1.0]
    mean, std = statistics.mean(returns), statistics.stdev(returns)
    advantages = batch_normalised([1.0, 2.0], penalties)
    assert [len(of_tokens) for of_tokens in advantages] == [2, 3]
    flat = [value for of_tokens in advantages for value in of_tokens]
    assert flat == pytest.approx([(value - mean) / (std + 1e-4) for value in returns], rel=1e-12)


@by_group
def test_equal_rewards_give_exactly_zero(estimate: Estimator) -> None:
    rewards = [0.1] * 7  # their mean is not 0.1 in floating point
    assert estimate(rewards, ["g"] * 7) == [0.0] * 7


def test_equal_returns_give_exactly_zero_whatever_the_lengths() -> None:
    penalties = [(0.0,) * length for length in (3, 1, 2)]
    assert batch_normalised([0.1] * 3, penalties) == [(0.0,) * len(p) for p in penalties]
    assert batch_normalised([0.1], [(0.0,)]) == [(0.0,)]


@by_group
def test_groups_never_mix(estimate: Estimator) -> None:
    """One prompt is always solved, the other never: neither teaches anything."""
    assert estimate([0.0, 1.0] * 4, ["never", "always"] * 4) == [0.0] * 8


def test_without_groups_prompts_are_compared_with_each_other() -> None:
    """REINFORCE++ needs one response to each prompt only."""
    low, high = batch_normalised([0.0, 1.0], [(0.0,), (0.0,)])
    assert low[0] < 0 < high[0]


def test_rewards_that_differ_by_rounding_are_not_blown_up() -> None:
    rewards = [0.3, 0.1 + 0.2, 0.3, 0.3]
    for scale in ("group", "batch"):
        advantages = group_relative(rewards, ["g"] * 4, scale=scale)  # type: ignore[arg-type]
        assert max(map(abs, advantages)) < 1e-9
    (first, second) = batch_normalised(rewards[:2], [(0.0,), (0.0,)])
    assert max(abs(first[0]), abs(second[0])) < 1e-9


@pytest.mark.parametrize("name", [name for name in BY_GROUP if name != "batch"])
def test_a_missing_member_changes_no_other_group_and_a_lone_one_learns_nothing(name: str) -> None:
    estimate = BY_GROUP[name]
    whole = estimate(REWARDS, GROUPS)
    kept = [i for i in range(len(REWARDS)) if i != 2]
    part = estimate([REWARDS[i] for i in kept], [GROUPS[i] for i in kept])
    for place, i in enumerate(kept):
        if GROUPS[i] == "b":
            assert part[place] == whole[i]
    assert estimate([1.0, 0.0, 1.0], ["x", "y", "x"]) == [0.0] * 3


@pytest.mark.parametrize("name", [name for name in BY_GROUP if name != "best_of_group"])
def test_the_order_of_responses_changes_no_bit(name: str) -> None:
    source = random.Random(0)
    rewards = [source.random() for _ in range(40)]
    groups = [index % 5 for index in range(40)]
    order = source.sample(range(40), 40)
    expected = BY_GROUP[name](rewards, groups)
    shuffled = BY_GROUP[name]([rewards[i] for i in order], [groups[i] for i in order])
    assert list(shuffled) == [expected[i] for i in order]


@by_group
@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None])
def test_a_reward_that_is_no_number_is_named(estimate: Estimator, reward: float) -> None:
    with pytest.raises(RewardError, match=rf"response 1 \(group b\) is {reward}"):
        estimate([0.0, reward], ["a", "b"])
    with pytest.raises(RewardError, match=f"response 1 .* is {reward}"):
        batch_normalised([0.0, reward], [(0.0,), (0.0,)])
