"""Verification: walk each draft tree with the tokens that the target itself selects.

Shape letters: B sequences, N tree nodes (the root among them), R nodes of all trees, V vocabulary,
L levels walked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ratoon.records import SamplingParams
from ratoon.sampling import keyed_noise
from ratoon.sampling.prefixes import Prefixes
from ratoon.sampling.select import Selector
from ratoon.speculation.tree import Tree


class Verified(NamedTuple):
    """What a step commits. Everything is padded with -1 (log-probabilities with 0).

    Shapes: `tokens [B, L]` int64 are the committed ids, `logprobs [B, L]` float32 theirs;
    `path [B, L]` int64 are the visited nodes: token `[b, l]` was selected at node `path[b, l]`, so
    `path[b, 0]` is the root and the keys and values of the path's nodes are the ones to keep.
    `counts [B]` (at least 1) is the number of committed tokens. L is the largest count.
    """

    path: Tensor
    tokens: Tensor
    logprobs: Tensor
    counts: Tensor


def walk(
    tree: Tree,
    logits: Tensor,
    places: Tensor,
    sequence_keys: Tensor,
    t0: Tensor,
    selector: Selector,
    params: SamplingParams,
    prefixes: Prefixes | None = None,
) -> Verified:
    """Commit what plain keyed decoding would select, as far as the tree foresaw it.

    At each visited node the target's token is selected with the key of the node's position; the
    walk moves to the child that carries the token, or stops. A token depends on its prefix and its
    key alone, never on the tree: the tree decides only how many tokens one step commits.

    Shapes: `logits [R, V]` of the target at every node, `places [B, N]` of the nodes among them
    (see `tree.packed`); `sequence_keys [B, 2]`; `t0 [B]`: index in the unpadded sequence of the
    first token to commit; `prefixes` of B rows, for transforms that look at the tokens before a
    draw, which the walk lengthens in place by what it selects.
    Cost: one selection over the rows still walking and one host-device sync per level.
    Raises: NumericsError where the logits of a visited node are NaN or exclude every token.
    """
    num_rows, num_nodes = tree.tokens.shape
    device = tree.tokens.device
    shape = (num_rows, num_nodes)
    path = torch.full(shape, -1, device=device)
    tokens = torch.full(shape, -1, device=device)
    logprobs = torch.zeros(shape, device=device)
    counts = torch.zeros(num_rows, dtype=torch.int64, device=device)
    node_index = torch.arange(num_nodes, device=device)

    rows = torch.arange(num_rows, device=device)
    nodes = torch.zeros_like(rows)
    level = 0
    while rows.numel() > 0:
        row_keys = keyed_noise.row_keys(sequence_keys[rows], t0[rows] + level)
        before = None if prefixes is None else prefixes.at(rows)
        ids, ids_logprobs = selector.select(logits[places[rows, nodes]], row_keys, params, before)
        path[rows, level] = nodes
        tokens[rows, level] = ids
        logprobs[rows, level] = ids_logprobs
        level += 1
        counts[rows] = level
        is_next = (tree.parents[rows] == nodes[:, None]) & (tree.tokens[rows] == ids[:, None])
        # A node never precedes its parent, so the walk ends after at most N levels.
        is_next &= tree.valid[rows] & (node_index > nodes[:, None])
        walking = is_next.any(dim=1).nonzero().squeeze(1)
        rows, nodes = rows[walking], is_next[walking].to(torch.uint8).argmax(dim=1)
        if prefixes is not None:
            prefixes.append(rows, ids[walking])
    return Verified(path[:, :level], tokens[:, :level], logprobs[:, :level], counts)


def follow(
    tokens: Tensor, parents: Tensor, depths: Tensor, valid: Tensor, ancestors: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """The way that `walk` takes where what is selected at every node is known: path and counts.

    A node is visited where it and its ancestors are what was selected at their parents; of equal
    siblings the first is. So all levels are walked at once.

    Shapes: `ids [B, N]` selected at each node; `tokens`, `parents`, `depths`, `valid [B, N]` of a
    tree, `ancestors [B, N, N]` of `ancestor_mask`. Returns `path [B, N]`, padded with -1, and
    `counts [B]`.
    Cost: about 20 operations on `[B, N, N]`, no host-device sync.
    """
    above = parents.clamp_min(0)
    is_next = valid & (tokens == ids.gather(1, above))
    twins = (above.unsqueeze(2) == above.unsqueeze(1)) & is_next.unsqueeze(1)
    twins[:, :, 0] = False
    is_next &= ~twins.tril(-1).any(dim=2)
    is_next[:, 0] = True
    visited = (is_next.unsqueeze(1) | ~ancestors).all(dim=2)
    num_nodes = tokens.shape[1]
    path = tokens.new_full((len(tokens), num_nodes + 1), -1)
    nodes = torch.arange(num_nodes, device=tokens.device).expand_as(tokens)
    path.scatter_(1, torch.where(visited, depths, num_nodes), nodes)
    return path[:, :num_nodes], visited.sum(dim=1)
