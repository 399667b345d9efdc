"""The one decoder: a pre-norm Transformer in plain PyTorch, Llama's or GPT-2's kind.

The training forward runs on packed documents (no padding). The rollout engine reads the same
parameters through its own prepacked copies. Matrices that read the same input are stored fused
(`qkv_proj`, `gate_up_proj`); `hf_io` splits them on the way out.

Shape letters: T packed tokens, D width, H query heads, G key/value heads, E head width, L layers,
M width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ratoon.errors import CapabilityError
from ratoon.models import fused
from ratoon.models.document_attention import (
    DocumentPlan,
    document_attention,
    plan_documents,
)
from ratoon.models.packing import PackedBatch


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a decoder, and what its family computes with.

    `norm_eps` is added to the mean square (`rms`) or the variance (`layer`) under the root.
    `rope_theta` and `rope_scaling` (Hugging Face's dictionary or None) are of rotary positions
    only. Learned positions end at `max_positions`; rotary ones are defined beyond it.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    max_positions: int = 2048
    tie_word_embeddings: bool = True
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    norm: Literal["rms", "layer"] = "rms"
    positions: Literal["rotary", "learned"] = "rotary"
    activation: Literal["swiglu", "gelu_tanh"] = "swiglu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Widths of the query, key and value parts of `qkv_proj`'s output."""
        kv = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv, kv

    def require_positions(self, count: int) -> None:
        """Raise `CapabilityError` if documents of `count` tokens have no learned positions."""
        if self.positions == "learned" and count > self.max_positions:
            raise CapabilityError(
                f"A document of {count} tokens does not fit this {self.family} model: it has "
                f"learned {self.max_positions} positions and knows no others. Shorten the prompts, "
                "or limit the length of responses."
            )


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


class LayerNorm(nn.Module):
    """Layer norm with a bias, computed in float32 (float64 stays float64)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis of `x [..., D]`."""
        return fused.layer_norm(x, self.weight, self.bias, self.eps)


def _norm(config: DecoderConfig) -> RMSNorm | LayerNorm:
    kind = RMSNorm if config.norm == "rms" else LayerNorm
    return kind(config.hidden_size, config.norm_eps)


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
    """One pre-norm layer: grouped-query attention, then an MLP (`up_proj` where it has no gate)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        width, inner = config.hidden_size, config.intermediate_size
        self.input_norm = _norm(config)
        self.qkv_proj = nn.Linear(width, sum(config.qkv_sizes), bias=config.qkv_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.o_proj = nn.Linear(config.qkv_sizes[0], width, bias=config.out_bias)
        self.post_norm = _norm(config)
        if config.activation == "swiglu":
            self.gate_up_proj = nn.Linear(width, 2 * inner, bias=config.mlp_bias)
        else:
            self.up_proj = nn.Linear(width, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, width, bias=config.mlp_bias)

    def weights(self) -> BlockWeights:
        """This layer's parameters themselves, not copies."""
        up = self.gate_up_proj if self.config.activation == "swiglu" else self.up_proj
        return BlockWeights(
            input_norm=self.input_norm.weight,
            input_norm_bias=getattr(self.input_norm, "bias", None),
            qkv=self.qkv_proj.weight,
            qkv_bias=self.qkv_proj.bias,
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            out=self.o_proj.weight,
            out_bias=self.o_proj.bias,
            post_norm=self.post_norm.weight,
            post_norm_bias=getattr(self.post_norm, "bias", None),
            up=up.weight,
            up_bias=up.bias,
            down=self.down_proj.weight,
            down_bias=self.down_proj.bias,
        )

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None,
        plan: DocumentPlan,
        select: Callable[[BlockWeights], BlockWeights] | None = None,
    ) -> Tensor:
        """Map `x [T, D]`; `rope [2, T, 1, E]` holds cosines and sines of each token.

        `select` is applied to the layer's weights first, so that a layer computes with some of its
        heads and neurons; then `plan` is of as many heads. It is called here, and not by the
        caller, since sharded parameters are whole inside a forward only.
        """
        weights = self.weights() if select is None else select(self.weights())
        normed = self._normed(x, weights.input_norm, weights.input_norm_bias)
        attended = self._attend(normed, weights, rope, plan)
        x = x + fused.linear(attended, weights.out, weights.out_bias)
        normed = self._normed(x, weights.post_norm, weights.post_norm_bias)
        up = fused.linear(normed, weights.up, weights.up_bias)
        mlp = fused.swiglu_linear if self.config.activation == "swiglu" else fused.gelu_linear
        return x + mlp(up, weights.down, weights.down_bias)

    def _normed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return fused.rms_norm(x, weight, self.config.norm_eps)
        return fused.layer_norm(x, weight, bias, self.config.norm_eps)

    def _attend(
        self, x: Tensor, weights: BlockWeights, rope: Tensor | None, plan: DocumentPlan
    ) -> Tensor:
        heads, kv_heads, eps = plan.num_heads, plan.num_kv_heads, self.config.norm_eps
        projected = fused.linear(x, weights.qkv, weights.qkv_bias)
        projected = projected.unflatten(-1, (-1, self.config.head_dim))
        rotary, value = projected.split((heads + kv_heads, kv_heads), dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            query, key = rotary.split((heads, kv_heads), dim=1)
            query = fused.rms_norm(query, weights.q_norm, eps)
            rotary = torch.cat([query, fused.rms_norm(key, weights.k_norm, eps)], dim=1)
        if rope is not None:
            rotary = apply_rope(rotary, *rope)
        return document_attention(rotary, value, plan)


class Decoder(nn.Module):
    """Token ids in, final-norm hidden states out; the head is applied by the caller.

    Callers choose which rows need logits, so the vocabulary-wide product is never made for rows
    that nobody reads.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions: nn.Embedding | None = None
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(config.max_positions, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = _norm(config)
        self.lm_head: nn.Linear | None = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """Output matrix `[V, D]`; the embedding itself where the two are tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self,
        batch: PackedBatch,
        taps: Sequence[int] = (),
        through: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states of all tokens.

        `through` maps the first layer's input to the last one's output in place of the layers in
        turn, and nothing is tapped. It is called here since a sharded model is prepared by a call.

        Shapes: returns the final-norm states `[T, D]` and, for each layer index in `taps`, the
        input of that layer `[T, D]`.
        """
        x = self.embed(batch)
        if through is not None:
            return self.norm(through(x)), []
        rope = self.rope(batch, x.dtype)
        plan = plan_documents(batch, self.config.num_heads, self.config.num_kv_heads)
        tapped = []
        for index, layer in enumerate(self.layers):
            if index in taps:
                tapped.append(x)
            x = layer(x, rope, plan)
        return self.norm(x), tapped

    def embed(self, batch: PackedBatch) -> Tensor:
        """The first layer's input `[T, D]`.

        Raises:
            CapabilityError: if a document is longer than the positions that the model has learned.
        """
        self.config.require_positions(batch.longest)
        x = fused.embed(batch.ids, self.embed_tokens.weight)
        if self.embed_positions is None:
            return x
        return x + fused.embed(batch.positions, self.embed_positions.weight)

    def rope(self, batch: PackedBatch, dtype: torch.dtype) -> Tensor | None:
        """Cosines and sines `[2, T, 1, E]` of all tokens, where positions are rotary."""
        if self.config.positions != "rotary":
            return None
        table = rope_table(self.config, batch.longest, dtype).to(batch.ids.device)
        return table[:, batch.positions].unsqueeze(2)
