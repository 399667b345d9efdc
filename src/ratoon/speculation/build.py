"""Building the draft trees of one step, for all live sequences at once.

Shape letters: B sequences, F frontier nodes, C children, M candidates of all levels, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ratoon.speculation.calibration import Calibration
from ratoon.speculation.promise import promised_visits
from ratoon.speculation.proposer import Proposals, Proposer, Source, StepNoise
from ratoon.speculation.strategy import Strategy
from ratoon.speculation.tree import Tree, root_only

# A child's chance stays strictly below its parent's, so that the nodes with the highest chances
# always include their ancestors.
MAX_CHANCE = 0.999


@dataclass(slots=True)
class _Candidates:
    """Nodes proposed so far. The root is node 0; candidate j is node j + 1.

    Each list has one tensor `[B, F * C]` per level. `all_chances`, filled only where somebody asks,
    holds those that are too small to be verified, too.
    """

    tokens: list[Tensor] = field(default_factory=list)
    parents: list[Tensor] = field(default_factory=list)
    chances: list[Tensor] = field(default_factory=list)
    sources: list[Tensor] = field(default_factory=list)
    all_chances: list[Tensor] = field(default_factory=list)


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
    promise_budget: int = 0,
    trim: bool = True,
) -> Tree:
    """Draft one tree per sequence, mixing all proposers that the strategy uses.

    Level by level, the `beam` nodes of highest cumulative chance get children from every proposer;
    the same child of two proposers becomes one node with the larger chance. Of all candidates the
    `budget` with the highest cumulative chance are kept, or so many per sequence of the whole
    batch's where the strategy has a `cap`. Proposals that are not tokens of the vocabulary, or
    whose chance is not a positive number, are dropped.

    Shapes: `root_tokens [B]`, the last committed tokens; `depth_limits [B]`, the largest useful
    depth of each sequence (tokens left to generate, minus one). N shrinks to what the fullest
    sequence drafted; without `trim` it does not, and nothing is read on the host. With
    `promise_budget` the tree says what trees of up to so many nodes per sequence promise, from all
    candidates.
    Cost: about 40 small operations per level, and with `trim` one host-device sync per level.
    Source: dynamic draft trees (EAGLE-2, Li et al. 2024); coupled chances and mixing are ours.
    """
    used = [(source, proposers[source]) for source in _sources(strategy) if source in proposers]
    if strategy.is_plain or not used:
        return root_only(root_tokens)
    noise.prepare(strategy.depth, vocab_size)
    sources = [source for source, _ in used]
    candidates = _Candidates()
    zeros = torch.zeros_like(root_tokens)[:, None]
    frontier = _Frontier(root_tokens[:, None], zeros, zeros, torch.ones_like(zeros).float())
    num_candidates = 0
    for level in range(strategy.depth):
        proposals = [
            _children(proposer, frontier, noise, level, strategy.branching) for _, proposer in used
        ]
        widths = [proposal.tokens.shape[2] for proposal in proposals]
        tokens, chances = _checked(proposals, vocab_size)
        if calibration is not None:
            odds = calibration.odds(sources, widths, level)
            chances = (chances * odds / (1 - chances + chances * odds)).clamp_max_(MAX_CHANCE)
        chances, bits = _merge(tokens, chances, sources, widths)
        chances = chances * frontier.chances.unsqueeze(2)
        if depth_limits is not None:
            chances = chances * (depth_limits > level)[:, None, None]
        if promise_budget:
            candidates.all_chances.append(chances.flatten(1))
        chances = F.threshold(chances, strategy.min_chance, 0.0)
        candidates.tokens.append(tokens.flatten(1))
        candidates.parents.append(frontier.nodes.repeat_interleave(tokens.shape[2], dim=1))
        candidates.chances.append(chances.flatten(1))
        candidates.sources.append(bits.flatten(1))
        if level + 1 == strategy.depth:
            break
        following = _next_frontier(tokens, chances, num_candidates + 1, strategy.beam, trim)
        if following is None:
            break
        num_candidates += tokens[0].numel()
        frontier = following
    chances = torch.cat(candidates.chances, dim=1)
    if strategy.cap is not None:
        chances = _keep_best_of_batch(chances, strategy.budget)
    tree = _keep_best(candidates, chances, root_tokens, strategy.largest_tree, trim)
    if not promise_budget:
        return tree
    promised = promised_visits(candidates.all_chances, strategy.depth, promise_budget)
    return replace(tree, promised=promised)


def _sources(strategy: Strategy) -> list[Source]:
    is_used = {Source.LEARNED: strategy.use_learned, Source.SUFFIX: strategy.use_suffix}
    return [source for source in Source if is_used[source]]


def _children(
    proposer: Proposer, frontier: _Frontier, noise: StepNoise, level: int, num_children: int
) -> Proposals:
    if level == 0:
        return proposer.root(noise, num_children)
    return proposer.advance(frontier.parents, frontier.tokens, noise, level, num_children)


def _checked(proposals: Sequence[Proposals], vocab_size: int) -> tuple[Tensor, Tensor]:
    """All proposers' children side by side, `[B, F, C]` tokens and chances.

    What no target could pick has chance 0 and token 0.
    """
    tokens = torch.cat([proposal.tokens for proposal in proposals], dim=2)
    chances = torch.cat([proposal.chances for proposal in proposals], dim=2)
    is_wrong = ~(chances > 0) | (tokens < 0) | (tokens >= vocab_size)
    chances = chances.masked_fill(is_wrong, 0.0).clamp_max_(MAX_CHANCE)
    return tokens.masked_fill(is_wrong, 0), chances


def _merge(
    tokens: Tensor, chances: Tensor, sources: Sequence[Source], widths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Chances and source bits `[B, F, C]` with each token counted once per node.

    A repeated token keeps its first place, its largest chance and all its sources; its other
    places get chance 0. One proposer alone does not repeat itself.
    """
    if len(sources) == 1:
        return chances, torch.full_like(tokens, 1 << sources[0])
    is_same = tokens.unsqueeze(3) == tokens.unsqueeze(2)
    is_same &= (chances > 0).unsqueeze(2)
    is_repeated = is_same.tril(-1).any(dim=3)
    largest = (is_same * chances.unsqueeze(2)).amax(dim=3)
    bits = torch.zeros_like(tokens)
    for source, same in zip(sources, is_same.split(list(widths), dim=3), strict=True):
        bits.add_(same.any(dim=3), alpha=1 << source)
    # A place without a proposal holds token 0 and must not take over a proposal of token 0.
    return largest.masked_fill_(is_repeated | (chances <= 0), 0.0), bits


def _next_frontier(
    tokens: Tensor, chances: Tensor, offset: int, beam: int, trim: bool
) -> _Frontier | None:
    """The `beam` most likely of the new nodes `[B, F, C]`, or None where no row has any."""
    num_children = tokens.shape[2]
    best, index = chances.flatten(1).topk(min(beam, chances[0].numel()), dim=1)
    widest = int((best > 0).sum(dim=1).max()) if trim else best.shape[1]
    if widest == 0:
        return None
    index = index[:, :widest]
    return _Frontier(
        tokens=tokens.flatten(1).gather(1, index),
        parents=index // num_children,
        nodes=index + offset,
        chances=best[:, :widest],
    )


def _keep_best_of_batch(chances: Tensor, budget: int) -> Tensor:
    """`chances [B, M]` with 0 for all but the `B * budget` highest of the batch."""
    count = min(len(chances) * budget, chances.numel())
    best, kept = chances.flatten().topk(count)
    return torch.zeros_like(chances).view(-1).scatter_(0, kept, best).view_as(chances)


def _keep_best(
    candidates: _Candidates, chances: Tensor, root_tokens: Tensor, most: int, trim: bool
) -> Tree:
    """The tree of the `most` likeliest candidates; ancestors come first by construction."""
    num_rows, num_candidates = chances.shape
    best, kept = chances.topk(min(most, num_candidates), dim=1)
    widest = int((best > 0).sum(dim=1).max()) if trim else best.shape[1]
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
