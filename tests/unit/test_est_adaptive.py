"""Adaptive growth: what it decides from, its bounds, and its replay."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from ratoon.errors import CheckpointError, ConfigError
from ratoon.est.adaptive import AdaptiveSchedule, AdaptiveSettings, PowerLaw, ladder, loss_slope
from ratoon.est.subnetwork import Rates

HALVES = Rates(0.5, 0.5, 0.5)
COSTS = (1.0, 2.0, 4.0)


def _settings(**changes: Any) -> AdaptiveSettings:
    values: dict[str, Any] = {
        "ladder": ladder(HALVES, 0.5), "total_steps": 200, "deadline": 150, "min_steps": 10,
        "max_steps": 100, "check_every": 5, "window": 8,
    }  # fmt: skip
    return AdaptiveSettings(**(values | changes))


class _Training:
    """A run whose losses and slopes are functions of the step and of a seed."""

    def __init__(self, schedule: AdaptiveSchedule, seed: int = 0) -> None:
        self.schedule, self.seed, self.flops = schedule, seed, 0.0
        self.rates: list[Rates] = []

    def run(self, steps: range, slope: Callable[[int, int], float] | None = None) -> None:
        for step in steps:
            source = random.Random(self.seed * 1000 + step)
            found = {
                rung: source.uniform(0, 0.02) if slope is None else slope(step, rung)
                for rung in self.schedule.asks(step)
            }
            if found:
                self.schedule.observe_probe(7.0, 0.5)
            self.rates.append(self.schedule.decide(step, found).rates)
            self.flops += COSTS[self.schedule.rung]
            self.schedule.observe(5.0 - 0.01 * step + source.gauss(0, 0.01), self.flops)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_losses_a_schedule_never_shrinks_keeps_its_bounds_and_ends_dense(
    seed: int,
) -> None:
    settings = _settings()
    training = _Training(AdaptiveSchedule(settings), seed)
    training.run(range(200))
    assert all(b.covers(a) for a, b in itertools.pairwise(training.rates))
    assert training.rates[150:] == [Rates()] * 50
    stages = training.schedule.stages
    assert all(a.start + 10 <= b.start for a, b in itertools.pairwise(stages))
    assert all(b.start - a.start <= 100 for a, b in itertools.pairwise(stages))


@pytest.mark.parametrize("seed", range(5))
def test_the_log_replays_exactly(seed: int) -> None:
    one, other = (_Training(AdaptiveSchedule(_settings()), seed) for _ in range(2))
    one.run(range(200))
    other.run(range(200))
    assert one.schedule.log == other.schedule.log
    replayed = one.schedule.replayed()
    assert [replayed.at(step).rates for step in range(200)] == one.rates
    replayed.require_growth_before(150)


def test_a_resumed_schedule_decides_the_same() -> None:
    whole = _Training(AdaptiveSchedule(_settings()))
    whole.run(range(200))
    for border in (7, 40, 111, 180):
        first = _Training(AdaptiveSchedule(_settings()))
        first.run(range(border))
        second = _Training(AdaptiveSchedule(_settings()))
        second.schedule.load_state_dict(json.loads(json.dumps(first.schedule.state_dict())))
        second.flops = first.flops
        second.run(range(border, 200))
        assert second.schedule.log == whole.schedule.log
        assert first.rates + second.rates == whole.rates
        assert second.schedule.probe_flops == whole.schedule.probe_flops


def test_it_grows_as_soon_as_a_larger_subnetwork_falls_faster_and_no_sooner() -> None:
    # The own slope is 0.01 nats a step, 0.01 per operation on the first rung.
    training = _Training(AdaptiveSchedule(_settings()))
    training.run(range(60), lambda step, rung: 0.02 if step >= 33 and rung == 1 else 0.001)
    assert [stage.start for stage in training.schedule.stages] == [0, 35]
    reasons = [decision.reason for decision in training.schedule.log]
    assert reasons[:6] == ["stay"] * 5 + ["slope"]


def test_it_jumps_to_the_end_where_that_falls_fastest() -> None:
    training = _Training(AdaptiveSchedule(_settings()))
    training.run(range(30), lambda step, rung: 0.02 * rung)
    assert [stage.rates for stage in training.schedule.stages] == [HALVES, Rates()]


def test_a_margin_asks_for_more() -> None:
    training = _Training(AdaptiveSchedule(_settings(margin=3.0)))
    training.run(range(60), lambda step, rung: 0.02)
    assert len(training.schedule.stages) == 1


def test_bounds_force_growth_with_their_reason() -> None:
    training = _Training(AdaptiveSchedule(_settings(max_steps=60)))
    training.run(range(200), lambda step, rung: 0.0)
    grown = [(d.step, d.reason) for d in training.schedule.log if d.reason != "stay"]
    assert grown == [(60, "longest"), (120, "longest")]
    training = _Training(AdaptiveSchedule(_settings()))
    training.run(range(200), lambda step, rung: 0.0)
    grown = [(d.step, d.reason) for d in training.schedule.log if d.reason != "stay"]
    assert grown == [(100, "longest"), (150, "deadline")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ladder": (Rates(), HALVES)}, "larger than the one before"),
        ({"ladder": (HALVES, Rates(1, 0.5, 0.5))}, "must end at"),
        ({"deadline": 200}, "deadline"),
        ({"min_steps": 200, "max_steps": 300}, "beyond the deadline"),
        ({"min_steps": 20, "max_steps": 10}, "first number"),
        ({"window": 1}, "window"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _settings(**changes)


def test_a_log_of_another_ladder_is_refused() -> None:
    training = _Training(AdaptiveSchedule(_settings()))
    training.run(range(200))
    other = AdaptiveSchedule(_settings(ladder=(HALVES, Rates())))
    with pytest.raises(CheckpointError, match="ladder"):
        other.load_state_dict(training.schedule.state_dict())
    with pytest.raises(ConfigError, match="whole model"):
        AdaptiveSchedule(_settings()).replayed()


def test_a_ladder_grows_layers_first_by_the_quantum() -> None:
    assert ladder(HALVES, 0.5) == (HALVES, Rates(1, 0.5, 0.5), Rates())
    rungs = ladder(Rates(0.5, 0.75, 0.6), 0.25)
    assert [rung.values for rung in rungs] == [
        (0.5, 0.75, 0.6), (0.75, 0.75, 0.6), (1.0, 0.75, 0.6), (1.0, 1.0, 0.85), (1.0, 1.0, 1.0)
    ]  # fmt: skip


def test_slopes_are_falls_per_operation() -> None:
    assert loss_slope([(0.0, 5.0)]) is None
    assert loss_slope([(1.0, 5.0), (1.0, 4.0)]) is None
    assert loss_slope([(2.0, 5.0), (4.0, 4.0), (6.0, 3.0)]) == pytest.approx(0.5)


def test_a_power_law_is_found_and_gives_the_slope_where_it_passes_a_loss() -> None:
    law = PowerLaw(2.0, 30.0, 0.3)
    flops = [10.0 * 2**power for power in range(12)]
    losses = [2.0 + 30.0 * each**-0.3 for each in flops]
    found = PowerLaw.fit(flops, losses)
    for at, loss in zip(flops[2:-2], losses[2:-2], strict=True):
        expected = 0.3 * 30.0 * at**-1.3
        assert law.slope_at(loss) == pytest.approx(expected)
        assert found.slope_at(loss) == pytest.approx(expected, rel=0.05)
    assert law.slope_at(1.5) == 0.0
    with pytest.raises(ConfigError, match="four points"):
        PowerLaw.fit([1.0, 2.0], [3.0, 2.0])
