"""What the drafted candidates promise for trees of every smaller size, by their chances alone.

Shape letters: B sequences, M candidates of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def promised_visits(levels: Sequence[Tensor], depth: int, budget: int) -> Tensor:
    """Nodes that the target is expected to visit, per sequence, by the size of the trees.

    Entry `[d - 1, b - 1]` is of trees with at most d levels and, on average, b nodes: the `B * b`
    candidates of the highest chance, which include their ancestors. So one step's candidates tell
    of all smaller budgets and depths at once, whatever of them is verified.

    Shapes: `levels[k] [B, M]` are the chances of the candidates at depth k + 1; at most `depth`
    levels. Returns `[depth, budget]`.
    Cost: one sort of all candidates, a few passes of `depth` times as many; no host-device syncs.
    Source: ours.
    """
    num_rows = len(levels[0])
    chances, order = torch.cat(list(levels), dim=1).flatten().sort(descending=True)
    numbers = [torch.full_like(level[0], k, dtype=torch.int64) for k, level in enumerate(levels)]
    level = torch.cat(numbers).repeat(num_rows)[order]
    depths = torch.arange(depth, device=chances.device)[:, None]
    taken = level <= depths
    ranks = (taken.cumsum(dim=1) - 1).clamp_min_(0) // num_rows
    table = torch.zeros(depth, budget + 1, device=chances.device)
    table.scatter_add_(1, ranks.clamp_max_(budget), chances * taken)
    return table[:, :budget].cumsum(dim=1) / num_rows
