"""What the workers of one update do together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
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

    def copy_first_(self, values: Tensor) -> Tensor:
        """Replace `values` by those of worker 0."""
        if self.size > 1:
            dist.broadcast(values, group=self.group, group_src=0)
        return values

    def all_true(self, value: bool) -> bool:
        """Whether `value` holds on every worker."""
        flag = torch.tensor(int(value))
        if self.size > 1:
            dist.all_reduce(flag, dist.ReduceOp.MIN, self.group)
        return bool(flag)

    def broadcast(self, text: str) -> str:
        """The text of worker 0."""
        texts = [text]
        if self.size > 1:
            dist.broadcast_object_list(texts, group=self.group, group_src=0)
        return texts[0]

    def barrier(self) -> None:
        """Wait until every worker is here."""
        if self.size > 1:
            dist.barrier(self.group)
