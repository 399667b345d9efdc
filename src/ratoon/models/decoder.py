"""The one decoder: a Llama-family Transformer in plain PyTorch.

The training forward runs on packed documents (no padding). The rollout engine reads the same
parameters through its own prepacked copies. Matrices that read the same input are stored fused
(`qkv_proj`, `gate_up_proj`); `hf_io` splits them on the way out.

Shape letters: T packed tokens, D width, H query heads, G key/value heads, E head width, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ratoon.models import fused
from ratoon.models.document_attention import (
    DocumentPlan,
    document_attention,
    plan_documents,
)
from ratoon.models.packing import PackedBatch


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a decoder. `rope_scaling` is Hugging Face's dictionary or None."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    max_positions: int = 2048
    tie_word_embeddings: bool = True
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Widths of the query, key and value parts of `qkv_proj`'s output."""
        kv = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv, kv


def rope_frequencies(config: DecoderConfig) -> Tensor:
    """Inverse frequencies `[E/2]` in float32, with Llama 3's scaling where configured."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inverse: Tensor = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    if scaling is None:
        return inverse
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * torch.pi / inverse
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    scaled: Tensor = (1 - smooth) * inverse / scaling["factor"] + smooth * inverse
    return scaled


def rope_table(config: DecoderConfig, num_positions: int, dtype: torch.dtype) -> Tensor:
    """Cosines and sines `[2, num_positions, E]`, each half repeated (half-split rotation)."""
    angles = torch.outer(torch.arange(num_positions).float(), rope_frequencies(config))
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()]).to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x [..., heads, E]` by `cos, sin [..., 1, E]`."""
    return fused.rotate(x, cos, sin)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 (float64 stays float64)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis of `x [..., D]`."""
        return fused.rms_norm(x, self.weight, self.eps)


class BlockWeights(NamedTuple):
    """What one layer computes with; None where the family has no such tensor.

    Shapes: `qkv [(H + 2 G) E, D]` holds queries, keys and values in this order, `out [D, H E]`,
    `up [2 M, D]` holds the gate above the values it gates (`[M, D]` where there is no gate),
    `down [D, M]`; norms `[D]` or, of queries and keys, `[E]`; a bias has its matrix's rows.
    """

    input_norm: Tensor
    input_norm_bias: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    post_norm_bias: Tensor | None
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class Block(nn.Module):
    """One pre-norm layer: grouped-query attention, then a SwiGLU MLP."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        width, inner = config.hidden_size, config.intermediate_size
        self.input_norm = RMSNorm(width, config.rms_norm_eps)
        self.qkv_proj = nn.Linear(width, sum(config.qkv_sizes), bias=False)
        self.o_proj = nn.Linear(config.qkv_sizes[0], width, bias=False)
        self.post_norm = RMSNorm(width, config.rms_norm_eps)
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def weights(self) -> BlockWeights:
        """This layer's parameters themselves, not copies."""
        return BlockWeights(
            input_norm=self.input_norm.weight,
            input_norm_bias=None,
            qkv=self.qkv_proj.weight,
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            out=self.o_proj.weight,
            out_bias=None,
            post_norm=self.post_norm.weight,
            post_norm_bias=None,
            up=self.gate_up_proj.weight,
            up_bias=None,
            down=self.down_proj.weight,
            down_bias=None,
        )

    def forward(
        self,
        x: Tensor,
        rope: Tensor,
        plan: DocumentPlan,
        select: Callable[[BlockWeights], BlockWeights] | None = None,
    ) -> Tensor:
        """Map `x [T, D]`; `rope [2, T, 1, E]` holds cosines and sines of each token.

        `select` is applied to the layer's weights first, so that a layer computes with some of its
        heads and neurons; then `plan` is of as many heads. It is called here, and not by the
        caller, since sharded parameters are whole inside a forward only.
        """
        weights = self.weights() if select is None else select(self.weights())
        eps = self.config.rms_norm_eps
        attended = self._attend(fused.rms_norm(x, weights.input_norm, eps), weights, rope, plan)
        x = x + fused.linear(attended, weights.out)
        gate_up = fused.linear(fused.rms_norm(x, weights.post_norm, eps), weights.up)
        return x + fused.swiglu_linear(gate_up, weights.down)

    def _attend(self, x: Tensor, weights: BlockWeights, rope: Tensor, plan: DocumentPlan) -> Tensor:
        heads, kv_heads = plan.num_heads, plan.num_kv_heads
        projected = fused.linear(x, weights.qkv).unflatten(-1, (-1, self.config.head_dim))
        rotary, value = projected.split((heads + kv_heads, kv_heads), dim=1)
        return document_attention(apply_rope(rotary, *rope), value, plan)


class Decoder(nn.Module):
    """Token ids in, final-norm hidden states out; the head is applied by the caller.

    Callers choose which rows need logits, so the vocabulary-wide product is never made for rows
    that nobody reads.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head: nn.Linear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """Output matrix `[V, D]`; the embedding itself where the two are tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, batch: PackedBatch, taps: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """Hidden states of all tokens.

        Shapes: returns the final-norm states `[T, D]` and, for each layer index in `taps`, the
        input of that layer `[T, D]`.
        """
        x = self.embed(batch)
        rope = self.rope(batch, x.dtype)
        plan = plan_documents(batch, self.config.num_heads, self.config.num_kv_heads)
        tapped = []
        for index, layer in enumerate(self.layers):
            if index in taps:
                tapped.append(x)
            x = layer(x, rope, plan)
        return self.norm(x), tapped

    def embed(self, batch: PackedBatch) -> Tensor:
        """The first layer's input `[T, D]`."""
        return fused.embed(batch.ids, self.embed_tokens.weight)

    def rope(self, batch: PackedBatch, dtype: torch.dtype) -> Tensor:
        """Cosines and sines `[2, T, 1, E]` of all tokens, on the batch's device."""
        table = rope_table(self.config, batch.longest, dtype).to(batch.ids.device)
        return table[:, batch.positions].unsqueeze(2)
