"""Ragged sequences without padding: documents laid end to end.

Shape letters: T all tokens of the batch.
"""

from __future__ import annotations

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
        ids = torch.tensor([token for document in documents for token in document])
        positions = torch.cat([torch.arange(length) for length in lengths])
        return PackedBatch(ids, positions, lengths)
