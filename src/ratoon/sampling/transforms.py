"""From logits to the scores whose softmax is the distribution p that tokens are drawn from.

The only place of vocabulary limit, temperature, top-k, top-p and min-p, applied in this order, the
order of Hugging Face's `generate`.

A token is kept or dropped by its score alone: at the border of top-k and of top-p all tokens of
equal score are kept together. The result then depends neither on a sorting algorithm nor on
how many rows are transformed at once. Hugging Face keeps ties at the border of top-k too, and cuts
through them at the border of top-p.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ratoon.errors import ConfigError
from ratoon.records import SamplingParams

_FIRST_PREFIX = 64
_PREFIX_GROWTH = 8


def check_params(params: SamplingParams) -> None:
    """Raise `ConfigError` for parameters that describe no distribution."""
    if not (math.isfinite(params.temperature) and params.temperature >= 0.0):
        raise ConfigError(
            f"temperature is {params.temperature}; it must be 0 (argmax) or a positive number"
        )
    if params.top_k < 0:
        raise ConfigError(f"top_k is {params.top_k}; it must be 0 (off) or a positive integer")
    if not 0.0 < params.top_p <= 1.0:
        raise ConfigError(f"top_p is {params.top_p}; it must be above 0 and at most 1 (off)")
    if not 0.0 <= params.min_p <= 1.0:
        raise ConfigError(f"min_p is {params.min_p}; it must lie between 0 (off) and 1")


def is_temperature_only(params: SamplingParams) -> bool:
    """Whether p is the softmax of scaled logits, with no token excluded."""
    return params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0


def scale_(logits: Tensor, temperature: float) -> Tensor:
    """Logits divided by the temperature, in place; temperature 1 touches nothing."""
    return logits if temperature == 1.0 else logits.div_(temperature)


def transform(logits: Tensor, params: SamplingParams, vocab_limit: int | None = None) -> Tensor:
    """Scores whose softmax is p: temperature-scaled logits, excluded tokens at minus infinity.

    Shapes: logits [B, V] of any floating type; returns a fresh [B, V] tensor, float64 for float64
    logits and float32 otherwise. Ids from `vocab_limit` on are excluded.
    Raises: ConfigError at temperature 0, which describes no scores.
    Cost: with temperature alone two passes and no host-device sync. top-p syncs at least once; it
    sorts only a prefix of the vocabulary, grown until it covers the nucleus.
    """
    if params.temperature == 0.0:
        raise ConfigError("temperature is 0, which takes the largest logit; there are no scores")
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    scores = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    scores.copy_(logits)
    if vocab_limit is not None:
        scores[:, vocab_limit:] = -torch.inf
    scale_(scores, params.temperature)
    if 0 < params.top_k < scores.shape[-1]:
        border = scores.topk(params.top_k, dim=-1).values[:, -1:]
        scores.masked_fill_(scores < border, -torch.inf)
    if params.top_p < 1.0:
        scores.masked_fill_(scores < _nucleus_border(scores, params.top_p), -torch.inf)
    if params.min_p > 0.0:
        border = scores.amax(-1, keepdim=True) + math.log(params.min_p)
        scores.masked_fill_(scores < border, -torch.inf)
    return scores


def _nucleus_border(scores: Tensor, top_p: float) -> Tensor:
    """The lowest score in each row's nucleus, [B, 1].

    The nucleus is the smallest set of most likely tokens whose mass reaches `top_p`; a token
    belongs to it if the tokens before it have less, so the crossing token is in.
    """
    # log_softmax, not a sum of our own: its kernel gives a row the same bits for any row count.
    log_total = (scores.amax(-1) - torch.log_softmax(scores, dim=-1).amax(-1)).double()
    size = scores.shape[-1]
    prefix = min(_FIRST_PREFIX, size)
    while True:
        top = scores.topk(prefix, dim=-1).values
        mass = (top.double() - log_total[:, None]).exp_().cumsum(-1)
        if prefix == size or not bool((mass[:, -1] < top_p).any()):
            break
        prefix = min(prefix * _PREFIX_GROWTH, size)
    num_kept = (mass < top_p).sum(-1, keepdim=True).add_(1).clamp_(max=prefix)
    return top.gather(-1, num_kept - 1)
