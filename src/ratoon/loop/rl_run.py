"""A whole RL run: evaluate, step by step train, checkpoint, evaluate, save."""

from __future__ import annotations

import shutil
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ratoon.cluster.local import LocalWorkers, remove_folder, shared_folder
from ratoon.config.rl import RLConfig
from ratoon.drafter.model import choose_draft_vocabulary
from ratoon.evals.statistics import paired_difference
from ratoon.loop.checkpoints import (
    latest_checkpoint,
    restore,
    save_checkpoint,
)
from ratoon.loop.evaluation import evaluate, stored_rewards
from ratoon.loop.replay import Replay, replay
from ratoon.loop.rl_step import RunContext, StepOutcome, entropy_per_token, rl_step
from ratoon.loop.rollout import DrafterLedger
from ratoon.loop.setup import (
    check_adapters,
    check_context,
    check_drafter,
    check_sampling,
    load_rl_prompts,
    load_tokenizer,
    report_numerics,
    rl_specs,
    shared_bytes,
)
from ratoon.models.compute_dtype import with_dtype
from ratoon.observe.observer import Observer
from ratoon.observe.run_folder import RunFolder
from ratoon.observe.summary import write_summary
from ratoon.records import Completion
from ratoon.rl.rewards import build_rewards
from ratoon.rl.rewards.pool import RewardPool


@dataclass(slots=True)
class _History:
    """What the summary is made of."""

    outcomes: list[StepOutcome] = field(default_factory=list)
    before: tuple[float, ...] | None = None
    after: tuple[float, ...] | None = None
    replay: Replay | None = None


def run_rl(config: RLConfig, folder: RunFolder, observer: Observer) -> None:
    """Train as configured; continues after the last checkpoint in `folder`, if there is one.

    Raises: RatoonError of all kinds; whatever is raised, no process is left behind.
    """
    started = observer.clock.now()
    config = with_dtype(config)
    with _context(config, observer) as run:
        numerics = report_numerics(
            run.workers, observer, "a replay counts the tokens that rounding flips"
        )
        history = _History()
        first = _begin(run, folder, history)
        observer.phase("RL", config.steps, done=first - 1)
        for step in range(first, config.steps + 1):
            last = step == config.steps
            if last and config.replay_last_step:
                run.workers.call_all("record")
            outcome = rl_step(run, step)
            history.outcomes.append(outcome)
            if not run.has_drafter:
                _make_drafter(run, outcome.rollout.completions)
            if run.held_out and (last or _is_due(step, config.evaluation.every)):
                history.after = evaluate(run, step).rewards
            if last or step % config.checkpoint.every == 0:
                save_checkpoint(run, folder, step, config.checkpoint.keep)
        if config.replay_last_step and history.outcomes:
            observer.phase("replay of the last step")
            last_outcome = history.outcomes[-1]
            history.replay = replay(run, config.steps, last_outcome, exact=numerics == "invariant")
        _save_products(run, folder)
        seconds = observer.clock.now() - started
        figures = _summary(run, history, numerics, seconds)
        notes = list(run.notes)
        if 1 < first <= config.steps:
            notes.append(
                f"The run was resumed: times and shares are those of steps {first} to "
                f"{config.steps}."
            )
        if notes:
            figures["notes"] = notes
        write_summary(folder.summary, figures)


@contextmanager
def _context(config: RLConfig, observer: Observer) -> Iterator[RunContext]:
    """Everything a run works with; data and rewards are checked before a process starts."""
    check_context("rollout.max_length", config.rollout.max_length, config.model.path)
    check_adapters(config.lora, config.model.path)
    check_drafter(config)
    tokenizer = load_tokenizer(config.model.path)
    check_sampling(config, tokenizer)
    dropped: list[str] = []
    train, held_out = load_rl_prompts(config, tokenizer, dropped.append)
    for sentence in dropped:
        observer.note(sentence)
    rewards = build_rewards([reward.model_dump() for reward in config.rewards])
    rewards.check([*train, *held_out])
    observer.phase("loading")
    shared = shared_folder(shared_bytes(config))
    runtime = config.reward_runtime
    try:
        with (
            RewardPool(
                rewards,
                num_workers=runtime.workers,
                timeout_s=runtime.timeout_s,
                on_error=runtime.on_error,
            ) as pool,
            LocalWorkers(rl_specs(config, tokenizer, shared)) as workers,
        ):
            workers.wait_until_ready()
            yield RunContext(
                config,
                tokenizer,
                train,
                held_out,
                workers,
                pool,
                observer,
                DrafterLedger(),
                notes=tuple(dropped),
            )
    finally:
        remove_folder(shared)


def _begin(run: RunContext, folder: RunFolder, history: _History) -> int:
    """Evaluate before the first step, or restore a checkpoint; returns the step to go on with."""
    checkpoint = latest_checkpoint(folder)
    if checkpoint is not None:
        step = restore(run, checkpoint)
        run.observer.resume_after(step)
        samples = run.config.evaluation.samples
        history.before = stored_rewards(folder, 0, samples)
        history.after = stored_rewards(folder, step, samples)
        return step + 1
    # What a run wrote that ended before its first checkpoint.
    run.observer.resume_after(-1)
    if _vocabulary_is_full(run):
        _make_drafter(run, ())
    if run.held_out:
        run.observer.phase("evaluation before training")
        result = evaluate(run, 0)
        history.before = result.rewards
        if not run.has_drafter:
            _make_drafter(run, result.rollout.completions)
    return 1


def _vocabulary_is_full(run: RunContext) -> bool:
    return run.tokenizer.vocab_size <= run.config.drafter.draft_vocab_size


def _make_drafter(run: RunContext, completions: Sequence[Completion]) -> None:
    """Make the learned drafter; its vocabulary is what the policy says most often."""
    if not run.config.speculation.uses_learned:
        return
    vocabulary = run.workers.call(0, "draft_vocabulary_size")
    counts = Counter(token for completion in completions for token in completion.token_ids)
    frequencies = torch.zeros(vocabulary["total"], dtype=torch.int64)
    for token, count in counts.items():
        frequencies[token] = count
    ids = choose_draft_vocabulary(frequencies, vocabulary["draft"], run.tokenizer.eos_ids)
    run.workers.call_all("make_drafter", vocabulary=ids.tolist())
    run.has_drafter = True


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _save_products(run: RunContext, folder: RunFolder) -> None:
    """The trained model, and the drafter beside it."""
    for product in (folder.model, folder.adapter, folder.drafter):
        if product.exists():
            shutil.rmtree(product)
    run.workers.call(0, "save_model", folder=folder.model)
    if run.config.lora is not None:
        run.workers.call(0, "save_adapter", folder=folder.adapter)
    if run.has_drafter:
        run.workers.call(0, "save_drafter", folder=folder.drafter)


def _summary(run: RunContext, history: _History, numerics: str, seconds: float) -> dict[str, Any]:
    outcomes, replayed = history.outcomes, history.replay
    before, after = history.before, history.after
    difference = paired_difference(before, after) if before and after else None
    total = sum(outcome.total_s for outcome in outcomes)
    lengths = [length for o in outcomes if (length := o.rollout.acceptance_length) is not None]
    stops = [stop for outcome in outcomes for stop in outcome.rollout.stop_s]
    idle = sum(outcome.rollout.idle_s for outcome in outcomes)
    decoding = sum(outcome.rollout.seconds for outcome in outcomes) * len(run.workers)
    filled = sum(outcome.rollout.filled_s for outcome in outcomes)
    last = outcomes[-1] if outcomes else None

    def share(part: float) -> float | None:
        return part / total if total else None

    return {
        "reward_before": statistics.fmean(before) if before else None,
        "reward_after": statistics.fmean(after) if after else None,
        "reward_diff_stderr": difference[1] if difference else None,
        "tokens_identical": replayed.flips == 0 if replayed else None,
        "flips": replayed.flips if replayed else None,
        "numerics": numerics,
        "rollout_speedup": replayed.rollout_speedup if replayed else None,
        "step_speedup": replayed.step_speedup(last) if replayed and last else None,
        "rollout_share": share(sum(outcome.rollout_s for outcome in outcomes)),
        "update_share": share(sum(outcome.update_s for outcome in outcomes)),
        "reward_share": share(sum(outcome.reward_s for outcome in outcomes)),
        "idle_fraction": idle / decoding if decoding else None,
        "idle_fraction_filled": min(1.0, filled / idle) if idle else None,
        "spot_tokens": sum(s.tokens for outcome in outcomes for s in outcome.rollout.spot),
        "spot_stop_ms_median": 1e3 * statistics.median(stops) if stops else None,
        "acceptance_length_first": lengths[0] if lengths else None,
        "acceptance_length_last": lengths[-1] if lengths else None,
        "entropy_per_token": entropy_per_token(last.rollout) if last else None,
        "seconds": seconds,
        "steps": run.config.steps,
        "workers": len(run.workers),
        **(_replay_figures(replayed) if replayed else {}),
    }


def _replay_figures(replayed: Replay) -> dict[str, Any]:
    return {
        "responses_compared": replayed.responses,
        "tokens_compared": replayed.tokens,
        "replays": [
            {
                "case": f"last step, round {index + 1}",
                "plain_s": plain,
                "ratoon_s": fast,
                "tokens": replayed.tokens,
                "identical": replayed.flips == 0,
            }
            for index, (plain, fast) in enumerate(
                zip(replayed.plain_s, replayed.speculative_s, strict=True)
            )
        ],
    }
