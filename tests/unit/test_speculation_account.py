"""What is told of decode steps: tallies that add up, changes with their causes, seconds saved."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from ratoon.cli.explain import rollout_line
from ratoon.errors import DataError
from ratoon.observe.rollouts import RolloutRecord, WorkerSteps, read_rollouts
from ratoon.speculation.account import StepAccount, live_range
from ratoon.speculation.cost_model import CostModelTuner, Latency
from ratoon.speculation.strategy import PLAIN, Strategy
from ratoon.speculation.tuner import StepRecord, Tuner, never

TREE = Strategy(depth=2, branching=2, beam=2, budget=4, use_learned=False)
LARGEST = Strategy(depth=4, branching=3, beam=3, budget=8, cap=8)


def step(
    account: StepAccount, tuner: Tuner, strategy: Strategy, known: list[int], seconds: float
) -> None:
    """A step of `known[k]` sequences that got k tokens each; twice as many were drafted."""
    num_live = sum(known)
    tokens = sum(k * count for k, count in enumerate(known))
    account.chosen(strategy, num_live, tuner)
    record = StepRecord(strategy, num_live, num_live, tokens, 0.25 * seconds, 0.75 * seconds)
    account.made(record, 0 if strategy.is_plain else 2 * num_live, known)


class Priced:
    """Expects a plain step to take a second, and one that guesses a second and a half."""

    promise_budget = 0
    why = never().why

    def choose(self, num_live: int) -> Strategy:
        return PLAIN

    def observe(self, record: StepRecord) -> None: ...

    def seconds(self, strategy: Strategy, num_live: int) -> float | None:
        return 1.0 if strategy.is_plain else 1.5


def test_live_batches_are_tallied_by_doubling_ranges() -> None:
    ranges = [live_range(num_live) for num_live in (1, 2, 3, 4, 5, 8, 9, 64, 65)]
    assert ranges == [
        (1, 1), (2, 2), (3, 4), (3, 4), (5, 8), (5, 8), (9, 16), (33, 64), (65, 128)
    ]  # fmt: skip


def test_tallies_add_up_and_seconds_saved_follow_from_what_is_expected() -> None:
    account, tuner = StepAccount(), Priced()
    step(account, tuner, PLAIN, [0, 4], 1.0)
    step(account, tuner, TREE, [0, 1, 1, 2], 2.0)
    step(account, tuner, TREE, [1, 0, 0, 2], 1.0)
    step(account, tuner, TREE, [0, 0, 1], 0.5)
    steps = account.result(tuner)
    one, guessed, plain = steps.tallies[0], steps.tallies[1], steps.tallies[2]
    if guessed.tree == "plain":
        guessed, plain = plain, guessed
    assert one.live == (1, 1)
    assert (plain.tree, plain.steps, plain.tokens, plain.accepted) == ("plain", 1, 4, [])
    assert guessed.tree == "4 nodes, 2 levels, suffix"
    assert (guessed.steps, guessed.sequences, guessed.drafted) == (2, 7, 14)
    assert guessed.tokens == (1 + 2 + 6) + 6
    # Two tokens known: one drafted was right; three: both were.
    assert guessed.accepted == [1 + 2 + 2, 2 + 2]
    assert guessed.spent_s == pytest.approx(3.0)
    assert guessed.expected_s == pytest.approx(3.0)
    # Nine tokens of four sequences, then six of three: as many plain steps as tokens of each.
    assert guessed.plain_s == pytest.approx(9 / 4 + 6 / 3)
    assert steps.saved_s == pytest.approx(9 / 4 + 2 - 3.0 + 2 - 0.5)


def test_without_measured_times_nothing_is_said_to_be_saved() -> None:
    account, tuner = StepAccount(), never()
    step(account, tuner, PLAIN, [0, 2], 1.0)
    assert account.result(tuner).saved_s == 0
    account = StepAccount()
    step(account, tuner, TREE, [0, 2], 1.0)
    assert account.result(tuner).saved_s is None


def test_a_tuner_says_why_it_changed_and_probes_are_no_changes() -> None:
    """Guessing pays for two sequences and not for sixty-four; then the drafter fails."""

    def seconds(rows: int) -> float:
        return 0.010 + 0.001 * max(0, rows - 8)

    tuner = CostModelTuner(LARGEST, 128, Latency([(n, seconds(n)) for n in (1, 8, 16, 64, 128)]))
    account = StepAccount()
    for number in range(400):
        num_live = 64 if number < 100 else 2
        right = 0.0 if number >= 200 else 0.8
        strategy = tuner.choose(num_live)
        account.chosen(strategy, num_live, tuner)
        depths = [right * min(d, b) / 2 for d in range(1, 5) for b in range(1, 9)]
        promised = [depths[8 * d : 8 * d + 8] for d in range(4)]
        guesses = not strategy.is_plain
        rows = num_live * (1 + strategy.budget * guesses)
        record = StepRecord(
            strategy, num_live, rows, num_live, 0.002 * guesses, seconds(rows),
            expected=promised[3][7] * guesses, visited=promised[3][7] * guesses,
            promised=promised if guesses else (),
        )  # fmt: skip
        account.made(record, rows - num_live, [0, num_live])
        tuner.observe(record)
    steps = account.result(tuner)
    assert [change.guesses for change in steps.changes] == [True, False]
    on, off = steps.changes
    assert (on.step, on.live, on.cause) == (101, 2, "live batch")
    assert 200 < off.step < 320
    assert off.cause == "acceptance"
    assert "times the tokens for" in off.why
    assert steps.probes >= 3
    assert steps.num_changes == 2


def record(workers: list[WorkerSteps], off: str | None = None) -> RolloutRecord:
    return RolloutRecord(3, "train", 2.0, "invariant", "torch on a processor", off, workers)


def test_a_record_comes_back_from_its_line(tmp_path: Path) -> None:
    account, tuner = StepAccount(), Priced()
    step(account, tuner, TREE, [0, 1, 1], 2.0)
    written = record([account.result(tuner), WorkerSteps()])
    path = tmp_path / "rollouts.jsonl"
    assert list(read_rollouts(path)) == []
    path.write_text(json.dumps(asdict(written)) + "\n", encoding="utf-8")
    assert list(read_rollouts(path)) == [written]
    for wrong in ("[]", "[3]", '[{"changes": []}]', '[{"tallies": [{}], "changes": []}]'):
        line = json.dumps(asdict(written) | {"workers": json.loads(wrong)})
        path.write_text(line.replace("seconds", "minutes") if wrong == "[]" else line)
        with pytest.raises(DataError, match="line 1: is no record of a rollout"):
            list(read_rollouts(path))


def test_one_line_says_what_guessing_did_or_who_switched_it_off() -> None:
    account, tuner = StepAccount(), Priced()
    step(account, tuner, PLAIN, [0, 4], 1.0)
    plain = account.result(tuner)
    step(account, tuner, TREE, [0, 0, 4], 1.0)
    line = rollout_line(record([account.result(tuner)]))
    assert line == (
        "train 3: 2.0 s, saved 1.00 s of workers' time, guessed in 50% of 2 steps, "
        "8 tokens drafted, 4 accepted; switched on by rule 1 x"
    )
    only_plain = WorkerSteps(tallies=plain.tallies[:0], why="a reason")
    assert "off by the tuner" in rollout_line(record([only_plain]))
    by_whom = rollout_line(record([only_plain], off="the configuration: x is false"))
    assert by_whom == "train 3: 2.0 s, speculation off by the configuration: x is false"
