"""Tuners on a simulated machine and drafter: no clock is read, so nothing here depends on speed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ratoon.errors import ConfigError
from ratoon.speculation.bandit import BanditTuner
from ratoon.speculation.cost_model import CostModelTuner, Gains, Latency
from ratoon.speculation.promise import promised_visits
from ratoon.speculation.strategy import PLAIN, Strategy, StrategyTable
from ratoon.speculation.tuner import StatefulTuner, StepRecord, TableTuner, Tuner

LARGEST = Strategy(depth=4, branching=4, beam=4, budget=12)
MAX_ROWS = 128
SIZES = [2**power for power in range(8)]
Seconds = Callable[[int], float]


def flat(rows: int) -> float:
    """Verification that is nearly free up to 32 rows, then not."""
    return 0.040 + 0.0002 * rows + 0.001 * max(0, rows - 32)


def steep(rows: int) -> float:
    """Every row costs as much as the first."""
    return 0.020 + 0.009 * rows


class Machine:
    """Runs a tuner's strategies. The drafter's nodes are right with `chances`, level by level.

    It promises `overstated` times as many visits.
    """

    def __init__(
        self,
        verify: Seconds,
        chances: list[float],
        draft_s: float = 0.002,
        overstated: float = 1.0,
    ) -> None:
        self.verify, self.chances, self.draft_s = verify, chances, draft_s
        self.overstated = overstated
        self.source = random.Random(0)

    def step(self, tuner: Tuner, num_live: int) -> tuple[float, float]:
        """Tokens and seconds of one step."""
        strategy = tuner.choose(num_live)
        if strategy.is_plain:
            seconds = self.verify(num_live)
            tuner.observe(StepRecord(strategy, num_live, num_live, num_live, 0.0, seconds))
            return num_live, seconds
        kept = [c for c in self.chances[: strategy.budget] if c >= strategy.min_chance]
        kept = kept[: strategy.depth]
        visited = (
            sum(self.source.random() < chance for chance in kept for _ in range(num_live))
            / num_live
        )
        tokens = num_live * (1 + visited)
        draft_s = strategy.depth * self.draft_s
        rows = num_live * (1 + len(kept))
        record = StepRecord(
            strategy,
            num_live,
            rows,
            int(tokens),
            draft_s,
            self.verify(rows),
            expected=self.overstated * sum(kept),
            visited=visited,
            promised=[
                [
                    self.overstated * sum(self.chances[: min(budget, depth)])
                    for budget in range(1, LARGEST.budget + 1)
                ]
                for depth in range(1, strategy.depth + 1)
            ],
        )
        tuner.observe(record)
        return tokens, draft_s + self.verify(rows)

    def rate(self, tuner: CostModelTuner, num_live: int, steps: int) -> float:
        """Tokens per second over some steps."""
        made = [self.step(tuner, num_live) for _ in range(steps)]
        return sum(tokens for tokens, _ in made) / sum(seconds for _, seconds in made)

    def best_fixed(self, num_live: int) -> float:
        """Tokens per second of the best tree of one path, known to an oracle."""
        best = num_live / self.verify(num_live)
        for depth in range(1, LARGEST.depth + 1):
            if num_live * (depth + 1) <= MAX_ROWS:
                tokens = num_live * (1 + sum(self.chances[:depth]))
                seconds = self.verify(num_live * (depth + 1)) + depth * self.draft_s
                best = max(best, tokens / seconds)
        return best


def make_tuner(verify: Seconds, *, shared: bool = False) -> CostModelTuner:
    largest = replace(LARGEST, cap=LARGEST.budget) if shared else LARGEST
    return CostModelTuner(largest, MAX_ROWS, Latency([(size, verify(size)) for size in SIZES]))


GOOD = [0.9, 0.8, 0.7, 0.6]
FAIR = [0.6, 0.35, 0.2, 0.1]
POISONED = [0.0] * 4


@pytest.mark.parametrize("verify", [flat, steep], ids=["flat", "steep"])
@pytest.mark.parametrize("chances", [GOOD, FAIR], ids=["good", "fair"])
@pytest.mark.parametrize("num_live", [1, 4, 16, 60])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_it_comes_near_the_best_fixed_tree(
    verify: Seconds, chances: list[float], num_live: int, shared: bool
) -> None:
    machine, tuner = Machine(verify, chances), make_tuner(verify, shared=shared)
    machine.rate(tuner, num_live, 50)
    assert machine.rate(tuner, num_live, 300) > 0.93 * machine.best_fixed(num_live)


@pytest.mark.parametrize("verify", [flat, steep], ids=["flat", "steep"])
@pytest.mark.parametrize("num_live", [1, 4, 16, 64])
def test_a_poisoned_drafter_costs_next_to_nothing(verify: Seconds, num_live: int) -> None:
    machine, tuner = Machine(verify, POISONED), make_tuner(verify)
    machine.rate(tuner, num_live, 50)
    assert machine.rate(tuner, num_live, 500) > 0.95 * num_live / verify(num_live)


def test_it_recovers_when_the_drafter_improves_and_stops_when_it_fails() -> None:
    machine, tuner = Machine(flat, POISONED), make_tuner(flat)
    machine.rate(tuner, 4, 200)
    assert tuner.choose(4) == PLAIN
    machine.chances = GOOD
    machine.rate(tuner, 4, 600)
    assert machine.rate(tuner, 4, 100) > 0.9 * machine.best_fixed(4)
    machine.chances = POISONED
    machine.rate(tuner, 4, 200)
    assert machine.rate(tuner, 4, 300) > 0.95 * 4 / flat(4)


def test_it_follows_a_machine_that_becomes_another() -> None:
    machine, tuner = Machine(flat, FAIR), make_tuner(flat)
    machine.rate(tuner, 16, 100)
    machine.verify = steep
    machine.rate(tuner, 16, 300)
    assert machine.rate(tuner, 16, 300) > 0.9 * machine.best_fixed(16)


@pytest.mark.parametrize("verify", [flat, steep], ids=["flat", "steep"])
def test_the_tail_is_met_with_larger_trees_at_once(verify: Seconds) -> None:
    """Many live sequences leave no room for large trees; few have it, and not for long."""
    machine, tuner = Machine(verify, GOOD), make_tuner(verify, shared=True)
    machine.rate(tuner, 60, 300)
    for num_live in (30, 8, 2, 1):
        assert machine.rate(tuner, num_live, 30) > 0.85 * machine.best_fixed(num_live)


def test_a_step_that_found_no_drafter_tells_of_no_gain() -> None:
    tuner = make_tuner(flat)
    tuner.observe(StepRecord(LARGEST, 4, 4, 4, 0.001, flat(4)))
    machine = Machine(flat, GOOD)
    machine.rate(tuner, 4, 20)
    assert machine.rate(tuner, 4, 100) > 0.9 * machine.best_fixed(4)


def test_an_interrupted_step_changes_little() -> None:
    tuner = make_tuner(flat)
    tuner.observe(StepRecord(PLAIN, 4, 4, 4, 0.0, 60.0))
    machine = Machine(flat, GOOD)
    machine.rate(tuner, 4, 20)
    assert machine.rate(tuner, 4, 100) > 0.9 * machine.best_fixed(4)


def test_all_sequences_together_stay_below_the_most_rows() -> None:
    machine, tuner = Machine(lambda rows: 0.04, GOOD), make_tuner(lambda rows: 0.04)
    for num_live in (1, 7, 30, 60, 64, 65, 200):
        for _ in range(100):
            strategy = tuner.choose(num_live)
            assert strategy.is_plain or num_live * (strategy.budget + 1) <= MAX_ROWS
            machine.step(tuner, num_live)


def test_latencies_lie_between_what_was_measured() -> None:
    latency = Latency([(1, 1.0), (4, 2.0), (8, 6.0)])
    assert [latency(size) for size in (1, 4, 6, 8)] == [1.0, 2.0, 4.0, 6.0]
    assert latency(2) == pytest.approx(1 + 1 / 3)
    assert latency(10) == pytest.approx(8.0)
    for _ in range(200):
        latency.observe(4, 3.0)
    assert latency(4) == pytest.approx(3.0, rel=1e-3)
    assert 1.0 < latency(1) < 1.5


def test_a_step_tells_of_all_smaller_trees_and_bounds_larger_ones() -> None:
    gains = Gains(budget=4, depth=3)
    strategy = Strategy(depth=2, budget=2)
    promised = [[0.8, 0.9, 0.9, 0.9], [0.8, 1.4, 1.5, 1.5]]
    for _ in range(600):
        record = StepRecord(strategy, 8, 24, 8, 0.0, 0.0, 1.4, 1.4, promised)
        gains.observe(record)
    for depth, budget, expected in ((1, 1, 0.8), (1, 2, 0.9), (2, 1, 0.8), (2, 2, 1.4)):
        assert gains.expected(budget, depth) == pytest.approx(expected, abs=0.01)
    # A third node may gain what the second did, and is hoped to gain four fifths of that.
    assert gains.expected(3, 2) == pytest.approx(1.4 + 0.8 * 0.6, abs=0.02)
    assert gains.expected(3, 1) == pytest.approx(0.9 + 0.8 * 0.1, abs=0.02)
    assert gains.expected(2, 3) == pytest.approx(1.4 + 0.8 * 0.5, abs=0.02)
    # Promises that come true by half are worth half.
    for _ in range(600):
        gains.observe(StepRecord(strategy, 8, 24, 8, 0.0, 0.0, 1.4, 0.7, promised))
    assert gains.expected(2, 2) == pytest.approx(0.7, abs=0.01)


def test_promises_are_sums_over_the_best_candidates_of_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    levels = [torch.rand(3, count, generator=generator) for count in (2, 4, 4)]
    promised = promised_visits(levels, depth=4, budget=5)
    for depth in range(1, 5):
        chances = torch.cat([level.flatten() for level in levels[:depth]]).sort(descending=True)
        for budget in range(1, 6):
            expected = chances.values[: 3 * budget].sum() / 3
            assert promised[depth - 1, budget - 1] == pytest.approx(float(expected), rel=1e-5)


def test_a_drafter_that_promises_too_much_is_not_believed() -> None:
    machine = Machine(steep, [0.3, 0.1, 0.0, 0.0], overstated=3.0)
    tuner = make_tuner(steep)
    machine.rate(tuner, 16, 200)
    assert machine.rate(tuner, 16, 300) > 0.95 * machine.best_fixed(16)


def test_a_table_goes_by_the_live_batch_alone() -> None:
    deep = Strategy(depth=2)
    tuner = TableTuner(StrategyTable([(2, deep)], slack=1))
    assert [tuner.choose(n) for n in (5, 2, 3, 4, 3)] == [PLAIN, deep, deep, PLAIN, PLAIN]


DEEP, WIDE = Strategy(depth=4, budget=8), Strategy(depth=1, budget=8)
SMALL = Strategy(depth=1, branching=1, beam=1, budget=1)


def play(
    tuner: BanditTuner, num_live: int, rates: dict[Strategy, float], steps: int
) -> list[Strategy]:
    """Steps whose tokens per second depend on the arm alone."""
    taken = []
    for _ in range(steps):
        arm = tuner.choose(num_live)
        taken.append(arm)
        seconds = 100 / rates.get(arm, 1.0)
        tuner.observe(StepRecord(arm, num_live, num_live, 100, 0.2 * seconds, 0.8 * seconds))
    return taken


def test_a_bandit_finds_the_best_arm_of_its_bucket_and_keeps_exploring() -> None:
    tuner = BanditTuner([(4, [DEEP, WIDE]), (16, [SMALL])], window=20)
    taken = play(tuner, 3, {DEEP: 50.0, WIDE: 80.0}, 400)
    assert taken[:2] == [DEEP, WIDE]
    assert 0.9 < taken.count(WIDE) / 400 < 0.99
    assert set(play(tuner, 4, {}, 50)) == {DEEP, WIDE}
    assert set(play(tuner, 5, {}, 50)) == {SMALL}
    assert set(play(tuner, 17, {}, 50)) == {PLAIN}


def test_a_bandit_recovers_from_a_change() -> None:
    tuner = BanditTuner([(4, [DEEP, WIDE])], window=20)
    play(tuner, 1, {DEEP: 50.0, WIDE: 80.0}, 100)
    play(tuner, 1, {DEEP: 90.0, WIDE: 80.0}, 400)
    assert play(tuner, 1, {DEEP: 90.0, WIDE: 80.0}, 100).count(DEEP) > 85


@pytest.mark.parametrize(
    ("groups", "options", "words"),
    [
        ([(4, [DEEP]), (4, [WIDE])], {}, "ascending"),
        ([(4, [])], {}, "no arms"),
        ([(4, [DEEP])], {"epsilon": 1.5}, "epsilon"),
        ([(4, [DEEP])], {"window": 0}, "window"),
    ],
)
def test_a_bandit_that_cannot_choose_is_refused(
    groups: list[tuple[int, list[Strategy]]], options: dict[str, float], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        BanditTuner(groups, **options)


def make_bandit() -> BanditTuner:
    return BanditTuner([(4, [DEEP, WIDE]), (64, [SMALL, WIDE])], window=20)


def make_table() -> TableTuner:
    return TableTuner(StrategyTable([(2, DEEP), (32, SMALL)], slack=6))


@pytest.mark.parametrize("make", [lambda: make_tuner(steep), make_bandit, make_table])
def test_a_tuner_goes_on_from_its_state_as_if_it_had_not_been_interrupted(
    make: Callable[[], StatefulTuner],
) -> None:
    batches = [abs(40 - index // 4) + 1 for index in range(320)]
    machine, whole = Machine(steep, FAIR), make()
    choices = [chosen(machine, whole, num_live) for num_live in batches]
    for cut in (1, 77, 150, 300):
        machine, first, second = Machine(steep, FAIR), make(), make()
        before = [chosen(machine, first, num_live) for num_live in batches[:cut]]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert second.state_dict() == first.state_dict()
        after = [chosen(machine, second, num_live) for num_live in batches[cut:]]
        assert before + after == choices
    # Without its state it would have chosen otherwise, or the test is void.
    machine, forgetful = Machine(steep, FAIR), make()
    assert [chosen(machine, forgetful, num_live) for num_live in batches[300:]] != choices[300:]


def chosen(machine: Machine, tuner: StatefulTuner, num_live: int) -> Strategy:
    """What the tuner chooses for a step, which it then learns from."""
    taken: list[Strategy] = []

    class Noting:
        promise_budget = tuner.promise_budget

        def choose(self, num_live: int) -> Strategy:
            taken.append(tuner.choose(num_live))
            return taken[-1]

        def observe(self, record: StepRecord) -> None:
            tuner.observe(record)

    machine.step(Noting(), num_live)
    return taken[0]
