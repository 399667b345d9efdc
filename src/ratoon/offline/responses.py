"""Recorded responses walked through by each way to draft: how far would it have got from here?

With a recorded response at hand, speculation need not be run: which of the drafted tokens would
have been accepted follows from the response itself (see `rejection` for schemes that draw).

Shape letters: B responses, n tokens of the longest, K drafted levels, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from ratoon.drafter.learned import LearnedDrafter
from ratoon.drafter.model import Eagle3Drafter
from ratoon.offline.recorded import Source, all_ids
from ratoon.offline.rejection import accepted_child, num_accepted
from ratoon.rollout.native.engine import Finished
from ratoon.sampling.keyed_noise import sequence_keys
from ratoon.speculation import proposer as drafting
from ratoon.speculation.build import build_tree
from ratoon.speculation.calibration import Calibration
from ratoon.speculation.proposer import Proposals, Proposer, StepNoise
from ratoon.speculation.strategy import Strategy
from ratoon.speculation.tree import Tree
from ratoon.speculation.verify import Verified

DEPTH = 6
CHILDREN = 6
# Rejection schemes draft at this share of the target's temperature, as coupled trees do.
SHARPENING = 0.8


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Tokens and steps `[B]` of each response, and `[B, K]` how drafts fared at each depth.

    A draft is `tried` at a depth where all before it were accepted and it is still of use.
    """

    tokens: Tensor
    steps: Tensor
    tried: Tensor
    accepted: Tensor

    @property
    def mean(self) -> float:
        """Tokens per step over all responses."""
        return float(self.tokens.sum() / self.steps.sum())


Step = Callable[[Tensor], Tensor]


class Responses:
    """Recorded responses side by side, and the drafter that follows them."""

    def __init__(
        self,
        source: Source,
        drafter: Eagle3Drafter,
        finished: Sequence[Finished],
        temperature: float,
    ) -> None:
        count, self.temperature = len(finished), temperature
        self._vocab_limit = source.vocab_limit
        ids = [all_ids(item) for item in finished]
        self._lengths = torch.tensor([len(row) for row in ids])
        # Where a response ended by itself, more tokens were allowed than drafts are deep.
        is_cut = torch.tensor([item.completion.finish == "length" for item in finished])
        self._allowed = torch.where(is_cut, self._lengths, self._lengths + DEPTH + 1)
        longest = int(self._lengths.max()) + DEPTH + 1
        self._starts = torch.tensor([len(item.completion.prompt_ids) - 1 for item in finished])
        self._ids = torch.stack([F.pad(row, (0, longest - len(row))) for row in ids])
        self._keys = sequence_keys(item.completion.key for item in finished)
        self._learned = LearnedDrafter(
            drafter.config,
            num_rows=count,
            num_positions=longest + DEPTH,
            num_tree_slots=CHILDREN * DEPTH,
            dtype=source.model.dtype,
        )
        self._drafter, self._embedding = drafter, source.model.embedding
        self._window = drafter.config.window
        self._indices = torch.full((drafter.config.vocab_size,), -1)
        self._indices[drafter.draft_ids] = torch.arange(len(drafter.draft_ids))
        self._features = torch.stack(
            [_padded(item.features, longest) for item in finished if item.features is not None]
        )
        self._hidden = [item.hidden for item in finished if item.hidden is not None]
        self._target_logits = source.model.logits

    @torch.inference_mode()
    def walk(self, step: Step) -> Counts:
        """Go through all responses; `step(at)` says how many drafts behind `at [B]` are accepted.

        A step yields the accepted drafts and one token more, as far as the response goes.
        """
        self._learned.load(self._drafter, self._embedding)
        at, seen = self._starts.clone(), torch.zeros_like(self._starts)
        depths = torch.arange(1, DEPTH + 1)
        tokens, steps = torch.zeros_like(at), torch.zeros_like(at)
        tried, accepted = torch.zeros(2, len(at), DEPTH, dtype=torch.int64)
        while (left := self._lengths - 1 - at).any():
            self._observe(seen, at)
            seen = at.clone()
            useful = torch.minimum(left, self._depth_limits(at))
            reached = torch.minimum(step(at), useful)
            gained = torch.minimum(reached + 1, left)
            tokens, steps, at = tokens + gained, steps + (left > 0), at + gained
            tried += torch.minimum(reached + 1, useful)[:, None] >= depths
            accepted += reached[:, None] >= depths
        return Counts(tokens, steps, tried, accepted)

    def tree_step(
        self,
        proposer: Callable[[LearnedDrafter], Proposer],
        strategy: Strategy,
        calibration: Calibration,
    ) -> Step:
        """Draft trees as the engine does."""
        proposers = {drafting.Source.LEARNED: proposer(self._learned)}

        def step(at: Tensor) -> Tensor:
            noise = StepNoise(self._keys, at + 1, self.temperature)
            roots = self._ids.gather(1, at[:, None])[:, 0]
            tree = build_tree(
                proposers,
                roots,
                noise,
                strategy,
                vocab_size=self._vocab_limit,
                depth_limits=self._depth_limits(at),
                calibration=calibration,
            )
            verified = follow(tree, self._following(at, DEPTH + 1))
            # What would have followed the end of a response is not known.
            known = at + verified.counts < self._lengths
            calibration.observe(replace(tree, valid=tree.valid & known[:, None]), verified)
            return verified.counts - 1

        return step

    def greedy_chain_step(self) -> Step:
        """A chain of the drafter's most likely tokens, at temperature 0."""

        def step(at: Tensor) -> Tensor:
            guessed = self._drafter.draft_ids[self._logits(at).argmax(-1)]
            return (guessed == self._following(at, DEPTH)).long().cumprod(dim=1).sum(dim=1)

        return step

    def chain_step(self, reach: Callable[[Tensor, Tensor], Tensor]) -> Step:
        """A chain of drawn tokens, accepted as `reach` says."""
        generator = torch.Generator().manual_seed(1)

        def step(at: Tensor) -> Tensor:
            said = self._following(at, DEPTH)
            q = F.pad(self._q(at), (0, 1))
            # What cannot be drafted is in the column that was added.
            drafted = q.gather(2, self._indices[said].unsqueeze(2) % q.shape[2])[:, :, 0]
            p = self._p_said.gather(1, at[:, None] + torch.arange(1, DEPTH + 1))
            return num_accepted(reach(p, drafted), generator)

        return step

    def sampled_step(self, shape: list[list[int]]) -> Step:
        """A tree of a fixed shape, its children drawn without replacement."""
        generator = torch.Generator().manual_seed(2)
        return lambda at: self._walk_children(at, shape, generator, lambda level, child: None)

    def child_acceptance(self) -> Tensor:
        """How often child k of a node at depth i is the accepted one, `[K, C]`."""
        hits, reached = torch.zeros(DEPTH, CHILDREN), torch.zeros(DEPTH, 1)
        generator = torch.Generator().manual_seed(3)

        def count(level: int, child: Tensor) -> None:
            reached[level] += len(child)
            hits[level] += torch.bincount(child[child >= 0], minlength=CHILDREN)

        # Every node has as many children, down to the last level.
        endless = [[0] * CHILDREN]
        self.walk(lambda at: self._walk_children(at, endless, generator, count))
        return hits / reached.clamp_min(1)

    def _walk_children(
        self,
        at: Tensor,
        shape: list[list[int]],
        generator: torch.Generator,
        see: Callable[[int, Tensor], None],
    ) -> Tensor:
        """Levels accepted `[B]`; `see` is told the ranks of the children accepted at each level."""
        widest = max(map(len, shape))
        children = torch.tensor([row + [-1] * (widest - len(row)) for row in shape])
        widths = torch.tensor([len(row) for row in shape])
        said, q = self._following(at, DEPTH), self._q(at)
        node, accepted = torch.zeros_like(at), torch.zeros_like(at)
        walking = torch.arange(len(at))
        for level in range(DEPTH):
            walking = walking[at[walking] + level + 1 < self._lengths[walking]]
            if not len(walking):
                break
            drafted = self._p_draft[walking, at[walking] + level + 1]
            p = torch.cat([drafted, (1 - drafted.sum(1, keepdim=True)).clamp_min(0)], dim=1)
            target = self._indices[said[walking, level]] % p.shape[1]
            child = accepted_child(p, q[walking, level], target, widths[node[walking]], generator)
            see(level, child)
            walking, child = walking[child >= 0], child[child >= 0]
            accepted[walking] += 1
            node[walking] = children[node[walking], child]
        return accepted

    @cached_property
    def _p_said(self) -> Tensor:
        """The target's chances of what was said, by position `[B, n]`."""
        found = torch.ones(self._ids.shape)
        for row, hidden in enumerate(self._hidden):
            said = self._ids[row, 1 : len(hidden) + 1]
            found[row, 1 : len(hidden) + 1] = self._p(hidden).gather(1, said[:, None])[:, 0]
        return found

    @cached_property
    def _p_draft(self) -> Tensor:
        """The target's chances of the draft vocabulary, by position `[B, n, Vd]`."""
        found = torch.zeros(*self._ids.shape, len(self._drafter.draft_ids))
        for row, hidden in enumerate(self._hidden):
            found[row, 1 : len(hidden) + 1] = self._p(hidden)[:, self._drafter.draft_ids]
        return found

    def _p(self, hidden: Tensor) -> Tensor:
        """The target's chances `[T, V]` at its temperature."""
        logits = self._target_logits(hidden)[:, : self._vocab_limit].float()
        return (logits / self.temperature).softmax(-1)

    def _depth_limits(self, at: Tensor) -> Tensor:
        """The largest useful depth `[B]`: the last token that was allowed need not be drafted."""
        return (self._allowed - 2 - at).clamp_min(0)

    def _following(self, at: Tensor, count: int) -> Tensor:
        """The next tokens `[B, count]` of the responses."""
        return self._ids.gather(1, at[:, None] + torch.arange(1, count + 1))

    def _q(self, at: Tensor) -> Tensor:
        """The drafter's probabilities `[B, K, Vd]`, at the temperature that it drafts at."""
        return (self._logits(at).float() / (SHARPENING * self.temperature)).softmax(-1)

    def _logits(self, at: Tensor) -> Tensor:
        """The drafter's logits `[B, K, Vd]` along what was said."""
        said, parents = self._following(at, DEPTH), torch.zeros_like(at)[:, None]
        levels = [self._learned.root(len(at))]
        for level in range(DEPTH - 1):
            levels.append(self._learned.advance(parents, said[:, level : level + 1]))
        return torch.cat(levels, dim=1)

    def _observe(self, seen: Tensor, at: Tensor) -> None:
        """Show the drafter the pairs from `seen [B]` to before `at [B]`, at most a window."""
        start = torch.maximum(seen, at - self._window)
        counts = at - start
        offsets = torch.arange(max(1, int(counts.max())))
        positions = torch.minimum(start[:, None] + offsets, (at - 1).clamp_min(0)[:, None])
        rows = torch.arange(len(at))[:, None]
        self._learned.observe(
            self._features[rows, positions], self._ids[rows, positions + 1], positions, counts
        )


class GreedyProposer:
    """Proposes the drafter's most likely tokens, whatever the target's noise is."""

    def __init__(self, drafter: LearnedDrafter) -> None:
        self._drafter = drafter

    def root(self, noise: StepNoise, num_children: int) -> Proposals:
        """See `Proposer.root`."""
        return self._best(self._drafter.root(noise.num_rows), noise.temperature, num_children)

    def advance(
        self, parents: Tensor, tokens: Tensor, noise: StepNoise, depth: int, num_children: int
    ) -> Proposals:
        """See `Proposer.advance`."""
        logits = self._drafter.advance(parents, tokens)
        return self._best(logits, noise.temperature, num_children)

    def _best(self, logits: Tensor, temperature: float, num_children: int) -> Proposals:
        chances, indices = (logits.float() / (temperature or 1.0)).softmax(-1).topk(num_children)
        return Proposals(self._drafter.draft_ids[indices], chances)


def wide_tree(budget: int, cap: int | None = None) -> Strategy:
    """All levels and children, of which the `budget` likeliest are kept, however unlikely."""
    return Strategy(
        depth=DEPTH,
        branching=CHILDREN,
        beam=CHILDREN,
        budget=budget,
        cap=cap,
        min_chance=1e-6,
    )


def follow(tree: Tree, following: Tensor) -> Verified:
    """What verification commits where the target says `following [B, K + 1]`."""
    num_rows, num_levels = following.shape
    path = torch.full_like(following, -1)
    node = torch.zeros(num_rows, dtype=torch.int64)
    walking = torch.ones(num_rows, dtype=torch.bool)
    for level in range(num_levels):
        path[:, level] = torch.where(walking, node, -1)
        is_next = (tree.parents == node[:, None]) & (tree.tokens == following[:, level, None])
        is_next &= tree.valid
        walking &= is_next.any(dim=1)
        node = is_next.to(torch.uint8).argmax(dim=1)
    counts = (path >= 0).sum(dim=1)
    tokens = torch.where(path >= 0, following, -1)
    return Verified(path, tokens, torch.zeros_like(path, dtype=torch.float32), counts)


def _padded(states: Tensor, length: int) -> Tensor:
    return F.pad(states, (0, 0, 0, length - len(states)))
