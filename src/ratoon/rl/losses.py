"""Losses per token. Nothing here sums or divides: see `reduction`.

Shape letters: N tokens of the loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PolicyLoss(NamedTuple):
    """`losses [N]` to minimise; without gradient `ratios [N]`, and bool `[N]` what was clipped."""

    losses: Tensor
    ratios: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def clipped_surrogate(
    log_ratios: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """PPO's clipped objective, negated, with separate bounds ("clip-higher").

    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A),  r = exp(log ratio)

    `log_ratios` are log p - log p_old of each token, or, for GSPO, their mean over its response.
    Log-probabilities are those of the distribution that was sampled, hence at its temperature. A
    token is clipped where the bound takes its gradient away.

    Shapes: all `[N]`. Gradient flows to `log_ratios` only.
    Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, equation 7; clip-higher: DAPO,
    Yu et al. 2025, https://arxiv.org/abs/2503.14476, section 3.1; GSPO: Zheng et al. 2025,
    https://arxiv.org/abs/2507.18071, equations 5 to 7.
    """
    ratios = log_ratios.exp()
    advantages = advantages.detach()
    bounded = ratios.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses = -torch.minimum(ratios * advantages, bounded * advantages)
    fixed = ratios.detach()
    return PolicyLoss(
        losses,
        fixed,
        clipped_low=(fixed < 1.0 - clip_low) & (advantages < 0),
        clipped_high=(fixed > 1.0 + clip_high) & (advantages > 0),
    )


def mismatch_weights(logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """Truncated importance sampling: min(p_trainer / p_engine, cap) of each token, `[N]`.

    Responses are drawn by one program and learned from by another; where the two disagree on a
    token's probability under the same weights, its loss is weighted by the quotient. Equal bits
    give exactly 1, as does NaN, which stands for an unknown probability.

    `logprobs` are the trainer's from before the update. No gradient.
    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training", https://fengyao.notion.site/off-policy-rl.
    """
    difference = logprobs.detach() - engine_logprobs
    return difference.exp().clamp(max=cap).nan_to_num(nan=1.0)
