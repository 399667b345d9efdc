"""Estimators of KL(p || reference) from samples of p, one value per token.

Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]


def kl_divergence(logprobs: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate per token, with d = log p - log p_reference of the sampled token.

    k1 = d               unbiased, may be negative;
    k2 = d^2 / 2         biased, and its gradient is that of KL(p || reference) on samples of p;
    k3 = exp(-d) - 1 + d unbiased, never negative.

    As a term of a loss, k1 has a gradient of mean zero on samples of p: it regularises nothing by
    itself. k3 is the usual choice of GRPO.

    Shapes: `[N]` each. Gradient flows to `logprobs` only.
    """
    difference = logprobs - reference.detach()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return (-difference).expm1() + difference
