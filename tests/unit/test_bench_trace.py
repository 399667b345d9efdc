"""Whole rollouts under every tuner: the same tokens, and an oracle that knows the fastest trees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ratoon.bench import trace
from ratoon.bench.subject import Subject
from ratoon.bench.trace import Rollout, _arms, _best_trees, _Guessing, _if_it_fits, _row
from ratoon.config.speculation import Speculation
from ratoon.models.decoder import DecoderConfig
from ratoon.models.tiny import random_decoder
from ratoon.rollout.native.forward import InferenceModel
from ratoon.speculation.strategy import PLAIN, Strategy
from ratoon.speculation.tuner import RuleTuner, StepRecord

VOCAB, SIZE = 40, 6


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.setattr(trace, "MAX_TOKENS", 20)
    monkeypatch.setattr(trace, "GROUP_SIZE", 2)
    config = DecoderConfig("llama", VOCAB, 32, 64, 3, num_heads=4, num_kv_heads=2, head_dim=8)
    decoder = random_decoder(config, seed=0)
    return Subject(
        path=Path("tiny"),
        model=InferenceModel(decoder, num_positions=512, dtype=torch.float32),
        drafter=None,
        prompts=[(row % VOCAB, 3, 5) for row in range(30)],
        eos_ids=(1, 2),
        vocab_limit=VOCAB,
        settings=Speculation(drafters=("suffix",)),
        confirm=True,
    )


def test_all_arms_say_the_same_and_start_alike(subject: Subject) -> None:
    arms = _arms(subject, SIZE)
    assert list(arms) == ["plain", "cost_model", "bandit", "table", "oracle"]
    rollouts = {name: arm(1) for name, arm in arms.items()}
    expected = rollouts["plain"]
    assert len(expected.answers) == SIZE
    assert expected.tokens == sum(map(len, expected.answers.values()))
    assert expected.rows == expected.tokens
    for name, rollout in rollouts.items():
        assert rollout.answers == expected.answers, name
    assert arms["table"](1).rows == rollouts["table"].rows
    assert arms["plain"](2).answers != expected.answers


def test_the_oracle_takes_the_fastest_tree_of_each_live_batch(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock of its own: few are fastest with deep trees, many without any."""
    monkeypatch.setattr(trace, "_SHAPES", ((1, 1), (4, 4)))

    class Guess:
        def __call__(self, number: int, tuner: RuleTuner) -> Rollout:
            rollout = Rollout()
            for num_live in (5, 4, 3, 2, 1):
                tree = tuner.choose(num_live)
                seconds = {0: 1.0, 1: 0.9, 4: 0.1 * num_live**2}[tree.depth]
                rollout.steps.append(
                    StepRecord(tree, num_live, num_live, num_live, 0.1 * seconds, 0.9 * seconds)
                )
            return rollout

    best = _best_trees(subject, Guess(), 1)  # type: ignore[arg-type]
    assert {bits: tree.depth for bits, tree in best.items()} == {1: 4, 2: 4, 3: 1}


def test_a_tree_too_large_for_the_batch_is_left_out() -> None:
    tree = Strategy(depth=3, budget=12)
    assert _if_it_fits(tree, 9) == tree
    assert _if_it_fits(tree, 10) == _if_it_fits(PLAIN, 10) == PLAIN


def test_rows_compare_with_plain_decoding_in_the_same_round(subject: Subject) -> None:
    guess = _Guessing(subject, SIZE)
    rollouts = [guess(1, RuleTuner(lambda num_live: PLAIN))]
    row = _row(SIZE, "table", rollouts, {"plain": [4.0, 9.0, 6.0], "table": [2.0, 3.0, 3.0]})
    assert (row["seconds"], row["ratio"], row["low"], row["high"]) == (3.0, 2.0, 2.0, 3.0)
    assert row["tokens_per_row"] == 1.0
