"""The engine's drafters: kept in step with what is committed, asked for a tree when it pays.

Shape letters: B live rows, M pairs that a row's drafter has not seen, K committed tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ratoon.drafter.learned import LearnedDrafter
from ratoon.drafter.model import Eagle3Drafter
from ratoon.drafter.suffix import SuffixDrafter
from ratoon.models.graph_pool import GraphPool
from ratoon.records import Request, SamplingParams
from ratoon.rollout.native.rows import Rows
from ratoon.sampling.transforms import token_bias
from ratoon.speculation.build import build_tree
from ratoon.speculation.calibration import Calibration
from ratoon.speculation.proposer import (
    CoupledProposer,
    Proposer,
    RetrievedProposer,
    Source,
    StepNoise,
)
from ratoon.speculation.strategy import Strategy
from ratoon.speculation.tree import Tree
from ratoon.speculation.verify import Verified


class Drafting:
    """A suffix drafter, a learned drafter, or both, over the rows of one engine.

    Ids below `vocab_limit` may be drawn. `max_nodes` bounds the nodes of any strategy's tree, the
    root included.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        vocab_limit: int,
        max_nodes: int,
        suffix: SuffixDrafter | None = None,
        learned: LearnedDrafter | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.max_nodes = max_nodes
        self.suffix = suffix
        self.calibration = Calibration(device)
        self._learned = learned
        self._vocab_limit = vocab_limit
        self._observed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._host_observed = torch.zeros(num_rows, dtype=torch.int64)
        self._static = False
        self._proposers: dict[Source, Proposer] = {}
        if suffix is not None:
            self._proposers[Source.SUFFIX] = RetrievedProposer(suffix)

    @property
    def needs_features(self) -> bool:
        """Whether the target's tapped states must be kept."""
        return self._learned is not None

    def use_graphs(self, graphs: GraphPool) -> None:
        """Draft with static shapes: those of the strategy, whatever is proposed."""
        self._static = True
        if self._learned is not None:
            self._learned.use_graphs(graphs)

    def load(self, drafter: Eagle3Drafter, embedding: Tensor) -> None:
        """Draft with these weights and the target's embedding `[V, D]` from the next step on."""
        if self._learned is None:
            raise RuntimeError("this engine has no learned drafter to load weights into")
        self._learned.load(drafter, embedding)
        self._observed.zero_()
        self._host_observed.zero_()
        self._proposers[Source.LEARNED] = CoupledProposer(self._learned)

    def begin(self, row: int, request: Request) -> None:
        """A request took this row."""
        self._observed[row] = self._host_observed[row] = 0
        if self._learned is not None:
            self._learned.reset_row(row)
        if self.suffix is not None:
            self.suffix.begin(row, (request.key.dataset, request.key.row), request.prompt_ids)

    def release(self, row: int, last: int) -> None:
        """The response in `row` is finished; the last live row takes its place."""
        if self.suffix is not None:
            self.suffix.release(row)
        if row == last:
            return
        self._observed[row] = self._observed[last]
        self._host_observed[row] = self._host_observed[last]
        if self._learned is not None:
            self._learned.move_row(last, row)
        if self.suffix is not None:
            self.suffix.move_row(last, row)

    def draft(
        self,
        strategy: Strategy,
        roots: Tensor,
        rows: Rows,
        params: SamplingParams,
        promise_budget: int = 0,
    ) -> Tree:
        """One tree per live row, below its last known token (`roots [B]`); see `build_tree`."""
        num_live = len(roots)
        if strategy.use_learned and Source.LEARNED in self._proposers:
            self._observe(rows, num_live)
        lengths = rows.lengths[:num_live] + rows.carried[:num_live]
        bias = token_bias(params, self._vocab_limit, torch.float32, roots.device)
        keys = rows.sequence_keys[:num_live]
        noise = StepNoise(keys, lengths + 1, params.temperature, bias)
        return build_tree(
            self._proposers,
            roots,
            noise,
            strategy,
            vocab_size=self._vocab_limit,
            depth_limits=rows.last_positions[:num_live] - lengths - 1,
            calibration=self.calibration,
            promise_budget=promise_budget,
            trim=not self._static,
        )

    def committed(self, tree: Tree, verified: Verified, known: Tensor, carried: Tensor) -> None:
        """Learn from a step: what was visited, and the tokens that became known.

        Shapes: `known [B]` tokens of the step were kept; the first `carried [B]` of them only
        confirm what was known before.
        """
        if tree.tokens.shape[1] > 1:
            self.calibration.observe(tree, verified, carried)
        if self.suffix is not None:
            levels = torch.arange(verified.tokens.shape[1], device=known.device)
            index = (carried[:, None] + levels).clamp_max(verified.tokens.shape[1] - 1)
            fresh = (known - carried).clamp_min(0)
            self.suffix.append(verified.tokens.gather(1, index), fresh)

    def _observe(self, rows: Rows, num_live: int) -> None:
        """Show the learned drafter the pairs since its last step, at most a window of them."""
        assert self._learned is not None
        window = self._learned.config.window
        on_host = rows.host_lengths[:num_live] + rows.host_carried[:num_live]
        longest = int((on_host - _start(on_host, self._host_observed[:num_live], window)).max())
        self._host_observed[:num_live] = on_host
        lengths = rows.lengths[:num_live] + rows.carried[:num_live]
        start = _start(lengths, self._observed[:num_live], window)
        self._observed[:num_live] = lengths
        if longest == 0:
            return
        offsets = torch.arange(longest, device=lengths.device)
        last = (lengths - 1).clamp_min(0)
        positions = torch.minimum(start[:, None] + offsets, last[:, None])
        index = torch.arange(num_live, device=lengths.device)[:, None]
        self._learned.observe(
            rows.features[index, positions],
            rows.tokens[index, positions + 1],
            positions,
            lengths - start,
            longest,
        )

    def state_dict(self) -> dict[str, Any]:
        """Calibration and suffix index: what a replay must start from, besides the weights."""
        state: dict[str, Any] = {"calibration": self.calibration.state_dict()}
        if self.suffix is not None:
            state["suffix"] = self.suffix.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to what `state_dict` returned."""
        self.calibration.load_state_dict(state["calibration"])
        if self.suffix is not None:
            self.suffix.load_state_dict(state["suffix"])


def _start(lengths: Tensor, observed: Tensor, window: int) -> Tensor:
    """The first pair of each row to observe, `[B]`.

    A confirmation that failed replaces a token: the pair that reads it is observed again.
    """
    seen = torch.minimum(observed, (lengths - 1).clamp_min(0))
    return torch.maximum(seen, lengths - window)
