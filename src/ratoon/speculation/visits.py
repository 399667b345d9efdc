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
    """Visited nodes per sequence by rank and depth, and drafted ones per sequence by rank.

    The nodes of all trees are ordered by chance; rank r are those from `r * B` to
    `(r + 1) * B - 1`. The nodes of the first n ranks are what a budget of n per sequence, shared by
    the batch, would have kept, so what a smaller budget would have gained can be read off a larger
    one's ranks.

    Shapes: `path [B, L]` visited nodes, padded with -1; `root_depths [B]` of the nodes that
    drafting started from. Returns `[N - 1, K]` and `[N - 1]`. One host-device sync.
    Source: ours.
    """
    num_rows = len(tree.tokens)
    drafted = tree.valid & (tree.depths > root_depths[:, None])
    visited = visited_nodes(tree, path) & drafted
    order = tree.chances.masked_fill(~drafted, -1.0).view(-1).argsort(descending=True, stable=True)
    order = order[: num_rows * (tree.tokens.shape[1] - 1)]
    ranks = torch.arange(len(order), device=order.device) // num_rows
    depths = (tree.depths - root_depths[:, None]).view(-1)[order].sub_(1).clamp_(0, MAX_DEPTH - 1)
    table = torch.zeros(tree.tokens.shape[1] - 1, MAX_DEPTH, device=order.device)
    seen, found = (values.view(-1)[order].float() for values in (visited, drafted))
    table.view(-1).index_add_(0, ranks * MAX_DEPTH + depths, seen)
    present = torch.zeros(len(table), device=order.device).index_add_(0, ranks, found)
    return (table / num_rows).tolist(), (present / num_rows).tolist()
