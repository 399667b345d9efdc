"""The only place where losses are summed and divided.

A reduction is a weight per response: the loss of an optimizer step is the sum over its responses
of weight times the sum of the response's token losses. Weights come from the lengths of *all*
responses of the step, so the sum may be split over micro-batches and workers in any way, and no
part divides by its own count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["token_mean", "sequence_mean", "constant"]


def response_weights(
    lengths: Sequence[int], reduction: Reduction, *, max_tokens: int | None = None
) -> list[float]:
    """Weight of each token of each response, given the lengths of all that the step learns from.

    token_mean:    1 / (all tokens), every token counts the same (DAPO);
    sequence_mean: 1 / (responses * own length), every response counts the same (GRPO's paper);
    constant:      1 / (responses * max_tokens), no length bias (Dr. GRPO).

    Source: DAPO, https://arxiv.org/abs/2503.14476, equation 12; GRPO,
    https://arxiv.org/abs/2402.03300, equation 3; Dr. GRPO, https://arxiv.org/abs/2503.20783,
    section 3.2.
    Raises: ValueError if a length is not positive, or `max_tokens` is missing or too small.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths = {list(lengths)}: responses need at least one token each")
    if reduction == "token_mean":
        return [1.0 / sum(lengths)] * len(lengths)
    if reduction == "sequence_mean":
        return [1.0 / (len(lengths) * length) for length in lengths]
    if max_tokens is None or max_tokens < max(lengths):
        raise ValueError(
            f"max_tokens = {max_tokens}: a constant reduction divides by the longest response "
            f"allowed, which must be at least the longest seen, {max(lengths)}"
        )
    return [1.0 / (len(lengths) * max_tokens)] * len(lengths)


def response_means(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Mean over each response's tokens of `values [N]`, given for each of its tokens: `[N]`."""
    repeats = torch.tensor(lengths, device=values.device)
    means = torch.segment_reduce(values, "mean", lengths=repeats)
    return means.repeat_interleave(repeats, output_size=len(values))


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of `values [N] * weights [N]`, a scalar; the part of a mean that these tokens make."""
    return torch.dot(values, weights)
