"""Sums over the workers of one update."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DataParallel:
    """The workers that share an update; a single one by default.

    With a process group all of its members make the same calls in the same order, and end with
    the same bits.
    """

    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """This worker's place, from 0."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Number of workers."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    def sum_(self, values: Tensor) -> Tensor:
        """Replace `values` by their sum over workers."""
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.SUM, self.group)
        return values

    def max_(self, values: Tensor) -> Tensor:
        """Replace `values` by their maximum over workers."""
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX, self.group)
        return values
