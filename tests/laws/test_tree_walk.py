"""Law: whatever the trees hold, walking them commits what plain keyed decoding would.

The target is a table: its logits depend on the last two tokens, so a walk that mixed up nodes,
parents or positions would select other tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ratoon.records import DrawKey, SamplingParams, Stream
from ratoon.sampling import keyed_noise
from ratoon.sampling.select import Selector
from ratoon.speculation import verify
from ratoon.speculation.build import build_tree
from ratoon.speculation.calibration import Calibration
from ratoon.speculation.proposer import CoupledProposer, RetrievedProposer, Source, StepNoise
from ratoon.speculation.strategy import Strategy
from ratoon.speculation.tree import (
    Tree,
    ancestor_mask,
    ancestors_of,
    packed,
    packed_to,
    root_only,
)

VOCAB = 11
LENGTH = 24
NUM_ROWS = 6
EOS = 2

TABLE = torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)) * 2.0
KEYS = keyed_noise.sequence_keys(
    DrawKey(seed=1, stream=Stream.TRAIN, round=2, dataset="table", row=row, sample=0)
    for row in range(NUM_ROWS)
)
PROMPT = [3, 7]
PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=0.0),
]
# Makes trees from the tokens before the roots, the roots, and the index of the next token.
TreeMaker = Callable[[Tensor, Tensor, Tensor], Tree]


def target_logits(tree: Tree, before: Tensor) -> Tensor:
    """Logits `[B, N, V]` of the table at every node; `before [B]` precede the roots."""
    parents = tree.parents.clamp_min(0)
    previous = tree.tokens.gather(1, parents)
    previous[:, 0] = before
    inside = (tree.tokens >= 0) & (tree.tokens < VOCAB)
    previous = previous.clamp(0, VOCAB - 1)
    logits = TABLE[previous, tree.tokens.clamp(0, VOCAB - 1)]
    # No target can be run on an id outside its vocabulary: its row must never be looked at.
    return logits.masked_fill(~inside.unsqueeze(2), torch.nan)


def decode(
    params: SamplingParams,
    make_tree: TreeMaker,
    rows: list[int] | None = None,
    distort: Callable[[Tree], Tree] = lambda tree: tree,
) -> tuple[list[list[int]], list[list[float]], int]:
    """Token ids and log-probabilities of each row, and how many steps it took.

    `distort` changes what the walk sees, but not what the target computed.
    """
    rows = list(range(NUM_ROWS)) if rows is None else rows
    keys = KEYS[rows]
    selector = Selector(VOCAB)
    sequences = [list(PROMPT) for _ in rows]
    logprobs: list[list[float]] = [[] for _ in rows]
    steps = 0
    while min(map(len, sequences)) < LENGTH:
        t0 = torch.tensor([len(sequence) for sequence in sequences])
        before = torch.tensor([sequence[-2] for sequence in sequences])
        roots = torch.tensor([sequence[-1] for sequence in sequences])
        tree = make_tree(before, roots, t0)
        logits = target_logits(tree, before)
        tree = distort(tree)
        nodes, places = packed(tree)
        verified = verify.walk(
            tree, logits.flatten(0, 1)[nodes], places, keys, t0, selector, params
        )
        check_verified(tree, verified)
        for row, count in enumerate(verified.counts.tolist()):
            sequences[row] += verified.tokens[row, :count].tolist()
            logprobs[row] += verified.logprobs[row, :count].tolist()
        steps += 1
    cut = LENGTH - len(PROMPT)
    return [s[:LENGTH] for s in sequences], [values[:cut] for values in logprobs], steps


def check_verified(tree: Tree, verified: verify.Verified) -> None:
    """Paths start at the root, follow parents, and carry the tokens committed before."""
    assert verified.path.shape == verified.tokens.shape
    assert int(verified.counts.max()) == verified.tokens.shape[1]
    for row, count in enumerate(verified.counts.tolist()):
        path = verified.path[row].tolist()
        assert path[0] == 0
        assert path[count:] == [-1] * (len(path) - count)
        assert verified.tokens[row, count:].tolist() == [-1] * (len(path) - count)
        for level in range(1, count):
            assert int(tree.parents[row, path[level]]) == path[level - 1]
            assert tree.tokens[row, path[level]] == verified.tokens[row, level - 1]


def plain(params: SamplingParams, rows: list[int] | None = None) -> list[list[int]]:
    """Token by token, one row at a time, without any tree."""
    selector = Selector(VOCAB)
    sequences = []
    for row in range(NUM_ROWS) if rows is None else rows:
        sequence = list(PROMPT)
        while len(sequence) < LENGTH:
            keys = keyed_noise.row_keys(KEYS[row : row + 1], torch.tensor([len(sequence)]))
            ids, _ = selector.select(TABLE[sequence[-2], sequence[-1]][None], keys, params)
            sequence.append(int(ids))
        sequences.append(sequence)
    return sequences


def random_trees(seed: int, *, width: int = 12, hints: list[list[int]] | None = None) -> TreeMaker:
    """Trees of random shape with repeated children, ids outside the vocabulary and gaps.

    `hints` are the true sequences: with them most nodes carry the true next token.
    """
    generator = torch.Generator().manual_seed(seed)

    def make(before: Tensor, roots: Tensor, t0: Tensor) -> Tree:
        shape = (len(roots), width)
        tokens = torch.randint(-2, VOCAB + 2, shape, generator=generator)
        parents = (torch.rand(shape, generator=generator) * torch.arange(width)).long()
        parents[:, 0] = -1
        valid = torch.rand(shape, generator=generator) < 0.8
        valid[:, 0] = True
        # One row after the other drafts nothing.
        valid[int(t0[0]) % len(roots), 1:] = False
        tokens[:, 0] = roots
        depths = torch.zeros(shape, dtype=torch.int64)
        for node in range(1, width):
            depths[:, node] = depths.gather(1, parents[:, node, None])[:, 0] + 1
        if hints is not None:
            for row, start in enumerate(t0.tolist()):
                for node in range(1, width):
                    place = start + int(depths[row, node]) - 1
                    if place < LENGTH and torch.rand((), generator=generator) < 0.7:
                        tokens[row, node] = hints[row][place]
        return Tree(tokens, parents, depths, torch.ones(shape), valid, torch.ones_like(tokens))

    return make


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("seed", range(3))
def test_any_tree_commits_the_tokens_of_plain_decoding(params: SamplingParams, seed: int) -> None:
    expected = plain(params)
    blind, blind_logprobs, _ = decode(params, random_trees(seed))
    guided, guided_logprobs, steps = decode(params, random_trees(seed, hints=expected))
    assert blind == expected
    assert guided == expected
    assert guided_logprobs == blind_logprobs
    assert steps < LENGTH - len(PROMPT), "the true tokens in the trees were not used"


@pytest.mark.parametrize("seed", range(3))
def test_the_way_is_the_same_for_all_levels_at_once(seed: int) -> None:
    """Trees repeat children, so that the first of equal siblings must be taken."""
    params, selector = PARAMS[0], Selector(VOCAB)
    make_tree = random_trees(seed, hints=plain(params))
    lengths = torch.full((NUM_ROWS,), len(PROMPT))
    before, roots = torch.tensor(PROMPT).expand(NUM_ROWS, 2).unbind(1)
    longest = 0
    for _ in range(20):
        tree = make_tree(before, roots, lengths)
        nodes, places = packed(tree)
        logits = target_logits(tree, before).nan_to_num().flatten(0, 1)
        walked = verify.walk(tree, logits[nodes], places, KEYS, lengths, selector, params)
        positions = (lengths[:, None] + tree.depths).flatten()
        keys = keyed_noise.row_keys(KEYS.repeat_interleave(tree.tokens.shape[1], 0), positions)
        ids = selector.select(logits, keys, params)[0].view_as(tree.tokens)
        ancestors = ancestors_of(tree.parents)
        assert torch.equal(ancestors, ancestor_mask(tree))
        path, counts = verify.follow(
            tree.tokens, tree.parents, tree.depths, tree.valid, ancestors, ids
        )
        levels = walked.path.shape[1]
        assert torch.equal(path[:, :levels], walked.path)
        assert bool((path[:, levels:] == -1).all())
        assert torch.equal(counts, walked.counts)
        fixed_nodes, fixed_places = packed_to(tree.valid, len(nodes) + 3)
        assert torch.equal(fixed_nodes[: len(nodes)], nodes)
        assert torch.equal(fixed_places, places)
        assert len(fixed_nodes.unique()) == len(nodes) + 3
        longest = max(longest, levels)
    assert longest > 2


@pytest.mark.parametrize("params", PARAMS)
def test_a_tree_of_roots_is_plain_decoding(params: SamplingParams) -> None:
    tokens, _, steps = decode(params, lambda before, roots, t0: root_only(roots))
    assert tokens == plain(params)
    assert steps == LENGTH - len(PROMPT)


def test_a_row_commits_the_same_alone_and_among_others() -> None:
    params = PARAMS[0]
    expected = plain(params)
    for row in range(NUM_ROWS):
        alone, _, _ = decode(params, random_trees(9, hints=[expected[row]]), rows=[row])
        assert alone[0] == expected[row]


class TableDrafter:
    """Offers the target's own logits, disturbed. `last` is set to (before, roots) for each step."""

    def __init__(self, disturb: Callable[[Tensor], Tensor]) -> None:
        self.draft_ids = torch.arange(VOCAB)
        self.disturb = disturb

    def start(self, before: Tensor, roots: Tensor) -> None:
        self.before, self.last = before[:, None], roots[:, None]

    def root(self, num_rows: int) -> Tensor:
        return self.disturb(TABLE[self.before, self.last].clone())

    def advance(self, parents: Tensor, tokens: Tensor) -> Tensor:
        previous, self.last = self.last.gather(1, parents), tokens
        return self.disturb(TABLE[previous, tokens].clone())


class PoisonedRetrieval:
    """Offers chances and tokens that make no sense."""

    def __init__(self, token: int, prior: float) -> None:
        self.token, self.prior = token, prior

    def root(self, num_rows: int, num_children: int) -> tuple[Tensor, Tensor]:
        return self._offer(torch.zeros(num_rows, 1), num_children)

    def advance(self, parents: Tensor, tokens: Tensor, num_children: int) -> tuple[Tensor, Tensor]:
        return self._offer(parents, num_children)

    def _offer(self, like: Tensor, num_children: int) -> tuple[Tensor, Tensor]:
        shape = (*like.shape, num_children)
        return torch.full(shape, self.token), torch.full(shape, self.prior)


def drafted(drafter: TableDrafter, poison: PoisonedRetrieval, params: SamplingParams) -> TreeMaker:
    """Trees that the learned and the retrieving drafter build together."""
    strategy = Strategy(depth=4, branching=3, beam=3, budget=10)
    calibration = Calibration()
    proposers = {
        Source.LEARNED: CoupledProposer(drafter),
        Source.SUFFIX: RetrievedProposer(poison),
    }

    def make(before: Tensor, roots: Tensor, t0: Tensor) -> Tree:
        drafter.start(before, roots)
        noise = StepNoise(KEYS[: len(roots)], t0, params.temperature)
        tree = build_tree(
            proposers, roots, noise, strategy, vocab_size=VOCAB, calibration=calibration
        )
        assert bool(ancestor_mask(tree).any(dim=2).all())
        assert bool(((tree.tokens >= 0) & (tree.tokens < VOCAB)).all())
        return tree

    return make


POISONS: dict[str, Callable[[Tensor], Tensor]] = {
    "NaN": lambda logits: torch.full_like(logits, torch.nan),
    "some NaN": lambda logits: logits.masked_fill(logits > 1, torch.nan),
    "infinite": lambda logits: logits.masked_fill(logits > 1, torch.inf),
    "all excluded": lambda logits: torch.full_like(logits, -torch.inf),
    "always end of sequence": lambda logits: torch.zeros_like(logits).index_fill_(
        2, torch.tensor([EOS]), 1e4
    ),
    "always wrong": lambda logits: -logits,
    "right": lambda logits: logits,
}


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("params", [PARAMS[0], PARAMS[3]])
def test_a_poisoned_drafter_changes_no_token(params: SamplingParams, poison: str) -> None:
    expected = plain(params)
    for token, prior in ((VOCAB + 5, 0.9), (-7, 0.5), (3, float("nan")), (3, float("inf")), (4, 2)):
        drafter = TableDrafter(POISONS[poison])
        tokens, _, _ = decode(params, drafted(drafter, PoisonedRetrieval(token, prior), params))
        assert tokens == expected


def test_a_good_drafter_needs_fewer_steps_than_a_wrong_one() -> None:
    params = PARAMS[0]
    nothing = PoisonedRetrieval(0, 0.0)
    steps = {
        poison: decode(params, drafted(TableDrafter(POISONS[poison]), nothing, params))[2]
        for poison in ("right", "always wrong")
    }
    assert 2 * steps["right"] < steps["always wrong"]


def test_a_walk_with_wrong_keys_below_the_root_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    params = PARAMS[0]
    expected = plain(params)

    class OffByOne:
        """Gives levels below the root the key of the level above."""

        @staticmethod
        def row_keys(sequence_keys: Tensor, t: Tensor) -> Tensor:
            is_root_level = len(t) == NUM_ROWS
            return keyed_noise.row_keys(sequence_keys, t if is_root_level else t - 1)

    assert decode(params, random_trees(3, hints=expected))[0] == expected
    monkeypatch.setattr(verify, "keyed_noise", OffByOne)
    assert decode(params, random_trees(3, hints=expected))[0] != expected


def test_a_walk_that_ignores_parents_is_caught() -> None:
    params = PARAMS[0]
    expected = plain(params)

    def all_children_of_the_root(tree: Tree) -> Tree:
        parents = torch.where(tree.parents < 0, tree.parents, 0)
        return replace(tree, parents=parents)

    trees = random_trees(4, hints=expected)
    assert decode(params, trees)[0] == expected
    trees = random_trees(4, hints=expected)
    assert decode(params, trees, distort=all_children_of_the_root)[0] != expected
