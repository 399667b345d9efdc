"""What rollouts teach a worker: kept at a mark, given up when a step is abandoned."""

from __future__ import annotations

from pathlib import Path

from ratoon.cluster.rollout_unit import RolloutUnit
from ratoon.drafter.suffix import MIN_CAPACITY, SuffixDrafter
from ratoon.rollout.native.drafting import Drafting
from ratoon.speculation.strategy import Strategy, StrategyTable
from ratoon.speculation.tuner import TableTuner

ONE = ("sums", 1)


def make_unit() -> RolloutUnit:
    unit = object.__new__(RolloutUnit)
    suffix = SuffixDrafter(2, capacity=MIN_CAPACITY)
    unit.drafting = Drafting(num_rows=2, vocab_limit=99, max_nodes=4, suffix=suffix)
    unit._tuner = TableTuner(StrategyTable([(2, Strategy(depth=1))], slack=4))
    return unit


def teach(unit: RolloutUnit, token: int) -> None:
    """What a rollout does to all three parts."""
    assert unit.drafting is not None
    assert unit.drafting.suffix is not None
    assert unit._tuner is not None
    unit.drafting.suffix.add(ONE, [1, 2, 3], [token] * 9)
    unit.drafting.calibration._offsets += token
    unit._tuner.choose(token)


def saved(unit: RolloutUnit, path: Path) -> dict[str, bytes]:
    path.mkdir()
    unit.save(path / "rollout")
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_an_abandoned_step_leaves_what_was_known_before_it(tmp_path: Path) -> None:
    unit = make_unit()
    teach(unit, 1)
    before = saved(unit, tmp_path / "before")
    unit.mark()
    teach(unit, 7)
    after = saved(unit, tmp_path / "after")
    assert all(before[name] != after[name] for name in before)
    unit.abandon()
    assert saved(unit, tmp_path / "abandoned") == before
    other = make_unit()
    other.load(tmp_path / "after" / "rollout")
    assert saved(other, tmp_path / "loaded") == after
