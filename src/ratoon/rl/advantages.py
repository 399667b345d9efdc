"""How much better a response is than the others to the same prompt.

Members of one group share a prompt. Groups are identified by value, never by position, so a
missing member shifts nothing: the others are compared among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal

from ratoon.errors import RewardError

# Keeps groups whose rewards differ by rounding alone from being blown up.
_STD_EPS = 1e-4


def group_advantages(
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    *,
    algorithm: Literal["grpo", "dr_grpo"],
) -> list[float]:
    """Advantage of each response within its group.

    grpo:    A_i = (r_i - mean(r)) / (std(r) + eps), std with G - 1 in the denominator;
    dr_grpo: A_i = r_i - mean(r).

    Equal rewards give exactly 0, as does a group of one: nothing can be learned from them.

    Source: GRPO, Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2;
    Dr. GRPO, Liu et al. 2025, https://arxiv.org/abs/2503.20783, section 3.2.
    Raises: RewardError if a reward is not finite; ValueError if the lengths differ.
    """
    members: dict[Hashable, list[int]] = {}
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if not math.isfinite(reward):
            raise RewardError(
                f"the reward of response {index} (group {group}) is {reward}; it must be a finite "
                "number"
            )
        members.setdefault(group, []).append(index)
    advantages = [0.0] * len(rewards)
    for indices in members.values():
        group_rewards = [rewards[index] for index in indices]
        # A mean of equal numbers need not equal them in floating point.
        if min(group_rewards) == max(group_rewards):
            continue
        mean = math.fsum(group_rewards) / len(indices)
        scale = 1.0
        if algorithm == "grpo":
            variance = math.fsum((r - mean) ** 2 for r in group_rewards) / (len(indices) - 1)
            scale = math.sqrt(variance) + _STD_EPS
        for index in indices:
            advantages[index] = (rewards[index] - mean) / scale
    return advantages
