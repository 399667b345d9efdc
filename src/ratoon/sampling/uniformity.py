"""Do tokens come from p? An independent check that knows nothing of how they were selected.

The randomised probability integral transform maps a token y, drawn from p, to

    u = sum of p(v) over all v before y  +  w · p(y),    w uniform on (0, 1),

which is uniform on (0, 1) exactly, whatever p is and in whatever order ids stand, as long as
the order does not depend on y. Given all tokens before, each u is uniform; so the u of a response,
and of all responses with different keys, are independent, and a Kolmogorov-Smirnov test may take
them together although every p is another.

The order decides what the test can see. Here ids stand by falling probability (ties: lowest id
first). What was sampled hotter has its u too high, what was sampled colder, or from the top ids
alone, too low: in every context to the same side, so that deviations add up. In the order of ids
they would point to another side in each context and mostly cancel.

w is a hash of the response's key and position for a purpose of its own, so it is independent of
the noise that selected y, and a check repeats to the bit.

Source: Rosenblatt 1952; randomised for discrete distributions by Brockwell 2007; the order is ours.

Shapes: R rows (tokens), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ratoon.records import DrawKey
from ratoon.sampling import keyed_noise

# What the hash-uniform w is for; see `keyed_noise.sequence_key`.
_PURPOSE = b"ratoon.pit"

_TERMS = 100


def hash_uniforms(key: DrawKey, t: Tensor) -> Tensor:
    """The w of positions `t [R]` of one response, `[R]` float64, strictly between 0 and 1."""
    words = torch.tensor([keyed_noise.sequence_key(key, _PURPOSE)], device=t.device)
    row_keys = keyed_noise.row_keys(words.expand(len(t), -1), t)
    bits = keyed_noise.uniform_bits(row_keys, torch.zeros(1, dtype=torch.int64, device=t.device))
    return (bits[:, 0].double() + 0.5) * 2.0**-keyed_noise.UNIFORM_BITS


def integral_transform(scores: Tensor, ids: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The u of tokens `ids [R]` under the softmax of `scores [R, V]`, and their log-probabilities.

    Excluded ids have a score of minus infinity. Shapes: `w [R]` float64; returns `[R]` and `[R]`
    float64. Cost: a float64 copy of the scores, no host-device sync.
    """
    logprobs = torch.log_softmax(scores.double(), dim=-1)
    own = scores.gather(-1, ids[:, None])
    index = torch.arange(scores.shape[-1], device=scores.device)
    before = (scores > own) | ((scores == own) & (index < ids[:, None]))
    mass = torch.where(before, logprobs.exp(), 0.0).sum(-1)
    own_logprobs = logprobs.gather(-1, ids[:, None])[:, 0]
    return (mass + w * own_logprobs.exp()).clamp(max=1.0), own_logprobs


def kolmogorov_smirnov(values: Sequence[float]) -> tuple[float, float]:
    """The largest distance of the values' distribution from the uniform one, and its p-value.

    The p-value is the asymptotic one with Stephens' correction, good from some five values on.
    Raises: ValueError without values.
    Source: Kolmogorov 1933; Stephens 1970.
    """
    count = len(values)
    if count == 0:
        raise ValueError("a Kolmogorov-Smirnov test needs at least one value")
    ordered = torch.tensor(values, dtype=torch.float64).sort().values
    ranks = torch.arange(count + 1, dtype=torch.float64) / count
    distance = max(float((ranks[1:] - ordered).max()), float((ordered - ranks[:-1]).max()))
    root = math.sqrt(count)
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 0.2:
        return distance, 1.0  # The series below alternates without end there.
    terms = ((-1) ** (k - 1) * math.exp(-2.0 * (k * scaled) ** 2) for k in range(1, _TERMS + 1))
    return distance, min(1.0, max(0.0, 2.0 * math.fsum(terms)))
