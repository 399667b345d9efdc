"""Which drafted nodes the target visited, by their rank: one tree tells of all smaller ones.

Shape letters: B sequences, N tree nodes, K draft depth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ratoon.speculation.strategy import MAX_DEPTH
from ratoon.speculation.tree import Tree, visited_nodes


def visits_by_rank(
    tree: Tree, path: Tensor, root_depths: Tensor
) -> tuple[list[list[float]], list[float]]:
    """Share of sequences whose node of a rank was visited, by depth; and that drafted one at all.

    Ranks are by chance. The best `n` nodes of a tree are the tree of budget `n`, so what a smaller
    budget would have gained can be read off the larger one's ranks.

    Shapes: `path [B, L]` visited nodes, padded with -1; `root_depths [B]` of the nodes that
    drafting started from. Returns `[N - 1, K]` and `[N - 1]`. One host-device sync.
    Source: ours.
    """
    drafted = tree.valid & (tree.depths > root_depths[:, None])
    visited = visited_nodes(tree, path)
    order = tree.chances.masked_fill(~drafted, -1.0).argsort(dim=1, descending=True, stable=True)
    order = order[:, : tree.tokens.shape[1] - 1]
    seen = (visited & drafted).gather(1, order)
    depths = (tree.depths - root_depths[:, None]).gather(1, order).sub_(1).clamp_(0, MAX_DEPTH - 1)
    table = torch.zeros(order.shape[1], MAX_DEPTH, device=order.device)
    ranks = torch.arange(order.shape[1], device=order.device).expand_as(order)
    table.view(-1).index_add_(0, (ranks * MAX_DEPTH + depths).flatten(), seen.float().flatten())
    present = drafted.gather(1, order).float().mean(0)
    return (table / len(order)).tolist(), present.tolist()
