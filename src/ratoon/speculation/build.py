"""Building the draft trees of one step, for all live sequences at once.

Shape letters: B sequences, F frontier nodes, C children, M candidates of all levels, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ratoon.speculation.calibration import Calibration
from ratoon.speculation.proposer import Proposals, Proposer, Source, StepNoise
from ratoon.speculation.strategy import Strategy
from ratoon.speculation.tree import Tree, root_only

# A child's chance stays strictly below its parent's, so that the nodes with the highest chances
# always include their ancestors.
MAX_CHANCE = 0.999


@dataclass(slots=True)
class _Candidates:
    """Nodes proposed so far. The root is node 0; candidate j is node j + 1.

    Each list has one tensor `[B, F * C]` per level.
    """

    tokens: list[Tensor] = field(default_factory=list)
    parents: list[Tensor] = field(default_factory=list)
    chances: list[Tensor] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class _Frontier:
    """Nodes about to get children, all of one level.

    Shapes: all `[B, F]`. `parents` index the frontier before, `nodes` number candidates.
    Entries with chance 0 only fill up a row.
    """

    tokens: Tensor
    parents: Tensor
    nodes: Tensor
    chances: Tensor


def build_tree(
    proposers: Mapping[Source, Proposer],
    root_tokens: Tensor,
    noise: StepNoise,
    strategy: Strategy,
    *,
    vocab_size: int,
    depth_limits: Tensor | None = None,
    calibration: Calibration | None = None,
) -> Tree:
    """Draft one tree per sequence, mixing all proposers that the strategy uses.

    Level by level, the `beam` nodes of highest cumulative chance get children from every proposer;
    the same child of two proposers becomes one node with the larger chance. Of all candidates the
    `budget` with the highest cumulative chance are kept. Proposals that are not tokens of the
    vocabulary, or whose chance is not a positive number, are dropped.

    Shapes: `root_tokens [B]`, the last committed tokens; `depth_limits [B]`, the largest useful
    depth of each sequence (tokens left to generate, minus one). N shrinks to what the fullest
    sequence drafted.
    Cost: about 40 small operations per level, and one host-device sync per level.
    Source: dynamic draft trees (EAGLE-2, Li et al. 2024); coupled chances and mixing are ours.
    """
    used = [(source, proposers[source]) for source in _sources(strategy) if source in proposers]
    if strategy.is_plain or not used:
        return root_only(root_tokens)
    candidates = _Candidates()
    zeros = torch.zeros_like(root_tokens)[:, None]
    frontier = _Frontier(root_tokens[:, None], zeros, zeros, torch.ones_like(zeros).float())
    num_candidates = 0
    for level in range(strategy.depth):
        proposals = []
        for _, proposer in used:
            if level == 0:
                proposals.append(proposer.root(noise, strategy.branching))
            else:
                proposals.append(
                    proposer.advance(
                        frontier.parents, frontier.tokens, noise, level, strategy.branching
                    )
                )
        sources = [source for source, _ in used]
        checked = [
            _checked(proposal, source, level, vocab_size, calibration)
            for source, proposal in zip(sources, proposals, strict=True)
        ]
        tokens, chances, bits = _merge(checked, sources)
        chances = chances * frontier.chances.unsqueeze(2)
        if depth_limits is not None:
            chances = chances * (depth_limits > level)[:, None, None]
        chances = torch.where(chances >= strategy.min_chance, chances, 0.0)
        candidates.tokens.append(tokens.flatten(1))
        candidates.parents.append(frontier.nodes.repeat_interleave(tokens.shape[2], dim=1))
        candidates.chances.append(chances.flatten(1))
        candidates.sources.append(bits.flatten(1))
        if level + 1 == strategy.depth:
            break
        following = _next_frontier(tokens, chances, num_candidates + 1, strategy.beam)
        if following is None:
            break
        num_candidates += tokens[0].numel()
        frontier = following
    return _keep_best(candidates, root_tokens, strategy.budget)


def _sources(strategy: Strategy) -> list[Source]:
    is_used = {Source.LEARNED: strategy.use_learned, Source.SUFFIX: strategy.use_suffix}
    return [source for source in Source if is_used[source]]


def _checked(
    proposals: Proposals,
    source: Source,
    level: int,
    vocab_size: int,
    calibration: Calibration | None,
) -> Proposals:
    """Calibrated proposals; what no target could pick has chance 0 and token 0."""
    tokens, chances = proposals
    is_legal = (chances > 0) & (tokens >= 0) & (tokens < vocab_size)
    chances = torch.where(is_legal, chances, 0.0).clamp_max(MAX_CHANCE)
    if calibration is not None:
        chances = calibration.apply(source, level, chances).clamp_max(MAX_CHANCE)
    return Proposals(torch.where(is_legal, tokens, 0), chances)


def _merge(
    proposals: Sequence[Proposals], sources: Sequence[Source]
) -> tuple[Tensor, Tensor, Tensor]:
    """Children of all proposers side by side, without repetitions.

    Shapes: tokens, chances and source bits, each `[B, F, C]` with C the sum over proposers. A
    repeated child keeps its first place, the largest chance and all its sources.
    """
    tokens = torch.cat([proposal.tokens for proposal in proposals], dim=2)
    chances = torch.cat([proposal.chances for proposal in proposals], dim=2)
    is_same = tokens.unsqueeze(3) == tokens.unsqueeze(2)
    is_same &= (chances > 0).unsqueeze(2)
    earlier = torch.ones(tokens.shape[2:] * 2, dtype=torch.bool, device=tokens.device).tril_(-1)
    is_repeated = (is_same & earlier).any(dim=3)
    largest = torch.where(is_same, chances.unsqueeze(2), 0.0).amax(dim=3)
    bits = torch.zeros_like(tokens)
    widths = [proposal.tokens.shape[2] for proposal in proposals]
    for source, same in zip(sources, is_same.split(widths, dim=3), strict=True):
        bits += same.any(dim=3).long() << source
    return tokens, torch.where(is_repeated | (chances <= 0), 0.0, largest), bits


def _next_frontier(tokens: Tensor, chances: Tensor, offset: int, beam: int) -> _Frontier | None:
    """The `beam` most likely of the new nodes `[B, F, C]`, or None where no row has any."""
    num_children = tokens.shape[2]
    best, index = chances.flatten(1).topk(min(beam, chances[0].numel()), dim=1)
    widest = int((best > 0).sum(dim=1).max())
    if widest == 0:
        return None
    index = index[:, :widest]
    return _Frontier(
        tokens=tokens.flatten(1).gather(1, index),
        parents=index // num_children,
        nodes=index + offset,
        chances=best[:, :widest],
    )


def _keep_best(candidates: _Candidates, root_tokens: Tensor, budget: int) -> Tree:
    """The tree of the `budget` most likely candidates; ancestors come first by construction."""
    chances = torch.cat(candidates.chances, dim=1)
    num_rows, num_candidates = chances.shape
    best, kept = chances.topk(min(budget, num_candidates), dim=1)
    widest = int((best > 0).sum(dim=1).max())
    if widest == 0:
        return root_only(root_tokens)
    # Node numbers grow with depth, so sorting puts parents first; `absent` sorts last.
    absent = num_candidates + 1
    nodes = torch.where(best > 0, kept + 1, absent).sort(dim=1).values[:, :widest]
    nodes = torch.cat([torch.zeros_like(nodes[:, :1]), nodes], dim=1)
    valid = nodes < absent

    places = torch.zeros(num_rows, absent + 1, dtype=torch.int64, device=nodes.device)
    places.scatter_(1, nodes, torch.arange(widest + 1, device=nodes.device).expand_as(nodes))
    depths = [
        torch.full_like(level[0], depth) for depth, level in enumerate(candidates.tokens, start=1)
    ]

    def pick(levels: Sequence[Tensor], root: Tensor, dim: int = 1) -> Tensor:
        last = torch.zeros_like(root)
        table = torch.cat([root, *levels, last], dim=dim).expand(num_rows, -1)
        return table.gather(1, nodes)

    roots = root_tokens[:, None]
    none = torch.zeros_like(roots)
    parents = places.gather(1, pick(candidates.parents, none))
    parents[:, 0] = -1
    return Tree(
        tokens=pick(candidates.tokens, roots),
        parents=parents,
        depths=pick(depths, none[0], dim=0),
        chances=pick(candidates.chances, torch.ones_like(chances[:, :1])),
        valid=valid,
        sources=pick(candidates.sources, none),
    )
