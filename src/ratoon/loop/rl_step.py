"""One RL step from top to bottom: draw, score, compare, update, serve."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ratoon.cluster.messages import SpotResult
from ratoon.loop.drawing import Drawn, Round, joined
from ratoon.loop.learning import learning_metrics, make_samples, with_advantages
from ratoon.loop.order import Group, make_groups, next_prompts
from ratoon.loop.recovery import replace_lost
from ratoon.loop.rollout import Rollout, RolloutResult, train_drafter_steps
from ratoon.loop.run_context import RunContext
from ratoon.loop.scoring import Scorer
from ratoon.observe.completions import Split
from ratoon.observe.provenance import kernels
from ratoon.observe.rollouts import RolloutRecord
from ratoon.observe.sinks import Values
from ratoon.observe.timeline import Activity
from ratoon.records import SamplingParams, Stream
from ratoon.rl.dynamic_sampling import DynamicSampling
from ratoon.rl.rewards.pool import RewardResult


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A step's rollout, the groups of each of its rounds, and its times in seconds."""

    rollout: RolloutResult
    rounds: tuple[tuple[Group, ...], ...]
    rollout_s: float
    reward_s: float
    update_s: float
    weights_s: float
    total_s: float


def rl_step(run: RunContext, step: int) -> StepOutcome:
    """Do step `step` (from 1) and report it.

    Raises: Stopped before anything of the policy has changed; once that begins, the step is done to
    its end.
    """
    config, observer, clock = run.config, run.observer, run.observer.clock
    started = clock.now()
    version = run.ledger.drafter
    drawn = draw_groups(run, step)
    rollout = joined([part.rollout for part in drawn.rounds])
    scored = clock.now()
    sessions = rollout.spot
    if run.has_drafter and config.spot.deterministic_steps is not None:
        sessions = (train_drafter_steps(run.workers, run.ledger),)
    update_started = clock.now()
    completions, rewards = drawn.learned()
    samples = make_samples(completions, config.algorithm)
    divergences = None
    if config.algorithm.penalises_rewards:
        divergences = run.workers.call_all("divergences", samples=samples)[0]
    samples = with_advantages(samples, rewards, config.algorithm, divergences)
    updates = run.workers.call_all("update_policy", samples=samples)
    updated = clock.now()
    add_spans(run, "update", update_started, updated, step)
    run.workers.call_all("serve_policy", version=step)
    run.ledger.policy = step
    ended = clock.now()
    add_spans(run, "weights", updated, ended, step)
    run.prompts_drawn += sum(len(part.groups) for part in drawn.rounds)
    outcome = StepOutcome(
        rollout=rollout,
        rounds=tuple(part.groups for part in drawn.rounds),
        rollout_s=scored - started - drawn.reward_s(),
        reward_s=drawn.reward_s(),
        update_s=updated - update_started,
        weights_s=ended - updated,
        total_s=ended - started,
    )
    for part in drawn.rounds:
        observer.rollout(rollout_record(run, part.rollout, "train", step))
    observer.completions("train", step, drawn.records())
    observer.metrics(
        step,
        {
            **reward_metrics(drawn.results()),
            **drawn.metrics(),
            **learning_metrics(samples, divergences),
            **rollout_metrics(rollout, len(run.workers), sessions),
            "drafter/versions": run.ledger.drafter - version,
            **updates[0],
            "time/step_s": outcome.total_s,
            "time/rollout_s": outcome.rollout_s,
            "time/reward_s": outcome.reward_s,
            "time/update_s": outcome.update_s,
            "time/weights_s": outcome.weights_s,
        },
    )
    return outcome


def draw_groups(run: RunContext, step: int) -> Drawn:
    """Draw and score the step's groups, round after round, in data order; see `DynamicSampling`."""
    config, clock = run.config, run.observer.clock
    sampling = DynamicSampling(
        config.algorithm.prompts_per_step, config.algorithm.max_sampling_rounds
    )
    rounds: list[Round] = []
    position = run.prompts_drawn
    while count := sampling.missing:
        prompts = next_prompts(run.train, position, count, config.seed)
        position += count
        groups = make_groups(
            prompts,
            seed=config.seed,
            stream=Stream.TRAIN,
            round_index=step,
            group_size=config.algorithm.group_size,
            max_tokens=config.sampling.max_tokens,
            eos_ids=run.tokenizer.eos_ids,
            params=SamplingParams(temperature=config.sampling.temperature),
            stop_strings=config.sampling.stop_strings,
            attempt=len(rounds),
        )
        scorer = Scorer(
            run.pool, run.tokenizer, prompts, keep_stop_string=config.sampling.keep_stop_string
        )
        rollout = draw(run, groups, step, scorer)
        rolled_out = clock.now()
        with run.stop.at_any_moment():
            results = scorer.results(rollout.completions)
        reward_s = clock.now() - rolled_out
        records = scorer.records(rollout.completions, results)
        rounds.append(Round(tuple(groups), rollout, tuple(results), tuple(records), reward_s))
        sampling.add(rounds[-1].rewards())
    return Drawn(tuple(rounds), tuple(sampling.chosen()))


def draw(run: RunContext, groups: Sequence[Group], step: int, scorer: Scorer) -> RolloutResult:
    """Generate a round's responses; idle workers train the drafter, if there is one.

    With a fixed number of drafter steps the groups are split in advance, so that which worker has
    which responses does not depend on time.
    """
    spot = run.config.spot
    fixed = spot.deterministic_steps is not None
    rollout = Rollout(
        run.workers,
        run.observer,
        run.ledger,
        run.planner_memory,
        kind=run.config.planner,
        slots=run.config.rollout.max_batch,
        step=step,
        on_response=scorer.submit,
        stop=run.stop,
        on_lost=partial(replace_lost, run),
    )
    trains = run.has_drafter and spot.enabled
    return rollout.run(groups, collect=trains, spot_training=trains and not fixed)


def add_spans(run: RunContext, activity: Activity, start: float, end: float, step: int) -> None:
    """Record what all workers did together."""
    for index in range(len(run.workers)):
        run.observer.span(f"worker {index}", activity, start, end, step=step)


def reward_metrics(results: Sequence[RewardResult]) -> Values:
    """Mean, spread and parts of the step's rewards."""
    scores = [result.score for result in results]
    parts: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.parts.items():
            parts.setdefault(name, []).append(value)
    return {
        "reward/mean": statistics.fmean(scores),
        "reward/std": statistics.pstdev(scores),
        "reward/errors": sum(result.failure is not None for result in results),
        **{f"reward/part/{name}": statistics.fmean(values) for name, values in parts.items()},
    }


def entropy_per_token(rollout: RolloutResult) -> float:
    """Unbiased estimate in nats: the mean of -log p over the tokens that were drawn from p."""
    logprobs = [value for completion in rollout.completions for value in completion.logprobs]
    return -statistics.fmean(logprobs)


def rollout_record(
    run: RunContext, rollout: RolloutResult, split: Split, step: int
) -> RolloutRecord:
    """What is stored of a rollout's decode steps."""
    enabled = run.config.speculation.enabled
    return RolloutRecord(
        step=step,
        split=split,
        seconds=rollout.seconds,
        numerics=run.workers.numerics,
        kernels=kernels(),
        off=None if enabled else "the configuration: speculation.enabled is false",
        workers=[stats.steps for stats in rollout.stats],
    )


def rollout_metrics(
    rollout: RolloutResult, num_workers: int, sessions: Sequence[SpotResult]
) -> Values:
    """Lengths, speed, speculation, idle time and drafter training of a step."""
    lengths = [len(completion.token_ids) for completion in rollout.completions]
    stats = rollout.stats
    plain = sum(item.plain_steps for item in stats)
    speculative = sum(item.speculative_steps for item in stats)
    drafted = sum(item.nodes_drafted for item in stats)
    accepted = sum(item.tokens_speculated - item.rows_speculated for item in stats)
    saved = [item.steps.saved_s for item in stats]
    idle = rollout.idle_s / (num_workers * rollout.seconds)
    least = rollout.least_s
    return {
        "response/count": len(lengths),
        "response/tokens_mean": statistics.fmean(lengths),
        "response/tokens_max": max(lengths),
        "response/cut_frac": statistics.fmean(c.finish == "length" for c in rollout.completions),
        "policy/entropy": entropy_per_token(rollout),
        "rollout/tokens": rollout.tokens,
        "rollout/tokens_per_s": rollout.tokens / rollout.seconds,
        "rollout/decode_steps": plain + speculative,
        "speculation/share": speculative / max(1, plain + speculative),
        "speculation/drafted": drafted,
        "speculation/accepted": accepted,
        "speculation/acceptance_length": rollout.acceptance_length,
        "speculation/saved_s": None if None in saved else sum(filter(None, saved)),
        "planner/length_error": rollout.length_error,
        "planner/least_s": least,
        "planner/over_least": rollout.seconds / least if least else None,
        "drafter/tokens": sum(session.tokens for session in sessions),
        "drafter/optimizer_steps": sum(session.steps for session in sessions),
        "drafter/loss": next((s.loss for s in reversed(sessions) if s.loss is not None), None),
        "idle/frac": idle,
        "idle/filled_frac": min(1.0, rollout.filled_s / rollout.idle_s) if rollout.idle_s else None,
        "time/spot_stop_ms": 1e3 * max(rollout.stop_s) if rollout.stop_s else None,
    }
