"""The sequences in the slots of the engine, as tensors.

Live rows are slots `0 .. num_live-1`; a finished row's slot is filled by the last live row, so
every step works on leading views and nothing is gathered.

Shape letters: S slots, B live rows, P positions, D width, N tree nodes, R nodes of all trees.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ratoon.models.kv_cache import KVCache
from ratoon.sampling.prefixes import Prefixes
from ratoon.speculation.verify import Verified


class Rows:
    """Tokens, lengths, keys, log-probabilities and (when collected) states of each slot.

    `lengths[s]` counts the positions whose keys and values are cached; the token at that position
    is final (the root of the next step's tree), the `carried[s]` tokens behind it are known but
    not yet confirmed. `host_lengths` and `host_carried` say the same on the CPU.

    A slot's last position is never used: what belongs nowhere may be written there.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        num_slots: int,
        feature_width: int,
        hidden_width: int,
        dtype: torch.dtype,
        static: bool = False,
    ) -> None:
        """`static`: what is written depends on shapes alone, so that no device has to be asked."""
        device = cache.data.device
        size = cache.num_positions
        self.cache = cache
        self.num_live = 0
        self._static = static
        self.tokens = torch.zeros(num_slots, size, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(num_slots, size, device=device)
        self.lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.carried = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.prompt_lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.host_lengths = torch.zeros(num_slots, dtype=torch.int64)
        self.host_carried = torch.zeros(num_slots, dtype=torch.int64)
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
        longest = int(self.host_carried[:num_rows].max())
        offsets = torch.arange(longest + 1, device=self.lengths.device)
        positions = (self.lengths[:num_rows, None] + offsets).clamp_max(self.tokens.shape[1] - 1)
        return self.tokens[:num_rows].gather(1, positions)

    def prefixes(self, num_rows: int, room: int, end_ids: Tensor) -> Prefixes:
        """The final tokens of the first rows, with room for so many more."""
        longest = int(self.host_lengths[:num_rows].max()) + 1
        return Prefixes(
            tokens=self.tokens[:num_rows, : longest + room].clone(),
            lengths=self.lengths[:num_rows] + 1,
            prompt_lengths=self.prompt_lengths[:num_rows],
            end_ids=end_ids[:num_rows],
        )

    def begin(
        self, slot: int, prompt_ids: Sequence[int], last_position: int, key: tuple[int, int]
    ) -> None:
        """Decode behind a prompt, whose tokens but the last are cached, up to `last_position`."""
        device, length = self.tokens.device, len(prompt_ids)
        self.tokens[slot, :length] = torch.tensor(prompt_ids, device=device)
        self.sequence_keys[slot] = torch.tensor(key, device=device)
        self.lengths[slot] = self.host_lengths[slot] = length - 1
        self.carried[slot] = self.host_carried[slot] = 0
        self.prompt_lengths[slot] = length
        self.last_positions[slot] = last_position

    def commit(
        self, verified: Verified, known: Tensor, final: Tensor, states: Tensor, places: Tensor
    ) -> None:
        """Append each row's tokens and keep the keys and values of the nodes they come from.

        Shapes: `known [B]` tokens of each row become known, `final [B]` of them are final;
        `states [R, X]` features and final-norm states of all nodes, side by side, and
        `places [B, N]` of the nodes among them (see `tree.packed`).
        Host-device syncs: three; none if static, when what is not kept is written, too: to the
        last positions.
        """
        path, tokens, logprobs, _ = verified
        num_rows, depth = tokens.shape
        size, device = self.cache.num_positions, tokens.device
        levels = torch.arange(depth, device=device)
        kept = levels < known[:, None]
        if self._static:
            row = torch.arange(num_rows, device=device).repeat_interleave(depth)
            level = levels.repeat(num_rows)
        else:
            row, level = kept.nonzero(as_tuple=True)
        node = path[row, level]
        moved = (node != level) & (level < final[row])
        position = self.lengths[:num_rows][row] + level
        target = row * size + position
        source = target - level + node
        after = position + 1
        if self._static:
            unused = row * size + size - 1
            source, target = torch.where(moved, source, unused), torch.where(moved, target, unused)
            position = torch.where(kept.flatten(), position, size - 1)
            after = torch.where(kept.flatten(), after, size - 1)
            node = node.clamp_min(0)
        else:
            source, target = source[moved], target[moved]
        if depth > 1:
            self.cache.copy_entries(source, target)
        self.tokens[row, after] = tokens[row, level]
        self.logprobs[row, after] = logprobs[row, level]
        if states.shape[-1]:
            chosen = states[places[row, node]]
            width = self.features.shape[-1]
            self.features[row, position] = chosen[:, :width]
            self.hidden[row, position] = chosen[:, width:]
        self.lengths[:num_rows] += final
        self.carried[:num_rows] = known - final

    def commit_on_host(self, known: Tensor, final: Tensor) -> None:
        """Count on the CPU what `commit` counted on the device."""
        self.host_lengths[: len(final)] += final
        self.host_carried[: len(final)] = known - final

    def move(self, source: int, target: int) -> None:
        """Copy everything of one slot to another."""
        length = int(self.host_lengths[source] + self.host_carried[source])
        self.cache.copy_row(source, target, length)
        self.features[target, :length] = self.features[source, :length]
        self.hidden[target, :length] = self.hidden[source, :length]
        for values in (
            self.tokens,
            self.logprobs,
            self.lengths,
            self.carried,
            self.prompt_lengths,
            self.host_lengths,
            self.host_carried,
            self.last_positions,
            self.sequence_keys,
        ):
            values[target] = values[source]
