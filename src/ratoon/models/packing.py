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

    `ids [T]` and `positions [T]` are int64; positions restart at 0 in each document; `lengths`
    sums to T. Example: documents of 3 and 2 tokens have positions `[0, 1, 2, 0, 1]`.
    """

    ids: Tensor
    positions: Tensor
    lengths: tuple[int, ...]

    @staticmethod
    def of(documents: Sequence[Sequence[int]]) -> PackedBatch:
        """Pack documents in the order given."""
        lengths = tuple(len(document) for document in documents)
        ids = torch.tensor(
            [token for document in documents for token in document], dtype=torch.long
        )
        positions = torch.cat([torch.arange(length) for length in lengths])
        return PackedBatch(ids, positions, lengths)

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch on another device."""
        return PackedBatch(self.ids.to(device), self.positions.to(device), self.lengths)


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
