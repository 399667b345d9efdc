"""The sequences in the slots of the engine, as tensors.

Live rows are slots `0 .. num_live-1`; a finished row's slot is filled by the last live row, so
every step works on leading views and nothing is gathered.

Shape letters: S slots, P positions, D width, K committed tokens of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ratoon.models.kv_cache import KVCache


class Rows:
    """Tokens, lengths, keys, log-probabilities and (when collected) states of each slot.

    `lengths[s]` counts the positions whose keys and values are cached; the token at that position
    is known already (the root of the next step's tree).
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        num_slots: int,
        feature_width: int,
        hidden_width: int,
        dtype: torch.dtype,
    ) -> None:
        device = cache.data.device
        size = cache.num_positions
        self.cache = cache
        self.num_live = 0
        self.tokens = torch.zeros(num_slots, size, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(num_slots, size, device=device)
        self.lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.last_positions = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.sequence_keys = torch.zeros(num_slots, 2, dtype=torch.int64, device=device)
        self.features = torch.empty(num_slots, size, feature_width, dtype=dtype, device=device)
        self.hidden = torch.empty(num_slots, size, hidden_width, dtype=dtype, device=device)

    def entries(self, num_rows: int, num_new: int) -> Tensor:
        """Flat cache entries `[B, N]` of the next positions of the first rows."""
        device = self.lengths.device
        starts = torch.arange(num_rows, device=device) * self.cache.num_positions
        offsets = torch.arange(num_new, device=device)
        return (starts + self.lengths[:num_rows])[:, None] + offsets

    def commit(
        self, path: Tensor, tokens: Tensor, logprobs: Tensor, counts: Tensor, states: Tensor
    ) -> None:
        """Append each row's accepted tokens and keep the keys and values of their parents.

        Shapes: `path [B, K]` tree node that each token was selected at, `tokens [B, K]`,
        `logprobs [B, K]`, `counts [B]` how many of the K are committed, `states [B, N, X]`
        features and final states of all nodes, side by side.
        """
        num_rows, depth = tokens.shape
        device = tokens.device
        kept = torch.arange(depth, device=device) < counts[:, None]
        row, level = kept.nonzero(as_tuple=True)
        node = path[row, level]
        start = self.lengths[:num_rows][row]
        self.tokens[row, start + level + 1] = tokens[row, level]
        self.logprobs[row, start + level + 1] = logprobs[row, level]
        moved = node != level
        base = row * self.cache.num_positions + start
        self.cache.copy_entries((base + node)[moved], (base + level)[moved])
        if states.shape[-1]:
            chosen = states[row, node]
            width = self.features.shape[-1]
            self.features[row, start + level] = chosen[:, :width]
            self.hidden[row, start + level] = chosen[:, width:]
        self.lengths[:num_rows] += counts

    def move(self, source: int, target: int) -> None:
        """Copy everything of one slot to another."""
        length = int(self.lengths[source])
        self.cache.copy_row(source, target, length)
        self.features[target, :length] = self.features[source, :length]
        self.hidden[target, :length] = self.hidden[source, :length]
        for values in (self.tokens, self.logprobs, self.lengths):
            values[target] = values[source]
        self.last_positions[target] = self.last_positions[source]
        self.sequence_keys[target] = self.sequence_keys[source]
