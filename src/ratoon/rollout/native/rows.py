"""The sequences in the slots of the engine, as tensors.

Live rows are slots `0 .. num_live-1`; a finished row's slot is filled by the last live row, so
every step works on leading views and nothing is gathered.

Shape letters: S slots, B live rows, P positions, D width, N tree nodes, R nodes of all trees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ratoon.models.kv_cache import KVCache
from ratoon.sampling.prefixes import Prefixes
from ratoon.speculation.verify import Verified


class Rows:
    """Tokens, lengths, keys, log-probabilities and (when collected) states of each slot.

    `lengths[s]` counts the positions whose keys and values are cached; the token at that position
    is final (the root of the next step's tree), the `carried[s]` tokens behind it are known but
    not yet confirmed.
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
        self.carried = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.prompt_lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)
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

    def chain(self, num_rows: int) -> Tensor:
        """Final token and carried tokens `[B, M + 1]` of the first rows, padded at the end."""
        longest = int(self.carried[:num_rows].max())
        offsets = torch.arange(longest + 1, device=self.lengths.device)
        positions = (self.lengths[:num_rows, None] + offsets).clamp_max(self.tokens.shape[1] - 1)
        return self.tokens[:num_rows].gather(1, positions)

    def prefixes(self, num_rows: int, room: int, end_ids: Tensor) -> Prefixes:
        """The final tokens of the first rows, with room for so many more. One host-device sync."""
        lengths = self.lengths[:num_rows] + 1
        return Prefixes(
            tokens=self.tokens[:num_rows, : int(lengths.max()) + room].clone(),
            lengths=lengths,
            prompt_lengths=self.prompt_lengths[:num_rows],
            end_ids=end_ids[:num_rows],
        )

    def commit(
        self, verified: Verified, known: Tensor, final: Tensor, states: Tensor, places: Tensor
    ) -> None:
        """Append each row's tokens and keep the keys and values of the nodes they come from.

        Shapes: `known [B]` tokens of each row become known, `final [B]` of them are final;
        `states [R, X]` features and final-norm states of all nodes, side by side, and
        `places [B, N]` of the nodes among them (see `tree.packed`).
        """
        path, tokens, logprobs, _ = verified
        num_rows, depth = tokens.shape
        device = tokens.device
        row, level = (torch.arange(depth, device=device) < known[:, None]).nonzero(as_tuple=True)
        node = path[row, level]
        start = self.lengths[:num_rows][row]
        self.tokens[row, start + level + 1] = tokens[row, level]
        self.logprobs[row, start + level + 1] = logprobs[row, level]
        moved = (node != level) & (level < final[row])
        base = row * self.cache.num_positions + start
        self.cache.copy_entries((base + node)[moved], (base + level)[moved])
        if states.shape[-1]:
            chosen = states[places[row, node]]
            width = self.features.shape[-1]
            self.features[row, start + level] = chosen[:, :width]
            self.hidden[row, start + level] = chosen[:, width:]
        self.lengths[:num_rows] += final
        self.carried[:num_rows] = known - final

    def move(self, source: int, target: int) -> None:
        """Copy everything of one slot to another."""
        length = int(self.lengths[source] + self.carried[source])
        self.cache.copy_row(source, target, length)
        self.features[target, :length] = self.features[source, :length]
        self.hidden[target, :length] = self.hidden[source, :length]
        for values in (
            self.tokens,
            self.logprobs,
            self.lengths,
            self.carried,
            self.prompt_lengths,
            self.last_positions,
            self.sequence_keys,
        ):
            values[target] = values[source]
