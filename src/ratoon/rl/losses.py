"""Losses per token. Nothing here sums or divides: see `reduction`.

Shape letters: N tokens of the loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PolicyLoss(NamedTuple):
    """`losses [N]` to minimise, `ratios [N]` without gradient, `is_clipped [N]` bool."""

    losses: Tensor
    ratios: Tensor
    is_clipped: Tensor


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """PPO's clipped objective, negated, with separate bounds ("clip-higher").

    loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A),  r = exp(log p - log p_old)

    A token is clipped where the bound takes its gradient away. Log-probabilities are those of the
    distribution that was sampled, hence at its temperature.

    Shapes: all `[N]`. Gradient flows to `logprobs` only.
    Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, equation 7; clip-higher: DAPO,
    Yu et al. 2025, https://arxiv.org/abs/2503.14476, section 3.1.
    """
    ratios = (logprobs - old_logprobs.detach()).exp()
    advantages = advantages.detach()
    bounded = ratios.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses = -torch.minimum(ratios * advantages, bounded * advantages)
    with torch.no_grad():
        is_clipped = torch.where(
            advantages > 0, ratios > 1.0 + clip_high, ratios < 1.0 - clip_low
        ) & (advantages != 0)
    return PolicyLoss(losses, ratios.detach(), is_clipped)
