"""Seconds of an optimizer step in each stage of each arm, measured side by side.

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
from ratoon.est.subnetwork import Subnetwork
from ratoon.loop.pretrain_setup import decoder_config, evolution, make_decoder, open_data
from ratoon.training.flat_weights import UpdateRule
from ratoon.training.pretrainer import Passes, Pretrainer

# Rounds of one step each; the first warms up.
STEPS_PER_ROUND = 3
_MANY_STEPS = 1000

Times = dict[str, list[float]]


def measure_times(arms: Sequence[str], data: Path, rounds: int) -> Times:
    """Median seconds of a step of each arm, by stage."""
    torch.set_num_threads(1)
    cases: dict[str, Callable[[int], float]] = {}
    for arm in arms:
        config = arm_config(
            arm, data, steps=_MANY_STEPS, lr=1e-6, seed=0, name="times", output_dir=Path()
        )
        cases |= {f"{arm}/{stage}": step for stage, step in enumerate(_steps(config))}
    seconds = interleaved(cases, rounds)
    times: Times = {}
    for case, values in seconds.items():
        times.setdefault(case.partition("/")[0], []).append(median_interval(values)["median"])
    return times


def _steps(config: PretrainConfig) -> list[Callable[[int], float]]:
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
        compute_dtype=getattr(torch, config.model.dtype),
    )
    sequences = data.train.sequences(data.order.take(0, batch))

    def in_stage(start: int) -> Callable[[int], float]:
        rates = evolving.schedule.at(start).rates

        def draw(step: int, micro_batch: int, count: int) -> Subnetwork:
            return evolving.sampler.draw(rates, step, micro_batch, count)

        def steps(number: int) -> float:
            started = time.perf_counter()
            for place in range(STEPS_PER_ROUND):
                step = number * STEPS_PER_ROUND + place
                trainer.step(sequences, 1e-6, None if rates.is_full else partial(draw, step))
            return (time.perf_counter() - started) / STEPS_PER_ROUND

        return steps

    return [in_stage(stage.start) for stage in evolving.schedule.stages]


def num_steps(config: PretrainConfig, seconds_by_stage: Sequence[float], seconds: float) -> int:
    """Steps that fit into `seconds`, with stages at the configuration's shares of the run."""
    starts = [0.0] if config.evolve is None else [stage.start for stage in config.evolve.stages]
    shares = [end - start for start, end in zip(starts, [*starts[1:], 1.0], strict=True)]
    per_step = sum(share * each for share, each in zip(shares, seconds_by_stage, strict=True))
    return round(seconds / per_step)


def seconds_until(config: PretrainConfig, seconds_by_stage: Sequence[float], step: int) -> float:
    """Seconds of the first `step` steps."""
    starts = (
        [0]
        if config.evolve is None
        else [round(stage.start * config.steps) for stage in config.evolve.stages]
    )
    ends = [*starts[1:], config.steps]
    return sum(
        max(0, min(step, end) - start) * each
        for start, end, each in zip(starts, ends, seconds_by_stage, strict=True)
    )
