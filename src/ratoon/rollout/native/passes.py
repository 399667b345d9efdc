"""A decode step's pass of the target over the nodes of all trees: as they are, or as one graph.

A graph does all at once: forward, selection at all nodes, and the walk. Its shapes are buckets: of
the live rows, the nodes of a row, the nodes that are computed, and the key width. Rows and nodes
that only fill up a bucket attend to a key of their own, write theirs to their slot's last position,
which is never used, and are dropped.

Shape letters: B live rows, N tree nodes, R nodes computed, W key width.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ratoon.models.graph_pool import GraphPool, Outputs, Padded, bucket
from ratoon.models.kv_cache import attention_width
from ratoon.records import SamplingParams
from ratoon.rollout.native.forward import InferenceModel, attention_mask
from ratoon.rollout.native.rows import Rows
from ratoon.sampling import keyed_noise
from ratoon.sampling.select import Selector
from ratoon.sampling.transforms import is_temperature_only
from ratoon.speculation.tree import Tree, ancestor_mask, ancestors_of, packed, packed_to
from ratoon.speculation.verify import Verified, follow

# Key widths are this, twice this, four times this, and so on up to the cache's.
FIRST_WIDTH = 512


class Passed(NamedTuple):
    """What the target says of a tree's nodes.

    Shapes: `logits [R, V]`; `states [R, X]` features and final-norm states side by side, where they
    are kept; `places [B, N]` of the nodes among the R. `verified`, where tokens were selected at
    once, holds for the rows of `is_settled [B]`.
    """

    logits: Tensor
    states: Tensor
    places: Tensor
    verified: Verified | None = None
    is_settled: Tensor | None = None


def pass_nodes(model: InferenceModel, rows: Rows, tree: Tree) -> Passed:
    """Pass the trees of the first rows, by shapes as small as they are. Two host-device syncs."""
    nodes, places = packed(tree)
    num_rows, num_nodes = tree.tokens.shape
    lengths = rows.lengths[:num_rows]
    width = attention_width(int(rows.host_lengths[:num_rows].max()) + num_nodes, model.dtype)
    group = model.config.num_heads // model.config.num_kv_heads
    mask = attention_mask(lengths, ancestor_mask(tree), width, group, model.dtype)
    hidden, features = model.forward(
        tree.tokens,
        lengths[:, None] + tree.depths,
        rows.entries(num_rows, num_nodes),
        mask,
        rows.cache,
        present=nodes if len(nodes) < tree.tokens.numel() else None,
    )
    return Passed(model.logits(hidden), _states(rows, features, hidden), places)


def _states(rows: Rows, features: Tensor, hidden: Tensor) -> Tensor:
    """What is kept of each node, `[R, X]`."""
    if rows.hidden.shape[-1] == 0:
        return hidden.new_empty(len(hidden), 0)
    return torch.cat([features, hidden], dim=-1)


class StaticPass:
    """Passes of one engine's trees through its model, by graphs of `graphs`."""

    def __init__(
        self,
        model: InferenceModel,
        rows: Rows,
        selector: Selector,
        graphs: GraphPool,
        max_length: int,
    ) -> None:
        """`model`'s weights may change in place, and only so. Sequences end at `max_length`."""
        self._model = model
        self._most_nodes = rows.cache.num_positions - max_length
        self._rows = rows
        self._selector = selector
        self._graphs = graphs

    def __call__(self, tree: Tree, most_nodes: int, params: SamplingParams) -> Passed:
        """Pass the trees of the first rows, which have at most `most_nodes` nodes together.

        Results are good until the next use of a graph. No host-device syncs.
        """
        rows = self._rows
        num_rows, num_nodes = tree.tokens.shape
        size = rows.cache.num_positions
        longest = int(rows.host_lengths[:num_rows].max())
        padded_rows = bucket(num_rows, len(rows.lengths))
        padded_nodes = bucket(num_nodes, self._most_nodes)
        width = FIRST_WIDTH
        while width < longest + padded_nodes:
            width *= 2
        computed = bucket(most_nodes, padded_rows * padded_nodes)
        selected = params if is_temperature_only(params) else None
        constants = (min(width, size), computed, selected)
        by_row, by_node = (padded_rows,), (padded_rows, padded_nodes)
        inputs = [
            Padded(tree.tokens, by_node),
            Padded(tree.parents, by_node),
            Padded(tree.depths, by_node),
            Padded(tree.valid, by_node),
            Padded(rows.lengths[:num_rows], by_row),
            Padded(rows.sequence_keys[:num_rows], (padded_rows, 2)),
        ]
        outputs = self._graphs.run(("pass", constants), partial(self._pass, *constants), inputs)
        logits, states, places = outputs[:3]
        passed = Passed(logits, states, places[:num_rows, :num_nodes])
        if selected is None:
            return passed
        path, tokens, logprobs = (values[:num_rows, :num_nodes] for values in outputs[3:6])
        counts, is_settled = (values[:num_rows] for values in outputs[6:])
        return passed._replace(
            verified=Verified(path, tokens, logprobs, counts), is_settled=is_settled
        )

    def _pass(
        self,
        width: int,
        computed: int,
        params: SamplingParams | None,
        tokens: Tensor,
        parents: Tensor,
        depths: Tensor,
        valid: Tensor,
        lengths: Tensor,
        sequence_keys: Tensor,
    ) -> Outputs:
        model, cache = self._model, self._rows.cache
        num_rows, num_nodes = tokens.shape
        config, size = model.config, cache.num_positions
        nodes, places = packed_to(valid, computed)
        ancestors = ancestors_of(parents)
        group = config.num_heads // config.num_kv_heads
        mask = attention_mask(lengths, ancestors, width, group, model.dtype)
        columns = lengths[:, None] + torch.arange(num_nodes, device=tokens.device)
        slots = torch.arange(num_rows, device=tokens.device)[:, None] * size
        hidden, features = model.forward(
            tokens,
            lengths[:, None] + depths,
            slots + torch.where(valid, columns, size - 1),
            mask,
            cache,
            present=nodes,
        )
        logits = model.logits(hidden)
        states = _states(self._rows, features, hidden)
        if params is None:
            return logits, states, places
        positions = (lengths[:, None] + 1 + depths).flatten()[nodes]
        row_keys = keyed_noise.row_keys(sequence_keys[nodes // num_nodes], positions)
        ids, logprobs, settled = (
            values[places] for values in self._selector.select_settled(logits, row_keys, params)
        )
        path, counts = follow(tokens, parents, depths, valid, ancestors, ids)
        visited = path.clamp_min(0)
        return (
            logits,
            states,
            places,
            path,
            ids.gather(1, visited).masked_fill(path < 0, -1),
            logprobs.gather(1, visited).masked_fill(path < 0, 0.0),
            counts,
            (settled.gather(1, visited) | (path < 0)).all(dim=1),
        )
