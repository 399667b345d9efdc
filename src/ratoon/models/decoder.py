"""The one decoder: a Llama-family Transformer in plain PyTorch.

The training forward runs on packed documents (no padding). The rollout engine reads the same
parameters through its own prepacked copies. Matrices that read the same input are stored fused
(`qkv_proj`, `gate_up_proj`); `hf_io` splits them on the way out.

Shape letters: T packed tokens, D width, H query heads, G key/value heads, E head width, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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

    def forward(self, x: Tensor, rope: Tensor, plan: DocumentPlan) -> Tensor:
        """Map `x [T, D]`; `rope [2, T, 1, E]` holds cosines and sines of each token."""
        attended = self._attend(self.input_norm(x), rope, plan)
        x = x + fused.linear(attended, self.o_proj.weight)
        gate_up = fused.linear(self.post_norm(x), self.gate_up_proj.weight)
        return x + fused.swiglu_linear(gate_up, self.down_proj.weight)

    def _attend(self, x: Tensor, rope: Tensor, plan: DocumentPlan) -> Tensor:
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        projected = fused.linear(x, self.qkv_proj.weight).unflatten(-1, (-1, self.config.head_dim))
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
        x = fused.embed(batch.ids, self.embed_tokens.weight)
        table = rope_table(self.config, batch.longest, x.dtype).to(x.device)
        rope = table[:, batch.positions].unsqueeze(2)
        plan = plan_documents(batch, self.config.num_heads, self.config.num_kv_heads)
        tapped = []
        for index, layer in enumerate(self.layers):
            if index in taps:
                tapped.append(x)
            x = layer(x, rope, plan)
        return self.norm(x), tapped
