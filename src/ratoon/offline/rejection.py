"""How many drafted tokens rejection sampling would have accepted, given what the target said.

A lossless scheme's output has the target's law whatever it drafts. So for a response that the
target did draw, the number of accepted tokens can be drawn *given that response*, from p and q
along it alone, without running the scheme. `p` is the target's and `q` the drafter's distribution.

Shape letters: B sequences, K drafted levels, V draft vocabulary; p has one column more for all
tokens that cannot be drafted.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def token_reach(p: Tensor, q: Tensor) -> Tensor:
    """Chance that a chain is accepted up to each level, token by token.

    Shapes: `p, q [B, K]` of the response's own tokens; returns `[B, K]`, falling along a row.
    Source: Leviathan et al. 2023, Chen et al. 2023; given the output y, a level is passed with
    chance min(1, q(y) / p(y)).
    """
    return (q / p).clamp_max(1.0).cumprod(dim=1)


def block_reach(p: Tensor, q: Tensor) -> Tensor:
    """The same by block verification.

    Source: Sun et al. 2024 (arXiv 2403.10444). A draft is kept up to level i with chance w_i,
    w_i = min(1, w_(i-1) p_i / q_i). Given the output that is w_i Q_i / P_i, with P and Q the
    products so far, which is the smallest min(1, Q / P) of all levels up to i.
    """
    return (q / p).cumprod(dim=1).clamp_max(1.0).cummin(dim=1).values


def num_accepted(reach: Tensor, generator: torch.Generator) -> Tensor:
    """How many levels of a chain are accepted `[B]`."""
    uniform = torch.rand(len(reach), 1, generator=generator)
    return (uniform < reach).sum(dim=1)


def accepted_child(
    p: Tensor, q: Tensor, target: Tensor, num_children: Tensor, generator: torch.Generator
) -> Tensor:
    """Which of a node's children carries the target's token, -1 where none does.

    Children are drawn from q without replacement and tried in turn by recursive rejection: child k
    is accepted with chance min(1, p_k / q_k); after a rejection the target becomes (p_k - q_k)+ and
    the drafter forgets the child.

    Shapes: `p [B, V + 1]`, `q [B, V]` (rows that sum to 1, or to 0 where nothing is drafted);
    `target [B]` columns of p; `num_children [B]`. Returns `[B]`.
    Source: Jeon et al. 2024 (RSD), Chen et al. 2024 (Sequoia); a rejected child has the law
    (q_k - p_k)+, whatever the output is.
    """
    rows = torch.arange(len(p))
    q = F.pad(q, (0, 1))
    rank = torch.full_like(target, -1)
    is_open = num_children > 0
    for child in range(int(num_children.max())):
        chance = q[rows, target] / p[rows, target].clamp_min(1e-30)
        accepts = is_open & (torch.rand(len(p), generator=generator) < chance)
        rank[accepts] = child
        surplus, missing = (q - p).clamp_min(0), (p - q).clamp_min(0)
        is_open &= ~accepts & (num_children > child + 1) & (surplus.sum(1) > 0)
        if not is_open.any():
            break
        # Rows that are closed get something valid to draw from; what they hold is not read again.
        surplus[~is_open, 0] = 1.0
        rejected = torch.multinomial(surplus, 1, generator=generator)
        p = missing / missing.sum(1, keepdim=True).clamp_min(1e-30)
        q = q.scatter(1, rejected, 0.0)
        q = q / q.sum(1, keepdim=True).clamp_min(1e-30)
    return rank


def best_shape(acceptance: Tensor, num_nodes: int) -> list[list[int]]:
    """The tree of `num_nodes` nodes below its root that is expected to accept most.

    `acceptance [K, C]`: chance that child k of a node at depth i is the accepted one. Returns for
    each node, root first, the nodes of its children in the order they are tried.
    Source: Sequoia (Chen et al. 2024), by greedy choice, which is exact for falling chances.
    """
    depths, num_children = acceptance.shape
    children: list[list[int]] = [[]]
    open_nodes = [(0, 0, 1.0)]
    for node in range(1, num_nodes + 1):
        options = [
            (chance * float(acceptance[depth, len(children[parent])]), parent, depth)
            for parent, depth, chance in open_nodes
            if depth < depths and len(children[parent]) < num_children
        ]
        if not options:
            break
        chance, parent, depth = max(options)
        children[parent].append(node)
        children.append([])
        open_nodes.append((node, depth + 1, chance))
    return children
