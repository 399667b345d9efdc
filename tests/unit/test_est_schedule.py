"""Stages: order, growth, boundaries."""

from __future__ import annotations

import pytest

from ratoon.errors import ConfigError
from ratoon.est.schedule import PRESETS, Stage, StagedSchedule, StagePart
from ratoon.est.subnetwork import Rates

HALVES, WIDTH, FULL = Rates(0.5, 0.5, 0.5), Rates(1, 0.5, 0.5), Rates()


def test_each_step_belongs_to_the_stage_that_started_last() -> None:
    schedule = StagedSchedule((Stage(0, HALVES), Stage(20, WIDTH), Stage(70, FULL)), 150)
    assert [schedule.index(step) for step in (0, 19, 20, 69, 70, 149)] == [0, 0, 1, 1, 2, 2]
    assert schedule.at(69).rates == WIDTH


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((), "first must start at 0"),
        ((Stage(3, FULL),), "first must start at 0"),
        ((Stage(0, HALVES), Stage(50, WIDTH), Stage(20, FULL)), "must start later"),
        ((Stage(0, HALVES), Stage(0, FULL)), "must start later"),
        ((Stage(0, HALVES), Stage(100, FULL)), "before the end"),
        ((Stage(0, WIDTH), Stage(10, Rates(0.5, 1, 1)), Stage(20, FULL)), "never shrinks"),
        ((Stage(0, HALVES), Stage(10, WIDTH)), "whole model"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(stages: tuple[Stage, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StagedSchedule(stages, 100)


def test_growth_after_the_rate_begins_to_decay_is_refused() -> None:
    schedule = StagedSchedule((Stage(0, HALVES), Stage(70, FULL)), 150)
    schedule.require_growth_before(70)
    with pytest.raises(ConfigError, match="step 69"):
        schedule.require_growth_before(69)


def test_presets_save_what_the_paper_reports_for_the_layers() -> None:
    for name, saving in (("gpt2_reconstructed", 4 / 15), ("tinyllama_reconstructed", 1 / 4)):
        schedule = StagedSchedule.of(PRESETS[name], 60_000)
        bounds = [*(stage.start for stage in schedule.stages), schedule.total_steps]
        cost = sum(
            (bounds[place + 1] - bounds[place]) * stage.rates.layers * stage.rates.heads
            for place, stage in enumerate(schedule.stages)
        )
        assert 1 - cost / schedule.total_steps == pytest.approx(saving)


def test_a_run_too_short_for_its_fractions_is_refused() -> None:
    with pytest.raises(ConfigError, match="round fractions together"):
        StagedSchedule.of(PRESETS["gpt2_reconstructed"], 3)
    with pytest.raises(ConfigError, match=r"\[0, 1\)"):
        StagedSchedule.of((StagePart(1.0, FULL),), 3)
