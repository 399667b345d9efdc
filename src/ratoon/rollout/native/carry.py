"""Trees whose results have the bits of plain decoding, and what to do with those that have not.

A sum over keys depends, in its last bits, on the columns that the keys lie in. A node's states have
the bits of plain decoding exactly when it and its ancestors lie in the columns they would have
there: node i at depth i. So

- the most likely path of a tree comes first (`main_path_first`), and what is selected along it is
  final;
- what is selected at any other node is not final. Those tokens are *carried*: the next step's tree
  begins with them as a chain, in their plain columns, and confirms each (or, once in some hundred
  tokens, replaces it). Carried tokens are nothing but a very good draft.

Shape letters: B rows, N tree nodes, M longest chain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ratoon.speculation.tree import Tree


def main_path_first(tree: Tree, max_depth: int | None = None) -> Tree:
    """The same trees, renumbered so that the likeliest path has nodes 0, 1, 2, ... by depth.

    No node lies below `max_depth`; None: as deep as they are, found by one host-device sync.
    """
    num_nodes = tree.tokens.shape[1]
    if num_nodes <= 2:
        return tree
    device = tree.tokens.device
    order = torch.arange(num_nodes, 2 * num_nodes, device=device).repeat(len(tree.tokens), 1)
    order[:, 0] = 0
    node = torch.zeros(len(tree.tokens), 1, dtype=torch.int64, device=device)
    for depth in range(1, (tree.max_depth if max_depth is None else max_depth) + 1):
        chances = torch.where((tree.parents == node) & tree.valid, tree.chances, 0.0)
        best, child = chances.max(dim=1, keepdim=True)
        exists = best > 0
        order.scatter_(1, child, torch.where(exists, depth, order.gather(1, child)))
        # A row whose path ended looks for children of a node that does not exist.
        node = torch.where(exists, child, num_nodes)
    permutation = order.argsort(dim=1)
    places = torch.empty_like(permutation)
    places.scatter_(1, permutation, torch.arange(num_nodes, device=device).expand_as(permutation))
    parents = places.gather(1, tree.parents.clamp_min(0).gather(1, permutation))
    parents[:, 0] = -1
    return Tree(
        tokens=tree.tokens.gather(1, permutation),
        parents=parents,
        depths=tree.depths.gather(1, permutation),
        chances=tree.chances.gather(1, permutation),
        valid=tree.valid.gather(1, permutation),
        sources=tree.sources.gather(1, permutation),
    )


def with_chain(tree: Tree, chain: Tensor, carried: Tensor) -> Tree:
    """Trees that begin with the carried tokens of each row; the old root is the chain's last.

    Shapes: `carried [B]`: tokens of each row's chain before the old root; `chain [B, M]`: those
    tokens, padded; M is the largest of `carried`.
    """
    num_nodes = tree.tokens.shape[1] + chain.shape[1]
    index = torch.arange(num_nodes, device=chain.device)
    old = index - carried[:, None]
    in_chain = old < 0
    is_node = ~in_chain & (old < tree.tokens.shape[1])
    old = old.clamp(0, tree.tokens.shape[1] - 1)
    valid = in_chain | (is_node & tree.valid.gather(1, old))
    shift = carried[:, None]

    def merged(chain_values: Tensor, values: Tensor, padding: Tensor | int) -> Tensor:
        return torch.where(in_chain, chain_values, torch.where(valid, values, padding))

    padded = torch.nn.functional.pad(chain, (0, tree.tokens.shape[1]))
    ones = torch.ones((), device=chain.device)
    return Tree(
        tokens=merged(padded, tree.tokens.gather(1, old), 0),
        parents=merged(index - 1, tree.parents.gather(1, old) + shift, shift),
        depths=merged(index, tree.depths.gather(1, old) + shift, shift + 1),
        chances=merged(ones, tree.chances.gather(1, old), ones),
        valid=valid,
        sources=merged(torch.zeros_like(index), tree.sources.gather(1, old), 0),
    )


def num_final(path: Tensor, counts: Tensor) -> Tensor:
    """How many of each row's tokens were selected at nodes in their plain columns.

    Shapes: `path [B, L]` and `counts [B]` as `Verified` has them; returns `[B]`, at least 1.
    """
    levels = torch.arange(path.shape[1], device=path.device)
    in_place = (path == levels).long().cumprod(dim=1).sum(dim=1)
    return torch.minimum(in_place, counts)
