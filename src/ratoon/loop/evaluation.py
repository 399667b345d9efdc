"""Held-out evaluation: the same prompts and noise each time, so that differences are paired."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ratoon.config.rl import RLConfig
from ratoon.evals.statistics import standard_error
from ratoon.loop.order import make_groups
from ratoon.loop.recovery import replace_lost
from ratoon.loop.rl_step import rollout_record
from ratoon.loop.rollout import Rollout, RolloutResult
from ratoon.loop.run_context import RunContext
from ratoon.loop.scoring import Scorer
from ratoon.observe.completions import completions_path
from ratoon.observe.files import read_lines
from ratoon.observe.run_folder import RunFolder
from ratoon.records import SamplingParams, Stream


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Mean reward of each held-out prompt, in order, and the rollout that gave them."""

    rewards: tuple[float, ...]
    rollout: RolloutResult


def stored_rewards(folder: RunFolder, step: int, samples: int) -> tuple[float, ...] | None:
    """`EvalResult.rewards` of an evaluation from the run's folder; None if there was none."""
    path = completions_path(folder.completions, "eval", step)
    if not path.is_file():
        return None
    scores = [float(row["reward"]) for row in read_lines(path)]
    return _means(scores, samples)


def _means(scores: Sequence[float], samples: int) -> tuple[float, ...]:
    return tuple(
        statistics.fmean(scores[start : start + samples])
        for start in range(0, len(scores), samples)
    )


def evaluation_params(config: RLConfig) -> SamplingParams:
    """How held-out responses are drawn."""
    settings = config.evaluation.sampling.model_dump()
    if settings["temperature"] is None:
        settings["temperature"] = config.sampling.temperature
    settings["logit_bias"] = tuple(settings["logit_bias"].items())
    return SamplingParams(**settings)


def evaluate(run: RunContext, step: int) -> EvalResult:
    """Draw and score responses to the held-out prompts with the policy as it is served."""
    config, observer, clock = run.config, run.observer, run.observer.clock
    samples = config.evaluation.samples
    started = clock.now()
    groups = make_groups(
        run.held_out,
        seed=config.seed,
        stream=Stream.EVAL,
        round_index=0,
        group_size=samples,
        max_tokens=config.sampling.max_tokens,
        eos_ids=run.tokenizer.eos_ids,
        params=evaluation_params(config),
        stop_strings=config.sampling.stop_strings,
    )
    scorer = Scorer(
        run.pool, run.tokenizer, run.held_out, keep_stop_string=config.sampling.keep_stop_string
    )
    rollout = Rollout(
        run.workers,
        observer,
        run.ledger,
        run.planner_memory,
        kind=config.rollout.planner,
        slots=config.rollout.max_batch,
        step=step,
        on_response=scorer.submit,
        activity="evaluation",
        stop=run.stop,
        on_lost=partial(replace_lost, run),
    ).run(groups)
    with run.stop.at_any_moment():
        results = scorer.results(rollout.completions)
    rewards = _means([result.score for result in results], samples)
    observer.rollout(rollout_record(run, rollout, "eval", step))
    observer.completions("eval", step, scorer.records(rollout.completions, results))
    observer.metrics(
        step,
        {
            "eval/reward": statistics.fmean(rewards),
            "eval/reward_stderr": standard_error(rewards),
            "eval/tokens_mean": statistics.fmean(len(c.token_ids) for c in rollout.completions),
            "time/evaluation_s": clock.now() - started,
        },
    )
    return EvalResult(rewards, rollout)
