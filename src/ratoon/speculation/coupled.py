"""Coupled drafting: guess what the target will pick *under the noise it will use*.

The target's token at a position is argmin over v of E(v)/p(v), where the exponentials E are a
function of the response's key and the position. The drafter knows the key, so it ranks tokens by
its own q with the same E, not by q alone. Losslessness does not depend on anything in this file.

Shape letters: B sequences, F frontier nodes, C children of a node.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Settings that led to the most tokens per verification on SmolLM2-135M, at temperatures 0.7 and 1
# alike: draft at 0.8 of the target's temperature, flatten the perturbed scores by 1.25.
DRAFT_TEMPERATURE = 0.8
FLATTENING = 1.25


def propose(
    logits: Tensor, exponentials: Tensor | None, temperature: float, num_children: int
) -> tuple[Tensor, Tensor]:
    """The children a drafter with these logits should propose, and their chances.

    Scores are s = log q + g with q at draft temperature `0.8 * temperature` and Gumbel noise
    g = -log E. The children are the highest s; the chance of a child is the softmax of `s / 1.25`
    over the whole draft vocabulary. At temperature 0 there is no noise: the children are the most
    likely tokens and their chances are q.

    Shapes: `logits [B, F, Vd]` (any float type); `exponentials [B, Vd]` float32, the noise of the
    position that the children would take, read only where `temperature > 0`. Returns indices into
    the draft vocabulary, int64 `[B, F, C]`, and chances float32 `[B, F, C]`, best first. A node
    with a logit that is NaN or plus infinity, or with none above minus infinity, has chances 0.
    Source: Gumbel-top-k (Kool et al. 2019) on the target's own noise; the two constants are ours.
    """
    # log q enters s by its logit alone: the normaliser cancels in the softmax.
    scores = logits.float()
    if temperature == 0:
        scores = scores * (1 / (DRAFT_TEMPERATURE * FLATTENING))
    elif exponentials is None:
        raise ValueError("temperature > 0 needs the exponentials of the position")
    else:
        noise = exponentials.log().mul_(-1 / FLATTENING).unsqueeze(1)
        scores = torch.add(noise, scores, alpha=1 / (DRAFT_TEMPERATURE * FLATTENING * temperature))
    indices = scores.topk(min(num_children, logits.shape[-1]), dim=-1).indices
    return indices, scores.softmax(-1).gather(-1, indices).nan_to_num_(nan=0.0)


def retrieved_chances(priors: Tensor, exponentials: Tensor | None) -> Tensor:
    """Chances of retrieved candidates, given the noise of their position.

    `priors [..., C]` are estimates c of the target's probabilities of C different tokens (0 = no
    candidate), `exponentials [..., C]` the noise of these tokens (None at temperature 0, where the
    chance is c itself). Candidate i beats all tokens outside the list with probability
    exp(-r E_i / c_i), r = 1 - sum c: the smallest of their E/p is exponential with rate r. The
    candidates share what they win in proportion to (c / E) ** 0.8, which for exact c would be all
    to the largest; the exponent is the flattening of `propose`. Source: ours.
    """
    if exponentials is None:
        return priors
    rest = (1 - priors.sum(-1, keepdim=True)).clamp_min(0)
    exponentials = exponentials.clamp_min(torch.finfo(exponentials.dtype).tiny)
    strength = (priors / exponentials).clamp_max(1e9)
    share = strength.pow(1 / FLATTENING)
    share = share / share.sum(-1, keepdim=True).clamp_min(1e-30)
    return torch.where(priors > 0, share * (-rest / strength).exp(), 0.0)
