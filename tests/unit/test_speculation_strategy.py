"""Strategies: checked when made, chosen by live batch."""

from __future__ import annotations

import pytest

from ratoon.errors import ConfigError
from ratoon.speculation.strategy import (
    PLAIN,
    RandomStrategies,
    Strategy,
    StrategyTable,
)

DEEP = Strategy(depth=4)
SHALLOW = Strategy(depth=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("depth", -1),
        ("depth", 99),
        ("branching", 0),
        ("beam", 0),
        ("budget", 0),
        ("min_chance", 0.0),
        ("min_chance", 1.0),
    ],
)
def test_a_value_out_of_range_is_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field}={value}"):
        Strategy(**{"depth": 2, field: value})


def test_drafting_needs_a_drafter() -> None:
    with pytest.raises(ConfigError, match="use_learned"):
        Strategy(depth=1, use_learned=False, use_suffix=False)


def test_a_budget_must_reach_the_depth() -> None:
    with pytest.raises(ConfigError, match="budget=3"):
        Strategy(depth=4, budget=3)


def test_plain_drafts_nothing() -> None:
    assert PLAIN.is_plain
    assert not DEEP.is_plain


def test_the_table_gives_each_batch_its_tier_and_plain_above() -> None:
    table = StrategyTable([(2, DEEP), (8, SHALLOW)])
    chosen = [table.pick(batch, 0)[0] for batch in (1, 2, 3, 8, 9, 500)]
    assert chosen == [DEEP, DEEP, SHALLOW, SHALLOW, PLAIN, PLAIN]


def test_a_batch_that_hovers_about_a_border_does_not_switch() -> None:
    table = StrategyTable([(2, DEEP), (8, SHALLOW)], slack=1)
    strategy, state = table.pick(8, 0)
    assert strategy == SHALLOW
    for batch in (9, 8, 9):
        strategy, state = table.pick(batch, state)
        assert strategy == SHALLOW
    strategy, state = table.pick(10, state)
    assert strategy == PLAIN
    strategy, state = table.pick(9, state)
    assert strategy == PLAIN
    for batch in (8, 9, 8, 9):
        strategy, state = table.pick(batch, state)
        assert strategy == SHALLOW


def test_hysteresis_ends_when_the_last_rows_finish() -> None:
    table = StrategyTable([(1, DEEP)], slack=3)
    state = table.pick(6, 0)[1]
    chosen = []
    for batch in (5, 4, 3, 2, 1):
        strategy, state = table.pick(batch, state)
        chosen.append(strategy)
    assert chosen[-1] == DEEP


def test_an_empty_table_is_always_plain() -> None:
    assert StrategyTable([]).pick(1, 0)[0] == PLAIN


@pytest.mark.parametrize("limits", [(0,), (4, 4), (5, 2), (-1,)])
def test_thresholds_must_ascend(limits: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="ascending"):
        StrategyTable([(limit, DEEP) for limit in limits])


def test_random_switching_is_a_function_of_seed_and_step() -> None:
    def run(seed: int) -> list[Strategy]:
        picker, state, chosen = RandomStrategies([PLAIN, DEEP, SHALLOW], seed), 0, []
        for _ in range(30):
            strategy, state = picker.pick(3, state)
            chosen.append(strategy)
        return chosen

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert set(run(1)) == {PLAIN, DEEP, SHALLOW}
