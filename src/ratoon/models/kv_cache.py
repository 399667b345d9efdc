"""Preallocated keys and values of the rows being decoded.

Rows are slots `0 .. num_rows-1`; live rows are kept at the front, so that one view covers them.
Rolling back rejected tokens costs nothing: a row's length is the caller's, and what lies beyond
it is masked and later overwritten.

Shape letters: L layers, S slots, P positions, G key/value heads, E head width, M entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Attention reads whole blocks of positions. With blocks of another width the vectorised softmax
# sums a row's entries in another order, and logits depend on the neighbours' lengths.
WIDTH_STEP = 64

# In float32 the product with the values must be cut in the same places too. The attention kernel
# takes 512 positions at a time, and of these MKL adds up 192 at a time, but cuts what is a little
# more than one such block in halves.
_FLOAT32_BLOCK = 512
_FLOAT32_WIDTHS = (192, 384, 512)


def round_up_width(length: int, step: int = WIDTH_STEP) -> int:
    """The smallest multiple of `step` that holds `length` positions."""
    return -(-length // step) * step


def attention_width(length: int, dtype: torch.dtype) -> int:
    """Positions to read where `length` are in use, so that a row's bits do not depend on it."""
    if dtype != torch.float32:
        return round_up_width(length)
    blocks, rest = divmod(length, _FLOAT32_BLOCK)
    return blocks * _FLOAT32_BLOCK + next(w for w in (0, *_FLOAT32_WIDTHS) if w >= rest)


class LayerViews(NamedTuple):
    """One layer's keys and values, to attend to and to write into.

    Shapes: `keys, values [B, G, W, E]` of neighbouring slots; `key_entries, value_entries
    [S * P, G, E]`, where entry `slot * P + position` belongs to a position.
    """

    keys: Tensor
    values: Tensor
    key_entries: Tensor
    value_entries: Tensor


class KVCache:
    """Keys and values `[2, L, S, P, G, E]` with entry-wise copies across all layers at once."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_positions: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_positions = attention_width(num_positions, dtype)
        shape = (2, num_layers, num_slots, self.num_positions, num_kv_heads, head_dim)
        # Masked entries are multiplied by zero, so they must be finite.
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self._entries = self.data.view(2 * num_layers, num_slots * self.num_positions, -1)

    def layers(self, first_slot: int, num_rows: int, width: int) -> Iterator[LayerViews]:
        """Views of each layer, made all at once: a step's forward visits every layer."""
        slots = slice(first_slot, first_slot + num_rows)
        context = self.data[:, :, slots, :width].transpose(3, 4).unbind(1)
        entries = self.data.flatten(2, 3).unbind(1)
        for seen, written in zip(context, entries, strict=True):
            yield LayerViews(*seen.unbind(0), *written.unbind(0))

    def copy_entries(self, source: Tensor, target: Tensor) -> None:
        """Copy entries `source [M] -> target [M]` (flat indices) in all layers."""
        self._entries.index_copy_(1, target, self._entries.index_select(1, source))

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        self.data[:, :, target, :length] = self.data[:, :, source, :length]

    def read_row(self, slot: int, length: int) -> Tensor:
        """A copy `[2, L, length, G, E]` of a slot's first positions."""
        return self.data[:, :, slot, :length].clone()

    def write_row(self, slot: int, entries: Tensor) -> None:
        """Store what `read_row` gave."""
        self.data[:, :, slot, : entries.shape[2]] = entries
