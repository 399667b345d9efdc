"""The learning rate of each step, from its definition."""

from __future__ import annotations

import math

import pytest

from ratoon.training.lr_schedule import LearningRate


def test_warm_up_is_linear_and_reaches_the_peak_at_its_end() -> None:
    rate = LearningRate(2.0, 100, warmup_steps=4, schedule="constant")
    assert [rate.at(step) for step in range(6)] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 2.0])
    assert rate.at(99) == 2.0
    assert rate.decay_start == 100


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    for schedule in ("constant", "linear", "cosine", "wsd"):
        assert LearningRate(3.0, 10, schedule=schedule).at(0) == 3.0  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_begins_after_warm_up_and_would_end_at_the_rest(schedule: str) -> None:
    rate = LearningRate(1.0, 20, 4, schedule, final_frac=0.25)  # type: ignore[arg-type]
    assert rate.decay_start == 4
    rates = [rate.at(step) for step in range(4, 21)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 1.0
    # Half-way both shapes are half-way.
    assert rate.at(12) == pytest.approx(0.625)
    assert rate.at(20) == pytest.approx(0.25)


def test_a_cosine_is_a_cosine() -> None:
    rate = LearningRate(1.0, 8, schedule="cosine", final_frac=0.0)
    for step in range(8):
        assert rate.at(step) == pytest.approx(0.5 + 0.5 * math.cos(math.pi * step / 8))


def test_wsd_is_constant_and_falls_in_its_last_part() -> None:
    rate = LearningRate(1.0, 10, 2, "wsd", decay_frac=0.4, final_frac=0.0)
    assert rate.decay_start == 6
    assert [rate.at(step) for step in range(2, 7)] == [1.0] * 5
    assert [rate.at(step) for step in range(6, 10)] == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_a_decay_longer_than_what_warm_up_leaves_begins_after_warm_up() -> None:
    rate = LearningRate(1.0, 10, 5, "wsd", decay_frac=1.0)
    assert rate.decay_start == 5
    assert rate.at(5) == 1.0
