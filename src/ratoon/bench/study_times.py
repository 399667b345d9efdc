"""Seconds of an optimizer step in each stage of each arm, measured side by side.

Stages are those of the configuration, or the rungs that an adaptive schedule may climb.

A study runs for hours on a machine that others use too, so the time that its runs took says
little. What an arm costs is its steps of each stage times the median seconds of such a step,
measured in interleaved rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from ratoon.bench.intervals import median_interval
from ratoon.bench.study_arms import arm_config
from ratoon.bench.timing import interleaved
from ratoon.config.pretrain import PretrainConfig
from ratoon.est.adaptive import AdaptiveSchedule
from ratoon.est.schedule import Stage
from ratoon.est.subnetwork import Rates, Subnetwork
from ratoon.loop.pretrain_setup import decoder_config, evolution, make_decoder, open_data
from ratoon.models.compute_dtype import DTYPES
from ratoon.training.flat_weights import UpdateRule
from ratoon.training.pretrainer import Passes, Pretrainer

# Rounds of one step each; the first warms up.
STEPS_PER_ROUND = 3
_MANY_STEPS = 1000

# Of each arm, by stage: rates of layers, heads and neurons, and seconds of a step.
Times = dict[str, list[tuple[float, float, float, float]]]


def measure_times(arms: Sequence[str], data: Path, width: int, rounds: int) -> Times:
    """Median seconds of a step of each arm, by stage, for a model of `width`."""
    torch.set_num_threads(1)
    cases: dict[tuple[str, Rates], Callable[[int], float]] = {}
    for arm in arms:
        config = arm_config(
            arm,
            data,
            width=width,
            steps=_MANY_STEPS,
            lr=1e-6,
            seed=0,
            name="times",
            output_dir=Path(),
        )
        cases |= {(arm, rates): steps for rates, steps in _steps(config).items()}
    seconds = interleaved({str(number): case for number, case in enumerate(cases.values())}, rounds)
    times: Times = {}
    for (arm, rates), values in zip(cases, seconds.values(), strict=True):
        times.setdefault(arm, []).append((*rates.values, median_interval(values)["median"]))
    return times


def _steps(config: PretrainConfig) -> dict[Rates, Callable[[int], float]]:
    """For each stage a function that takes a few steps in it and returns the seconds of one."""
    data = open_data(config)
    model = decoder_config(config, data.train.header)
    batch = config.update.batch_tokens // config.data.sequence_length
    evolving = evolution(config, model, batch)
    trainer = Pretrainer(
        make_decoder(config, model),
        UpdateRule(),
        Passes(batch),
        shape=evolving.shape,
        freezes=config.evolve is None or config.evolve.unsampled == "freeze",
        compute_dtype=DTYPES[config.model.dtype],
    )
    sequences = data.train.sequences(data.order.take(0, batch))

    def at(rates: Rates) -> Callable[[int], float]:
        def draw(step: int, micro_batch: int, count: int) -> Subnetwork:
            return evolving.sampler.draw(rates, step, micro_batch, count)

        def steps(number: int) -> float:
            started = time.perf_counter()
            for place in range(STEPS_PER_ROUND):
                step = number * STEPS_PER_ROUND + place
                trainer.step(sequences, 1e-6, None if rates.is_full else partial(draw, step))
            return (time.perf_counter() - started) / STEPS_PER_ROUND

        return steps

    schedule = evolving.schedule
    if isinstance(schedule, AdaptiveSchedule):
        return {rates: at(rates) for rates in schedule.settings.ladder}
    return {stage.rates: at(stage.rates) for stage in schedule.stages}


def num_steps(
    config: PretrainConfig, times: Sequence[tuple[float, float, float, float]], seconds: float
) -> int:
    """Steps that fit into `seconds`, with stages at the configuration's shares of the run.

    An adaptive schedule is taken to climb evenly until its deadline, and its probes to be free: how
    long it really takes is known when it is done.
    """
    starts = _starts(config, len(times))
    shares = [end - start for start, end in zip(starts, [*starts[1:], 1.0], strict=True)]
    per_step = sum(share * each[-1] for share, each in zip(shares, times, strict=True))
    return round(seconds / per_step)


def _starts(config: PretrainConfig, count: int) -> list[float]:
    """Where each of `count` stages begins, as a share of the run."""
    if config.evolve is None:
        return [0.0]
    if config.evolve.adaptive is None:
        return [stage.start for stage in config.evolve.stages]
    last = config.evolve.adaptive.deadline_frac
    return [last * place / (count - 1) for place in range(count)]


def seconds_until(
    step: int, stages: Sequence[Stage], times: Sequence[tuple[float, float, float, float]]
) -> float:
    """Seconds of the first `step` steps of a run that went through `stages`."""
    by_rates = {Rates(*rates): seconds for *rates, seconds in times}
    ends = [stage.start for stage in stages[1:]]
    return sum(
        max(0, min(step, end) - stage.start) * by_rates[stage.rates]
        for stage, end in zip(stages, [*ends, step], strict=True)
    )
