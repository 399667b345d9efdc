"""Draft trees: the tokens that one forward pass of the target will check.

Shape letters: B sequences, N tree nodes (the root among them), K draft depth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """One draft tree for each of B sequences.

    Node 0 is the root: the last committed token, whose key and value are not computed yet. It is
    always valid. A parent has a lower index than its children. Rows may draft fewer nodes than N
    allows: their invalid nodes come last, hold token 0 under the root, and match nothing.

    Shapes: `tokens`, `parents` (-1 at the root), `depths` (0 at the root) and `sources` int64
    `[B, N]`; `chances [B, N]` float32 is the estimated chance that the target visits the node
    (1 at the root, never above the parent's); `valid [B, N]` bool. Bit i of `sources` is set
    where proposer i proposed the node. `promised`, where it was asked for, is what trees of other
    sizes would have promised (see `promised_visits`).
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    chances: Tensor
    valid: Tensor
    sources: Tensor
    promised: Tensor | None = None

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node of all rows. One host-device sync."""
        return int(self.depths.max())


def root_only(root_tokens: Tensor) -> Tree:
    """Trees that hold nothing but their roots `[B]`: walking them is plain decoding."""
    shape = (root_tokens.shape[0], 1)
    zeros = root_tokens.new_zeros(shape)
    return Tree(
        tokens=root_tokens[:, None],
        parents=zeros - 1,
        depths=zeros,
        chances=torch.ones(shape, device=root_tokens.device),
        valid=torch.ones(shape, dtype=torch.bool, device=root_tokens.device),
        sources=zeros,
    )


def packed(tree: Tree) -> tuple[Tensor, Tensor]:
    """The nodes of all trees without what only fills up rows.

    Returns `nodes [R]`, each node's place in the flattened `[B, N]`, and `places [B, N]`, the other
    way round: where among the R a node is (0 for what is no node). One host-device sync.
    """
    nodes = tree.valid.view(-1).nonzero().squeeze(1)
    places = torch.zeros_like(tree.tokens)
    places.view(-1)[nodes] = torch.arange(len(nodes), device=nodes.device)
    return nodes, places


def ancestor_mask(tree: Tree) -> Tensor:
    """Which nodes a node may attend to: itself and its ancestors, bool `[B, N, N]`.

    Entry `[b, i, j]` is true where j is i or an ancestor of i. Every row of the mask has a true
    entry, invalid nodes included, so that a softmax over it is finite.
    Cost: 2 small operations per level and one host-device sync.
    """
    num_rows, num_nodes = tree.tokens.shape
    mask = torch.eye(num_nodes, dtype=torch.bool, device=tree.tokens.device)
    mask = mask.repeat(num_rows, 1, 1)
    parents = tree.parents.clamp_min(0)
    ancestors = parents
    for _ in range(tree.max_depth):
        mask.scatter_(2, ancestors.unsqueeze(2), True)
        ancestors = parents.gather(1, ancestors)
    return mask


def ancestors_of(parents: Tensor) -> Tensor:
    """`ancestor_mask` of `parents [B, N]`, with no sync: for any tree of N nodes.

    Each pass doubles how far up a node looks: log2 N passes over `[B, N, N]`.
    """
    num_rows, num_nodes = parents.shape
    reached = parents.clamp_min(0)
    mask = torch.eye(num_nodes, dtype=torch.bool, device=parents.device).repeat(num_rows, 1, 1)
    for _ in range((num_nodes - 1).bit_length()):
        mask = mask | mask.gather(1, reached.unsqueeze(2).expand(-1, -1, num_nodes))
        reached = reached.gather(1, reached)
    return mask


def packed_to(valid: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """`packed` to a fixed number of nodes, with no sync: what is no node fills up, last.

    `valid [B, N]` has at most `size` true entries. Returns `nodes [size]`, all different, and
    `places [B, N]`.
    """
    flat = valid.flatten()
    behind = flat.sum() + (~flat).cumsum(0)
    ranks = torch.where(flat, flat.cumsum(0), behind) - 1
    nodes = torch.empty_like(ranks).scatter_(0, ranks, torch.arange(len(flat), device=flat.device))
    return nodes[:size], torch.where(flat, ranks, 0).view_as(valid)


def visited_nodes(valid: Tensor, path: Tensor) -> Tensor:
    """Which nodes lie on `path [B, L]`, padded with -1; the root always does. Bool `[B, N]`.

    `valid [B, N]` is the tree's.
    """
    visited = torch.zeros_like(valid)
    return visited.scatter_(1, path.clamp_min(0), True)
