"""Online calibration: drafters' chances against what the target picked.

Shape letters: B sequences, C children, N tree nodes, S drafters, K draft depth.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ratoon.speculation.proposer import Source
from ratoon.speculation.strategy import MAX_DEPTH
from ratoon.speculation.tree import Tree, visited_nodes
from ratoon.speculation.verify import Verified

# Evidence is halved after about 1,400 observed steps, so that the scale follows a drafter that is
# being trained. The prior counts as much as 40 proposals of chance one half.
DECAY = 0.9995
PRIOR_INFORMATION = 10.0
MAX_OFFSET = 4.0


class Calibration:
    """One shift of the log-odds per drafter and depth, learned from verified trees.

    The shift keeps the order of a drafter's children (0 stays 0 and 1 stays 1) and makes the sum of
    its chances agree with the number of children that the target picked. It steers which nodes
    are verified and can change no token.
    Source: online Newton steps on the logistic log-likelihood of the shift; ours.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._offsets = torch.zeros(len(Source), MAX_DEPTH, device=device)
        self._odds = torch.ones_like(self._offsets)
        self._information = torch.zeros(len(Source), MAX_DEPTH, device=device)

    def odds(self, sources: Sequence[Source], widths: Sequence[int], depth: int) -> Tensor:
        """Factors `[C]` for the odds of children of nodes at `depth`.

        `widths` are the numbers of children of each source, which lie side by side.
        """
        parts = [
            self._odds[source, depth].expand(width)
            for source, width in zip(sources, widths, strict=True)
        ]
        return torch.cat(parts)

    def observe(self, tree: Tree, verified: Verified, root_depths: Tensor | int = 0) -> None:
        """Learn from one step: each child of a visited node was picked or not. No syncs.

        `root_depths [B]` are the depths of the nodes that drafting started from, where trees begin
        with nodes that were not drafted.
        """
        parents = tree.parents.clamp_min(0)
        visited = visited_nodes(tree.valid, verified.path)
        is_trial = tree.valid & visited.gather(1, parents)
        is_trial[:, 0] = False
        predicted = tree.chances / tree.chances.gather(1, parents).clamp_min(1e-30)
        residuals = visited.float() - predicted
        start = torch.as_tensor(root_depths, device=tree.depths.device)
        depths = tree.depths - 1 - start.unsqueeze(-1)
        depths = depths.clamp(0, MAX_DEPTH - 1).flatten()
        self._information *= DECAY
        for source in Source:
            weights = (is_trial & (tree.sources >> source & 1).bool()).float()
            surprise = torch.zeros_like(self._offsets[source])
            surprise.index_add_(0, depths, (weights * residuals).flatten())
            gained = weights * predicted * (1 - predicted)
            self._information[source].index_add_(0, depths, gained.flatten())
            step = surprise / (self._information[source] + PRIOR_INFORMATION)
            self._offsets[source] += step
        self._offsets.clamp_(-MAX_OFFSET, MAX_OFFSET)
        torch.exp(self._offsets, out=self._odds)

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the state, `[S, K]` tensors: for snapshots before a replay and for resuming."""
        return {"offsets": self._offsets.clone(), "information": self._information.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from what `state_dict` returned."""
        self._offsets.copy_(state["offsets"])
        self._information.copy_(state["information"])
        torch.exp(self._offsets, out=self._odds)
