"""What training costs, counted: floating-point operations of a subnetwork, head included.

A multiplication with its addition counts as two. Counted are the matrix products of the layers, of
attention (a causal token sees half of its document), and of the output head. Backward costs twice
forward. Left out: look-ups, norms, activations, softmax, loss, and the gathering of weights, which
together are below one percent at usual widths.

The paper counts layers only and in proportion, which says a third more is saved on GPT-2 than its
head allows; `layer_ratio` is that count.

Shape letters: D width, H query heads, G key/value heads, E head width, M neurons, V vocabulary,
T tokens of a document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from ratoon.est.subnetwork import LayerPart, Subnetwork
from ratoon.models.decoder import DecoderConfig

# Element-wise operations of AdamW for each parameter: decay 1, first moment 3, second moment 4,
# root, bias correction, epsilon, quotient, rate, difference 6; norm and clipping 3.
_ADAMW_PER_PARAMETER = 17
# Of momentum, decay, scaling and difference, clipping included, where Muon orthogonalises.
_MUON_PER_PARAMETER = 11
_NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True, slots=True)
class TokenFlops:
    """Forward operations for one token, averaged over a document."""

    projections: float
    attention: float
    mlp: float
    head: float

    @property
    def layers(self) -> float:
        """Of all layers, without the head."""
        return self.projections + self.attention + self.mlp

    @property
    def forward(self) -> float:
        """Of the whole forward."""
        return self.layers + self.head

    @property
    def training(self) -> float:
        """Forward and backward."""
        return 3.0 * self.forward


def token_flops(
    config: DecoderConfig, subnetwork: Subnetwork, document_tokens: float
) -> TokenFlops:
    """Operations of a token of documents of `document_tokens` tokens, in a subnetwork."""
    projections = attention = mlp = 0.0
    width, head_width = config.hidden_size, config.head_dim
    for part in subnetwork.layers:
        if part is None:
            continue
        heads, kv_heads, neurons = active_units(subnetwork, part)
        share = 1.0
        if part.sequences is not None and subnetwork.num_sequences:
            share = len(part.sequences) / subnetwork.num_sequences
        projections += share * 2 * width * head_width * (2 * heads + 2 * kv_heads)
        attention += share * 2 * document_tokens * heads * head_width
        mlp += share * 2 * width * neurons * num_mlp_matrices(config)
    return TokenFlops(projections, attention, mlp, 2.0 * width * config.vocab_size)


def num_mlp_matrices(config: DecoderConfig) -> int:
    """Matrices `[M, D]` of an MLP: three where neurons are gated."""
    return 3 if config.activation == "swiglu" else 2


def active_units(subnetwork: Subnetwork, part: LayerPart) -> tuple[int, int, int]:
    """Query heads, key/value heads and neurons that take part."""
    shape = subnetwork.shape
    return (
        shape.num_heads if part.heads is None else len(part.heads),
        shape.num_kv_heads if part.kv_heads is None else len(part.kv_heads),
        shape.num_neurons if part.blocks is None else len(part.blocks) * shape.neuron_block,
    )


def optimizer_flops(shapes: Iterable[tuple[int, ...]], kind: Literal["adamw", "muon"]) -> float:
    """Operations of one optimizer step over parameters of these shapes.

    Muon here orthogonalises every matrix it is given: pass it those that it updates, and AdamW the
    others. Source: Newton-Schulz iteration of Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon.
    """
    total = 0.0
    for shape in shapes:
        count = 1
        for size in shape:
            count *= size
        if kind == "adamw":
            total += _ADAMW_PER_PARAMETER * count
            continue
        short, long = min(shape), max(shape)
        product = 2 * (2 * short * short * long) + 2 * short**3
        total += _MUON_PER_PARAMETER * count + _NEWTON_SCHULZ_STEPS * product
    return total


def layer_ratio(config: DecoderConfig, subnetwork: Subnetwork, full: Subnetwork) -> float:
    """The paper's own count: cost of the layers over that of the full model's layers.

    Attention's quadratic part, head and fixed costs are left out; with one rate p for heads and
    neurons and rate p_A for layers this is p * p_A.
    """
    some, all_ = (token_flops(config, each, 0.0).layers for each in (subnetwork, full))
    return some / all_


def measured_flops(compute: Callable[[], object]) -> float:
    """Operations of the matrix products that `compute` really runs, by torch's counter.

    To be run on the meta device, where attention is made of batched products over whole squares;
    these count at half, since a causal token sees half of them. All other products are not batched.
    """
    with FlopCounterMode(display=False) as counter:
        compute()
    counts = counter.get_flop_counts()["Global"]
    batched = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)
    return float(
        sum(count / 2 if operator in batched else count for operator, count in counts.items())
    )
