"""Draft trees: built like the naive way says, whatever the proposers offer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ratoon.speculation.build import MAX_CHANCE, build_tree
from ratoon.speculation.calibration import Calibration
from ratoon.speculation.proposer import Proposals, Source, StepNoise
from ratoon.speculation.strategy import PLAIN, Strategy
from ratoon.speculation.tree import Tree, ancestor_mask, root_only

VOCAB = 50
Offer = Callable[[int, tuple[int, ...]], tuple[list[int], list[float]]]


class FunctionProposer:
    """Proposes what a function of (row, path of tokens) says."""

    def __init__(self, offer: Offer) -> None:
        self.offer = offer
        self.paths: list[list[tuple[int, ...]]] = []

    def root(self, noise: StepNoise, num_children: int) -> Proposals:
        self.paths = [[()] for _ in range(noise.num_rows)]
        return self._proposals()

    def advance(
        self, parents: Tensor, tokens: Tensor, noise: StepNoise, depth: int, num_children: int
    ) -> Proposals:
        self.paths = [
            [(*paths[parent], token) for parent, token in zip(row_parents, row_tokens, strict=True)]
            for paths, row_parents, row_tokens in zip(
                self.paths, parents.tolist(), tokens.tolist(), strict=True
            )
        ]
        assert all(len(path) == depth for paths in self.paths for path in paths)
        return self._proposals()

    def _proposals(self) -> Proposals:
        offers = [[self.offer(row, path) for path in paths] for row, paths in enumerate(self.paths)]
        tokens = torch.tensor([[offer[0] for offer in row] for row in offers])
        chances = torch.tensor([[offer[1] for offer in row] for row in offers])
        return Proposals(tokens, chances)


def hashed_offer(salt: int, width: int, first_row: int = 0) -> Offer:
    """Different tokens with chances that sum to less than 1, a function of row and path."""

    def offer(row: int, path: tuple[int, ...]) -> tuple[list[int], list[float]]:
        generator = torch.Generator().manual_seed(hash((salt, first_row + row, path)) % 2**31)
        tokens = torch.randperm(12, generator=generator)[:width]
        weights = torch.rand(width, generator=generator) ** 3
        chances = weights / (weights.sum() + 0.3)
        return tokens.tolist(), chances.tolist()

    return offer


def no_noise(num_rows: int) -> StepNoise:
    return StepNoise(torch.zeros(num_rows, 2, dtype=torch.int64), torch.zeros(num_rows).long(), 0.0)


def build(
    proposers: dict[Source, FunctionProposer], num_rows: int, strategy: Strategy, **options: object
) -> Tree:
    roots = torch.arange(num_rows) + 20
    return build_tree(proposers, roots, no_noise(num_rows), strategy, vocab_size=VOCAB, **options)


def naive_tree(
    offers: list[Offer], row: int, strategy: Strategy, depth_limit: int | None = None
) -> dict[tuple[int, ...], float]:
    """Kept nodes of one row as paths with their cumulative chances, by the definition."""
    frontier = {(): 1.0}
    candidates: dict[tuple[int, ...], float] = {}
    depth = strategy.depth if depth_limit is None else min(strategy.depth, depth_limit)
    for _ in range(depth):
        level: dict[tuple[int, ...], float] = {}
        for path, chance in frontier.items():
            for offer in offers:
                for token, conditional in zip(*offer(row, path), strict=True):
                    if not conditional > 0 or not 0 <= token < VOCAB:
                        continue
                    child = (*path, token)
                    value = chance * min(conditional, MAX_CHANCE)
                    if value > strategy.min_chance:
                        level[child] = max(value, level.get(child, 0.0))
        candidates |= level
        best = sorted(level, key=lambda path: -level[path])[: strategy.beam]
        frontier = {path: level[path] for path in best}
    kept = sorted(candidates, key=lambda path: -candidates[path])[: strategy.budget]
    return {path: candidates[path] for path in kept}


def paths_of(tree: Tree, row: int) -> dict[tuple[int, ...], float]:
    """Nodes of a row as paths below the root; checks the tree's invariants on the way."""
    paths: list[tuple[int, ...]] = [()]
    valid = tree.valid[row].tolist()
    assert valid == sorted(valid, reverse=True), "invalid nodes must come last"
    for node in range(1, tree.tokens.shape[1]):
        parent = int(tree.parents[row, node])
        assert 0 <= parent < node
        paths.append((*paths[parent], int(tree.tokens[row, node])))
        if valid[node]:
            assert int(tree.depths[row, node]) == len(paths[node])
            assert tree.chances[row, node] < tree.chances[row, parent]
            assert valid[parent]
    assert int(tree.parents[row, 0]) == -1
    assert int(tree.depths[row, 0]) == 0
    num_valid = sum(valid)
    assert len(set(paths[:num_valid])) == num_valid, "a child appears twice"
    return {paths[node]: float(tree.chances[row, node]) for node in range(1, num_valid)}


STRATEGIES = [
    Strategy(depth=1, branching=4, beam=1, budget=3),
    Strategy(depth=3, branching=4, beam=3, budget=9, min_chance=1e-3),
    Strategy(depth=5, branching=4, beam=2, budget=40, min_chance=0.02),
    Strategy(depth=4, branching=4, beam=1, budget=4),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_tree_is_what_the_definition_says(strategy: Strategy) -> None:
    offers = [hashed_offer(1, 4), hashed_offer(2, 3)]
    proposers = dict(zip(Source, map(FunctionProposer, offers), strict=True))
    tree = build(proposers, 5, strategy)
    for row in range(5):
        expected = naive_tree(offers, row, strategy)
        found = paths_of(tree, row)
        assert found.keys() == expected.keys()
        for path, chance in found.items():
            assert chance == pytest.approx(expected[path], rel=1e-5)


def test_a_shared_budget_keeps_the_likeliest_nodes_of_all_trees() -> None:
    offer = hashed_offer(5, 4)
    for cap in (20, 6):
        strategy = Strategy(depth=4, branching=4, beam=3, budget=4, cap=cap, min_chance=1e-3)
        tree = build({Source.LEARNED: FunctionProposer(offer)}, 5, strategy)
        own = replace(strategy, budget=cap, cap=None)
        everything = {
            (row, path): chance
            for row in range(5)
            for path, chance in naive_tree([offer], row, replace(own, budget=60)).items()
        }
        best = sorted(everything, key=lambda node: -everything[node])[: 5 * strategy.budget]
        for row in range(5):
            expected = {path for of, path in best if of == row} & naive_tree(
                [offer], row, own
            ).keys()
            assert paths_of(tree, row).keys() == expected
        sizes = tree.valid.sum(dim=1) - 1
        assert int(sizes.max()) > strategy.budget > int(sizes.min())


def test_a_row_gets_the_same_tree_alone_and_in_a_batch() -> None:
    strategy = STRATEGIES[1]
    together = build({Source.LEARNED: FunctionProposer(hashed_offer(3, 4))}, 6, strategy)
    for row in range(6):
        alone = build({Source.LEARNED: FunctionProposer(hashed_offer(3, 4, row))}, 1, strategy)
        assert paths_of(alone, 0) == paths_of(together, row)


def test_depth_limits_cut_each_row_by_its_own_limit() -> None:
    offer = hashed_offer(4, 4)
    strategy = STRATEGIES[1]
    limits = torch.tensor([0, 1, 2, 9])
    tree = build({Source.SUFFIX: FunctionProposer(offer)}, 4, strategy, depth_limits=limits)
    for row, limit in enumerate(limits.tolist()):
        assert paths_of(tree, row).keys() == naive_tree([offer], row, strategy, limit).keys()


def test_the_same_child_of_two_drafters_is_one_node_of_both() -> None:
    first = FunctionProposer(lambda row, path: ([5, 6], [0.3, 0.1]))
    second = FunctionProposer(lambda row, path: ([6, 5], [0.4, 0.2]))
    strategy = Strategy(depth=1, budget=8)
    tree = build({Source.LEARNED: first, Source.SUFFIX: second}, 1, strategy)
    assert paths_of(tree, 0) == {(5,): pytest.approx(0.3), (6,): pytest.approx(0.4)}
    assert tree.sources[0].tolist() == [0, 3, 3]


def test_sources_say_who_proposed_a_node() -> None:
    first = FunctionProposer(lambda row, path: ([5], [0.3]))
    second = FunctionProposer(lambda row, path: ([6], [0.4]))
    tree = build({Source.LEARNED: first, Source.SUFFIX: second}, 1, Strategy(depth=1))
    assert dict(zip(tree.tokens[0].tolist(), tree.sources[0].tolist(), strict=True)) == {
        20: 0,
        5: 1 << Source.LEARNED,
        6: 1 << Source.SUFFIX,
    }


def test_token_zero_is_proposed_beside_empty_places() -> None:
    proposer = FunctionProposer(lambda row, path: ([9, 0], [float("nan"), 0.5]))
    other = FunctionProposer(lambda row, path: ([0, 0], [0.0, 0.0]))
    tree = build({Source.LEARNED: proposer, Source.SUFFIX: other}, 1, Strategy(depth=1))
    assert paths_of(tree, 0) == {(0,): pytest.approx(0.5)}
    assert tree.sources[0, 1] == 1 << Source.LEARNED


@pytest.mark.parametrize("chance", [float("nan"), -1.0, 0.0])
def test_what_is_no_chance_is_no_proposal(chance: float) -> None:
    proposer = FunctionProposer(lambda row, path: ([4, 5], [chance, chance]))
    tree = build({Source.LEARNED: proposer}, 2, Strategy(depth=3))
    assert tree.tokens.tolist() == [[20], [21]]


def test_ids_outside_the_vocabulary_never_reach_the_target() -> None:
    proposer = FunctionProposer(lambda row, path: ([-3, VOCAB, 7], [0.5, 0.3, float("inf")]))
    tree = build({Source.LEARNED: proposer}, 1, Strategy(depth=2))
    assert set(paths_of(tree, 0)) == {(7,), (7, 7)}


def test_certain_children_stay_behind_their_parents() -> None:
    proposer = FunctionProposer(lambda row, path: ([1], [1.0]))
    tree = build({Source.LEARNED: proposer}, 1, Strategy(depth=8, beam=1, budget=8))
    assert set(paths_of(tree, 0)) == {(1,) * depth for depth in range(1, 9)}


def test_a_plain_strategy_or_no_proposer_gives_roots_only() -> None:
    proposer = FunctionProposer(hashed_offer(1, 4))
    only_learned = Strategy(depth=2, use_suffix=False)
    for tree in (
        build({Source.LEARNED: proposer}, 3, PLAIN),
        build({}, 3, only_learned),
        build({Source.SUFFIX: proposer}, 3, only_learned),
    ):
        assert tree.tokens.tolist() == [[20], [21], [22]]
        assert tree.max_depth == 0


def test_drafting_stops_where_no_row_has_a_frontier() -> None:
    asked: list[int] = []

    def offer(row: int, path: tuple[int, ...]) -> tuple[list[int], list[float]]:
        asked.append(len(path))
        return ([3], [0.5 if len(path) < 2 else 0.0])

    tree = build({Source.LEARNED: FunctionProposer(offer)}, 1, Strategy(depth=6))
    assert tree.max_depth == 2
    assert max(asked) == 2


def test_calibration_scales_the_odds_of_each_drafter() -> None:
    calibration = Calibration()
    state = calibration.state_dict()
    state["offsets"][Source.SUFFIX, 0] = torch.tensor(2.0).log()
    calibration.load_state_dict(state)
    proposers = {
        Source.LEARNED: FunctionProposer(lambda row, path: ([5], [0.5])),
        Source.SUFFIX: FunctionProposer(lambda row, path: ([6], [0.5])),
    }
    tree = build(proposers, 1, Strategy(depth=1), calibration=calibration)
    assert paths_of(tree, 0) == {(5,): pytest.approx(0.5), (6,): pytest.approx(2 / 3)}


def test_the_ancestor_mask_holds_each_node_and_its_ancestors() -> None:
    tree = build({Source.LEARNED: FunctionProposer(hashed_offer(7, 4))}, 3, STRATEGIES[1])
    mask = ancestor_mask(tree)
    for row in range(3):
        for node in range(tree.tokens.shape[1]):
            expected, current = {node}, node
            while (current := int(tree.parents[row, current])) >= 0:
                expected.add(current)
            assert set(mask[row, node].nonzero().flatten().tolist()) == expected


def test_a_tree_of_roots_has_one_valid_node_a_row() -> None:
    tree = root_only(torch.tensor([4, 5]))
    assert tree.valid.tolist() == [[True], [True]]
    assert ancestor_mask(tree).tolist() == [[[True]], [[True]]]
