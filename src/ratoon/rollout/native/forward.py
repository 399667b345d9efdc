"""The inference forward: some new tokens of each live row against its cached context.

One function serves plain decoding (one token a row), verification (a draft tree a row) and
prefill (a chunk of one row). With prepacked bf16 weights and a KV width in steps of 64 each row's
states have the same bits in all of these, whatever the other rows are.

Shape letters: B live rows, N new tokens a row, R = B * N, W KV width, D model width, H query
heads, G key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ratoon.models.decoder import Block, Decoder, apply_rope, rope_table
from ratoon.models.kv_cache import KVCache
from ratoon.models.prepacked import ROW_HINT, PackedLinear


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
        self.config = decoder.config
        self.taps = tuple(taps)
        self.dtype = dtype
        self.num_positions = num_positions
        self.embedding = decoder.embed_tokens.weight.detach().to(dtype, copy=True)
        device = self.embedding.device

        def pack(weight: Tensor) -> PackedLinear:
            return PackedLinear(weight.detach().to(dtype), row_hint=row_hint)

        self._layers = [
            (
                layer.input_norm.weight.detach().to(dtype, copy=True),
                pack(layer.qkv_proj.weight),
                pack(layer.o_proj.weight),
                layer.post_norm.weight.detach().to(dtype, copy=True),
                pack(layer.gate_up_proj.weight),
                pack(layer.down_proj.weight),
            )
            for layer in cast(Iterable[Block], decoder.layers)
        ]
        self._norm = decoder.norm.weight.detach().to(dtype, copy=True)
        self._head = pack(decoder.head_weight)
        self._rope = rope_table(self.config, num_positions, dtype).to(device)

    def linears(self) -> list[tuple[str, PackedLinear, int]]:
        """One layer's matrices and the head: name, layer and input width of each shape in use."""
        config = self.config
        _, qkv, out, _, gate_up, down = self._layers[0]
        width = config.hidden_size
        return [
            ("qkv_proj", qkv, width),
            ("o_proj", out, config.qkv_sizes[0]),
            ("gate_up_proj", gate_up, width),
            ("down_proj", down, config.intermediate_size),
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
    ) -> tuple[Tensor, Tensor]:
        """States of the new tokens; their keys and values are written to the cache.

        Shapes: `tokens [B, N]`, `positions [B, N]`, `entries [R]` flat cache entries to write,
        `mask [B, 1, N * H/G, W]` as `attention_mask` makes it (query heads of a group are folded
        into the query axis, N outermost); the B rows are the cache's slots from `first_slot` on.
        Returns final-norm states `[R, D]` and features `[R, num_taps * D]`.
        Host-device syncs: none.
        """
        num_rows, num_new = tokens.shape
        config = self.config
        eps = config.rms_norm_eps
        width = (config.hidden_size,)
        group = config.num_heads // config.num_kv_heads
        x = F.embedding(tokens.reshape(-1), self.embedding)
        cos, sin = self._rope[:, positions.reshape(-1)].unsqueeze(2)
        tapped = []
        layers = zip(self._layers, cache.layers(first_slot, num_rows, mask.shape[-1]), strict=True)
        for index, (weights, cached) in enumerate(layers):
            input_norm, qkv, out, post_norm, gate_up, down = weights
            if index in self.taps:
                tapped.append(x)
            fused = qkv(F.rms_norm(x, width, input_norm, eps))
            heads = fused.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
            rotary, value = heads.split(
                (config.num_heads + config.num_kv_heads, config.num_kv_heads), dim=1
            )
            query, key = apply_rope(rotary, cos, sin).split(
                (config.num_heads, config.num_kv_heads), dim=1
            )
            cached.key_entries.index_copy_(0, entries, key)
            cached.value_entries.index_copy_(0, entries, value)
            attended = attend(query, cached.keys, cached.values, mask, group)
            x = x + out(attended.reshape(num_rows * num_new, -1))
            gate, up = gate_up(F.rms_norm(x, width, post_norm, eps)).chunk(2, dim=-1)
            x = x + down(F.silu(gate).mul_(up))
        features = torch.cat(tapped, dim=-1) if tapped else x.new_empty(x.shape[0], 0)
        return F.rms_norm(x, width, self._norm, eps), features

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[R, V]` of final-norm states `[R, D]`."""
        return self._head(hidden)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, group: int) -> Tensor:
    """Attention of `query [R, H, E]` over `keys, values [B, G, W, E]`; returns `[B, N, H, E]`."""
    num_rows, num_kv_heads, _, head_dim = keys.shape
    folded = query.view(num_rows, -1, num_kv_heads, group, head_dim).transpose(1, 2)
    attended = F.scaled_dot_product_attention(
        folded.reshape(num_rows, num_kv_heads, -1, head_dim), keys, values, attn_mask=mask
    )
    unfolded = attended.view(num_rows, num_kv_heads, -1, group, head_dim).transpose(1, 2)
    return unfolded.flatten(2, 3)


def attention_mask(
    lengths: Tensor, ancestors: Tensor, width: int, group: int, dtype: torch.dtype
) -> Tensor:
    """Additive mask: the committed context, plus each new token's ancestors among the new tokens.

    `dtype` must be the queries': the CPU kernel reads a float32 mask wrongly for float64 queries,
    and the CUDA kernels refuse other types.

    Shapes: `lengths [B]` committed positions, `ancestors [B, N, N]` bool (ancestor or self; the
    token of column i is cached at position `lengths + i`). Returns `[B, 1, N * group, width]`.
    """
    num_rows, num_new, _ = ancestors.shape
    columns = torch.arange(width, device=lengths.device)
    offset = columns - lengths[:, None]
    visible = (offset < 0)[:, None].expand(num_rows, num_new, width).clone()
    target = (lengths[:, None] + torch.arange(num_new, device=lengths.device))[:, None]
    visible.scatter_(2, target.expand(num_rows, num_new, num_new), ancestors)
    mask = torch.zeros(visible.shape, dtype=dtype, device=lengths.device)
    mask.masked_fill_(visible.logical_not_(), float("-inf"))
    return mask.repeat_interleave(group, dim=1).unsqueeze(1)
