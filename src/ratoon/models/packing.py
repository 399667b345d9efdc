"""Ragged sequences without padding: documents laid end to end.

Shape letters: T all tokens of the batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Documents laid end to end; attention never crosses a document's border.

    `ids [T]` and `positions [T]` are int64; `lengths` sums to T. Usually each piece is a document.
    Where `parents[i]` is not None, piece i continues piece `parents[i]`, which itself continues
    none: several completions of one prompt hold the prompt once. Such a document is its parent
    followed by the piece.

    Example: documents of 3 and 2 tokens have positions `[0, 1, 2, 0, 1]` and parents
    `(None, None)`; a prompt of 3 tokens with completions of 2 and 1 has positions
    `[0, 1, 2, 3, 4, 3]` and parents `(None, 0, 0)`.
    """

    ids: Tensor
    positions: Tensor
    lengths: tuple[int, ...]
    parents: tuple[int | None, ...]

    @staticmethod
    def of(
        pieces: Sequence[Sequence[int]], parents: Sequence[int | None] | None = None
    ) -> PackedBatch:
        """Pack pieces in the order given; without `parents` each is a document."""
        lengths = tuple(len(piece) for piece in pieces)
        chosen = (None,) * len(lengths) if parents is None else tuple(parents)
        ids = torch.tensor([token for piece in pieces for token in piece], dtype=torch.long)
        firsts = [0 if parent is None else lengths[parent] for parent in chosen]
        positions = torch.cat(
            [
                torch.arange(first, first + length)
                for first, length in zip(firsts, lengths, strict=True)
            ]
        )
        return PackedBatch(ids, positions, lengths, chosen)

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(
            length + (0 if parent is None else self.lengths[parent])
            for length, parent in zip(self.lengths, self.parents, strict=True)
        )

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch on another device."""
        return PackedBatch(
            self.ids.to(device), self.positions.to(device), self.lengths, self.parents
        )


def micro_batches(
    lengths: Sequence[int], max_tokens: int, num_workers: int = 1
) -> list[list[list[int]]]:
    """Cut documents into micro-batches of at most `max_tokens`, and deal those out to workers.

    Returns, for each worker, its micro-batches as ascending document indices. Documents go,
    longest first, to the emptiest micro-batch, so all hold about the same number of tokens; there
    are as few as fit, the same number for each worker. A document longer than `max_tokens` gets
    a micro-batch of its own. The result is a function of the arguments alone. A worker has fewer
    micro-batches only when there are fewer documents than micro-batches.

    Example: `micro_batches([5, 3, 4], max_tokens=8) == [[[0], [1, 2]]]`.
    """
    if not lengths:
        return [[] for _ in range(num_workers)]
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    count = max(1, -(-sum(lengths) // max_tokens))
    count = -(-count // num_workers) * num_workers
    while True:
        batches: list[list[int]] = [[] for _ in range(count)]
        heap = [(0, place) for place in range(count)]
        for index in order:
            tokens, place = heapq.heappop(heap)
            batches[place].append(index)
            heapq.heappush(heap, (tokens + lengths[index], place))
        if all(tokens <= max_tokens or len(batches[place]) == 1 for tokens, place in heap):
            break
        count += num_workers
    return [
        [sorted(batch) for batch in batches[worker::num_workers] if batch]
        for worker in range(num_workers)
    ]
