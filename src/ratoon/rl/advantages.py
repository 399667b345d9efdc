"""How much better a response, or a token, was than what it is compared with.

Members of one group share a prompt. Groups are identified by value, never by position, so a
missing member shifts nothing: the others are compared among themselves. Sums are exact, so that no
order of responses changes a bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Literal

from ratoon.errors import RewardError

Scale = Literal["group", "batch", "none"]

# Keeps groups whose rewards differ by rounding alone from being blown up.
_STD_EPS = 1e-4


def group_relative(
    rewards: Sequence[float], groups: Sequence[Hashable], *, scale: Scale
) -> list[float]:
    """Advantage of each response within its group: GRPO, Dr. GRPO, DAPO, GSPO.

    A_i = (r_i - mean(r of the group)) / (std(r of the scale) + eps), with n - 1 in the denominator
    of the variance; with scale `none` it is r_i - mean(r of the group).

    Equal rewards give exactly 0, as does a group of one: nothing can be learned from them.

    Source: GRPO (group), Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2;
    Dr. GRPO (none), Liu et al. 2025, https://arxiv.org/abs/2503.20783, section 3.2; batch, Liu et
    al. 2025, https://arxiv.org/abs/2508.08221.
    Raises: RewardError if a reward is not finite; ValueError if the lengths differ.
    """
    advantages = [0.0] * len(rewards)
    members = _members(rewards, groups)
    divisor = _deviation(rewards) + _STD_EPS if scale == "batch" else 1.0
    for indices in members:
        of_group = [rewards[index] for index in indices]
        # A mean of equal numbers need not equal them in floating point.
        if is_constant(of_group):
            continue
        mean = _mean(of_group)
        if scale == "group":
            divisor = _deviation(of_group) + _STD_EPS
        for index in indices:
            advantages[index] = (rewards[index] - mean) / divisor
    return advantages


def leave_one_out(rewards: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """RLOO: A_i = r_i - mean(r of the others in the group).

    The baseline does not depend on the response, so that the gradient is unbiased. There is no
    division by a deviation, which would take that away. Equal rewards and groups of one give 0.

    Source: Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740; Kool et al. 2019.
    Raises: as `group_relative`.
    """
    advantages = [0.0] * len(rewards)
    for indices in _members(rewards, groups):
        of_group = [rewards[index] for index in indices]
        if is_constant(of_group):
            continue
        mean, count = _mean(of_group), len(indices)
        for index in indices:
            advantages[index] = (rewards[index] - mean) * (count / (count - 1))
    return advantages


def best_of_group(rewards: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """RAFT: 1 for the best response of a group, the first of equals, and 0 for the others.

    A group whose rewards are all equal has no best: 0.

    Source: Dong et al. 2023, https://arxiv.org/abs/2304.06767, algorithm 1.
    Raises: as `group_relative`.
    """
    advantages = [0.0] * len(rewards)
    for indices in _members(rewards, groups):
        if not is_constant([rewards[index] for index in indices]):
            advantages[max(indices, key=lambda index: (rewards[index], -index))] = 1.0
    return advantages


def batch_normalised(
    rewards: Sequence[float], penalties: Sequence[Sequence[float]]
) -> list[tuple[float, ...]]:
    """REINFORCE++: returns of tokens, normalised over all tokens of the step.

    R_it = r_i - sum of the penalties of token t and those after it,  A = (R - mean) / (std + eps)

    `penalties[i]` has one value for each token of response i, usually the weighted divergence from
    a reference. There are no groups: one response to each prompt will do. Equal returns give 0.

    Source: Hu et al. 2025, https://arxiv.org/abs/2501.03262, with a discount of 1.
    Raises: as `group_relative`.
    """
    _members(rewards, range(len(rewards)))
    returns = [
        [reward - later for later in itertools.accumulate(reversed(of_tokens))][::-1]
        for reward, of_tokens in zip(rewards, penalties, strict=True)
    ]
    everything = [value for of_tokens in returns for value in of_tokens]
    if is_constant(everything):
        return [(0.0,) * len(of_tokens) for of_tokens in returns]
    mean, divisor = _mean(everything), _deviation(everything) + _STD_EPS
    return [tuple((value - mean) / divisor for value in of_tokens) for of_tokens in returns]


def is_constant(values: Sequence[float]) -> bool:
    """Whether all are equal, so that nothing can be learned from their differences."""
    return min(values) == max(values)


def _members(rewards: Sequence[float], groups: Sequence[Hashable]) -> list[list[int]]:
    """Indices of each group's responses. Raises: RewardError if a reward is not finite."""
    members: dict[Hashable, list[int]] = {}
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise RewardError(
                f"the reward of response {index} (group {group}) is {reward}; it must be a finite "
                "number"
            )
        members.setdefault(group, []).append(index)
    return list(members.values())


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation with n - 1 in the denominator; 0 for a single value."""
    mean = _mean(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return math.sqrt(squares / max(1, len(values) - 1))
