"""Walks through recorded responses: what they count is what speculation would have accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench_tiny import VOCAB, tiny_source

from ratoon.bench.trees import _rows, _sharing, _walks
from ratoon.drafter.trainer import TrainerOptions
from ratoon.offline.recorded import Source, entropy, record
from ratoon.offline.rejection import block_reach, token_reach
from ratoon.offline.responses import CHILDREN, DEPTH, GreedyProposer, Responses, follow
from ratoon.offline.training import Recipe, train
from ratoon.records import SamplingParams
from ratoon.rollout.native.engine import Finished
from ratoon.sampling.keyed_noise import row_keys, sequence_keys
from ratoon.sampling.select import Selector
from ratoon.speculation.calibration import Calibration
from ratoon.speculation.proposer import CoupledProposer
from ratoon.speculation.strategy import Strategy
from ratoon.speculation.tree import Tree, packed
from ratoon.speculation.verify import walk

RESPONSES = 6
STRATEGY = Strategy(depth=DEPTH, branching=CHILDREN, beam=CHILDREN, budget=12, min_chance=1e-6)


@pytest.fixture(scope="module")
def source() -> Source:
    return tiny_source()


@pytest.fixture(scope="module")
def finished(source: Source) -> dict[float, list[Finished]]:
    return {
        temperature: record(source, range(RESPONSES), temperature) for temperature in (0.0, 1.0)
    }


@pytest.fixture(scope="module")
def responses(source: Source, finished: dict[float, list[Finished]]) -> dict[float, Responses]:
    options = TrainerOptions(compute_dtype=torch.float32)
    others = record(source, range(RESPONSES, 40), 1.0)
    drafter = train(source, others, Recipe(window=64, steps=40, options=options)).drafter
    return {t: Responses(source, drafter, found, t) for t, found in finished.items()}


def test_what_is_followed_is_what_verification_commits() -> None:
    """Against the walk over the target's logits, of which the recorded tokens are the choice."""
    torch.manual_seed(0)
    logits = torch.randn(VOCAB, VOCAB)
    params, selector = SamplingParams(), Selector(VOCAB)
    keys = torch.randint(0, 2**62, (4, 2))
    t0 = torch.tensor([3, 4, 5, 6])
    said = torch.randint(0, VOCAB, (4, 1))
    for level in range(4):
        ids, _ = selector.select(logits[said[:, -1]], row_keys(keys, t0 + level), params)
        said = torch.cat([said, ids[:, None]], dim=1)
    # Node 1 is wrong; 2 and its child 3 are right in the rows that say so; 4 is of no tree.
    right = torch.tensor([[True, True], [True, False], [False, True], [False, False]])
    wrong = (said + 1) % VOCAB
    tokens = torch.stack(
        [
            said[:, 0],
            wrong[:, 1],
            torch.where(right[:, 0], said[:, 1], wrong[:, 1] + 1),
            torch.where(right[:, 1], said[:, 2], wrong[:, 2]),
            said[:, 1],
        ],
        dim=1,
    )
    tree = Tree(
        tokens=tokens % VOCAB,
        parents=torch.tensor([-1, 0, 0, 2, 0]).repeat(4, 1),
        depths=torch.tensor([0, 1, 1, 2, 1]).repeat(4, 1),
        chances=torch.tensor([1.0, 0.5, 0.5, 0.4, 0.0]).repeat(4, 1),
        valid=torch.tensor([True, True, True, True, False]).repeat(4, 1),
        sources=torch.ones(4, 5, dtype=torch.int64),
    )
    nodes, places = packed(tree)
    expected = walk(tree, logits[tree.tokens.view(-1)[nodes]], places, keys, t0, selector, params)
    found = follow(tree, said[:, 1:])
    assert found.counts.tolist() == expected.counts.tolist() == [3, 2, 1, 1]
    longest = expected.tokens.shape[1]
    assert found.tokens[:, :longest].tolist() == expected.tokens.tolist()
    assert found.path[:, :longest].tolist() == expected.path.tolist()


def test_at_temperature_0_coupled_and_greedy_trees_are_one(
    responses: dict[float, Responses],
) -> None:
    greedy = responses[0.0]
    counts = [
        greedy.walk(greedy.tree_step(proposer, STRATEGY, Calibration()))
        for proposer in (CoupledProposer, GreedyProposer)
    ]
    assert counts[0].tokens.tolist() == counts[1].tokens.tolist()
    assert counts[0].steps.tolist() == counts[1].steps.tolist()
    chain = replace(STRATEGY, branching=1, beam=1, min_chance=1e-12)
    as_tree = greedy.walk(greedy.tree_step(CoupledProposer, chain, Calibration()))
    as_chain = greedy.walk(greedy.greedy_chain_step())
    assert as_tree.steps.tolist() == as_chain.steps.tolist()
    assert as_chain.mean > 1.0


def test_every_scheme_is_compared_and_block_verification_beats_tokens(
    responses: dict[float, Responses], finished: dict[float, list[Finished]]
) -> None:
    warm = responses[1.0]
    found = _walks(warm, warm, 12)
    rows = {row["scheme"]: row for row in _rows(found, 1.0, entropy(finished[1.0]))}
    assert rows["coupled tree"]["coupled_tree_gains"] == 1.0
    for row in rows.values():
        assert row["low"] <= row["coupled_tree_gains"] <= row["high"]
        assert row["tokens_per_verification"] >= 1.0
    totals = [
        sum(warm.walk(warm.chain_step(reach)).mean for _ in range(3))
        for reach in (token_reach, block_reach)
    ]
    assert totals[1] > 0.97 * totals[0]


def test_sharing_never_loses_much_and_is_measured_for_each_budget(
    responses: dict[float, Responses],
) -> None:
    rows = _sharing(responses[1.0], responses[1.0])
    assert [row["nodes_per_sequence"] for row in rows] == [1, 2, 4]
    for row in rows:
        assert row["low"] <= row["ratio"] <= row["high"]
        assert row["ratio"] > 0.9


def test_what_was_recorded_is_what_the_keys_say(
    source: Source, finished: dict[float, list[Finished]]
) -> None:
    warm = finished[1.0]
    again = record(source, range(2), 1.0)
    assert [item.completion for item in again] == [item.completion for item in warm[:2]]
    keys = sequence_keys(item.completion.key for item in warm)
    assert len(keys.unique(dim=0)) == RESPONSES
    assert 0 < entropy(warm) < 5
