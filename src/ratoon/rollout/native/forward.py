"""The inference forward: some new tokens of each live row against its cached context.

One function serves plain decoding (one token a row), verification (a draft tree a row) and
prefill (a chunk of one row). With the precautions taken here and in `PackedLinear` and
`attention_width`, each row's states have the same bits in all of these, whatever the other rows
are: in bf16 by oneDNN's prepacked products, in float32 by MKL's.

Shape letters: B live rows, N new tokens of the row with most, R new tokens of all rows, W KV
width, D model width, H query heads, G key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ratoon.models.decoder import (
    Block,
    BlockWeights,
    Decoder,
    LayerNorm,
    apply_rope,
    rope_table,
)
from ratoon.models.fused import gelu, layer_norm_dtype
from ratoon.models.kv_cache import KVCache
from ratoon.models.prepacked import EVEN_ROWS, ROW_HINT, PackedLinear


class Norm:
    """Root-mean-square norm, or layer norm where there is a bias, with copied weights."""

    __slots__ = ("_bias", "_eps", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> None:
        # Rounded as the trainer's copy is, whatever type the kernel wants them in.
        self._weight = weight.detach().to(dtype, copy=True)
        self._bias: Tensor | None = None
        if bias is not None:
            wide = layer_norm_dtype(self._weight)
            self._weight = self._weight.to(wide)
            self._bias = bias.detach().to(dtype, copy=True).to(wide)
        self._eps = eps

    def tensors(self) -> list[Tensor]:
        """What the norm reads."""
        return [self._weight] if self._bias is None else [self._weight, self._bias]

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise the last axis of `x`."""
        if self._bias is None:
            return F.rms_norm(x, self._weight.shape, self._weight, self._eps)
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)


class _Layer(NamedTuple):
    """What `BlockWeights` names, ready to compute with."""

    input_norm: Norm
    qkv: PackedLinear
    q_norm: Norm | None
    k_norm: Norm | None
    out: PackedLinear
    post_norm: Norm
    up: PackedLinear
    down: PackedLinear


class InferenceModel:
    """Prepacked copies of a decoder's weights. Rebuild it after each weight update."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_positions: int,
        dtype: torch.dtype,
        taps: Sequence[int] = (),
        row_hint: int = ROW_HINT,
    ) -> None:
        """Copy `decoder`'s weights in `dtype`, for positions `0 .. num_positions - 1`.

        Drafts may lie beyond the last position that a model has learned: they are computed with no
        position there, and never selected, since requests end before.
        """
        self.config = decoder.config
        self.taps = tuple(taps)
        self.dtype = dtype
        self.num_positions = num_positions
        self._row_hint = row_hint
        self.embedding = decoder.embed_tokens.weight.detach().to(dtype, copy=True)
        device = self.embedding.device
        self._positions: Tensor | None = None
        if decoder.embed_positions is not None:
            learned = decoder.embed_positions.weight.detach().to(dtype)
            self._positions = learned.new_zeros(max(num_positions, len(learned)), learned.shape[1])
            self._positions[: len(learned)] = learned
        self._rope: Tensor | None = None
        if self.config.positions == "rotary":
            self._rope = rope_table(self.config, num_positions, dtype).to(device)
        self._layers = [
            self._layer(layer.weights()) for layer in cast(Iterable[Block], decoder.layers)
        ]
        norm = decoder.norm
        self._norm = self._make_norm(
            norm.weight, norm.bias if isinstance(norm, LayerNorm) else None
        )
        self._head = self._pack(decoder.head_weight)

    def _layer(self, weights: BlockWeights) -> _Layer:
        w = weights
        return _Layer(
            input_norm=self._make_norm(w.input_norm, w.input_norm_bias),
            qkv=self._pack(w.qkv, w.qkv_bias),
            q_norm=None if w.q_norm is None else self._make_norm(w.q_norm),
            k_norm=None if w.k_norm is None else self._make_norm(w.k_norm),
            out=self._pack(w.out, w.out_bias),
            post_norm=self._make_norm(w.post_norm, w.post_norm_bias),
            up=self._pack(w.up, w.up_bias),
            down=self._pack(w.down, w.down_bias),
        )

    def _make_norm(self, weight: Tensor, bias: Tensor | None = None) -> Norm:
        return Norm(weight, bias, self.config.norm_eps, self.dtype)

    def _pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        bias = None if bias is None else bias.detach().to(self.dtype)
        return PackedLinear(weight.detach().to(self.dtype), bias, row_hint=self._row_hint)

    def tensors(self) -> list[Tensor]:
        """All weights, in the same order for models of the same shape."""
        parts = [part for layer in self._layers for part in layer if part is not None]
        found = [tensor for part in (*parts, self._norm, self._head) for tensor in part.tensors()]
        learned = [] if self._positions is None else [self._positions]
        return [self.embedding, *learned, *found]

    def linears(self) -> list[tuple[str, PackedLinear, int]]:
        """One layer's matrices and the head: name, layer and input width of each shape in use."""
        config, layer = self.config, self._layers[0]
        width = config.hidden_size
        gated = config.activation == "swiglu"
        return [
            ("qkv_proj", layer.qkv, width),
            ("o_proj", layer.out, config.qkv_sizes[0]),
            ("gate_up_proj" if gated else "up_proj", layer.up, width),
            ("down_proj", layer.down, config.intermediate_size),
            ("head", self._head, width),
        ]

    def make_cache(self, num_slots: int, num_positions: int) -> KVCache:
        """A KV cache of this model's shape."""
        config = self.config
        return KVCache(
            num_layers=config.num_layers,
            num_slots=num_slots,
            num_positions=num_positions,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self.dtype,
            device=self.embedding.device,
        )

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        entries: Tensor,
        mask: Tensor,
        cache: KVCache,
        first_slot: int = 0,
        present: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """States of the new tokens; their keys and values are written to the cache.

        Shapes: `tokens [B, N]`, `positions [B, N]`, `entries [B, N]` flat cache entries to write,
        `mask [B, 1, Q, W]` as `attention_mask` makes it; the B rows are the cache's slots from
        `first_slot` on. `present [R]`: places, in the flattened `[B, N]`, of what is computed;
        None: of all.
        Returns final-norm states `[R, D]` and features `[R, num_taps * D]`.
        Host-device syncs: none.
        """
        num_rows = len(tokens)
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        flat = [values.reshape(-1) for values in (tokens, positions, entries)]
        if present is not None:
            flat = [values[present] for values in flat]
        ids, places, entries = flat
        x, rope = self._embed(ids, places)
        tapped = []
        layers = zip(self._layers, cache.layers(first_slot, num_rows, mask.shape[-1]), strict=True)
        for index, (layer, cached) in enumerate(layers):
            if index in self.taps:
                tapped.append(x)
            projected = layer.qkv(layer.input_norm(x)).view(
                -1, heads + 2 * kv_heads, config.head_dim
            )
            rotary, value = projected.split((heads + kv_heads, kv_heads), dim=1)
            if rope is not None and layer.q_norm is None:
                rotary = apply_rope(rotary, *rope)
            query, key = rotary.split((heads, kv_heads), dim=1)
            if layer.q_norm is not None and layer.k_norm is not None:
                query, key = layer.q_norm(query), layer.k_norm(key)
                if rope is not None:
                    query, key = apply_rope(query, *rope), apply_rope(key, *rope)
            cached.key_entries.index_copy_(0, entries, key)
            cached.value_entries.index_copy_(0, entries, value)
            if present is not None:
                query = query.new_zeros(tokens.numel(), *query.shape[1:]).index_copy_(
                    0, present, query
                )
            attended = attend(query, cached.keys, cached.values, mask, heads // kv_heads)
            attended = attended.flatten(0, 1).flatten(1)
            x = x + layer.out(attended if present is None else attended[present])
            x = x + layer.down(self._activate(layer.up(layer.post_norm(x))))
        features = torch.cat(tapped, dim=-1) if tapped else x.new_empty(x.shape[0], 0)
        return self._norm(x), features

    def _embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        """States `[R, D]` of the first layer's input; cosines and sines `[2, R, 1, E]`, if any."""
        x = F.embedding(tokens, self.embedding)
        if self._positions is not None:
            x = x + F.embedding(positions, self._positions)
        return x, None if self._rope is None else self._rope[:, positions].unsqueeze(2)

    def _activate(self, up: Tensor) -> Tensor:
        if self.config.activation == "gelu_tanh":
            return gelu(up)
        gate, gated = up.chunk(2, dim=-1)
        return F.silu(gate).mul_(gated)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[R, V]` of final-norm states `[R, D]`."""
        return self._head(hidden)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, group: int) -> Tensor:
    """Attention of `query [B * N, H, E]` over `keys, values [B, G, W, E]`; returns `[B, N, H, E]`.

    `mask [B, 1, Q, W]` is of `attention_mask`: query heads of a group are folded into the query
    axis, N outermost.
    """
    num_rows, num_kv_heads, _, head_dim = keys.shape
    folded = query.view(num_rows, -1, num_kv_heads, group, head_dim).transpose(1, 2)
    folded = folded.reshape(num_rows, num_kv_heads, -1, head_dim)
    count = folded.shape[2]
    if mask.shape[2] > count:
        folded = F.pad(folded, (0, 0, 0, mask.shape[2] - count))
    attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    unfolded = attended[:, :, :count].view(num_rows, num_kv_heads, -1, group, head_dim)
    return unfolded.transpose(1, 2).flatten(2, 3)


def attention_mask(
    lengths: Tensor, ancestors: Tensor, width: int, group: int, dtype: torch.dtype
) -> Tensor:
    """Additive mask: the committed context, plus each new token's ancestors among the new tokens.

    `dtype` must be the queries': the CPU kernel reads a float32 mask wrongly for float64 queries,
    and the CUDA kernels refuse other types.

    Shapes: `lengths [B]` committed positions, `ancestors [B, N, N]` bool (ancestor or self; the
    token of column i is cached at position `lengths + i`). Returns `[B, 1, Q, width]`: `N * group`
    queries and, behind them, as many as the kernel needs to sum each as it sums many.
    """
    num_rows, num_new, _ = ancestors.shape
    columns = torch.arange(width, device=lengths.device)
    offset = columns - lengths[:, None]
    visible = (offset < 0)[:, None].expand(num_rows, num_new, width).clone()
    target = (lengths[:, None] + torch.arange(num_new, device=lengths.device))[:, None]
    visible.scatter_(2, target.expand(num_rows, num_new, num_new), ancestors)
    mask = torch.zeros(visible.shape, dtype=dtype, device=lengths.device)
    mask.masked_fill_(visible.logical_not_(), float("-inf"))
    mask = mask.repeat_interleave(group, dim=1)
    missing = _missing_queries(mask.shape[1], dtype)
    if missing:
        mask = torch.cat([mask, mask[:, -1:].expand(-1, missing, -1)], dim=1)
    return mask.unsqueeze(1)


def _missing_queries(count: int, dtype: torch.dtype) -> int:
    """Few queries, also as the last of a block, are multiplied by kernels that sum otherwise."""
    return -count % EVEN_ROWS if dtype == torch.float32 else int(count == 1)
