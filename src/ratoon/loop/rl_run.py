"""A whole RL run: evaluate, step by step train, checkpoint, evaluate, save."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ratoon.cluster.local import LocalWorkers, shared_folder
from ratoon.config.rl import RLConfig
from ratoon.coordinator.memory import PlannerMemory
from ratoon.coordinator.versions import VersionLedger
from ratoon.drafter.model import choose_draft_vocabulary
from ratoon.loop.checkpoints import (
    Checkpoint,
    has_checkpoint,
    latest_checkpoint,
    restore,
    save_checkpoint,
)
from ratoon.loop.evaluation import evaluate, stored_rewards
from ratoon.loop.model_card import write_card
from ratoon.loop.replay import replay
from ratoon.loop.rl_step import StepOutcome, rl_step
from ratoon.loop.rl_summary import Findings, figures_of, step_records
from ratoon.loop.run_context import RunContext
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
    with_machine,
)
from ratoon.observe.observer import Observer
from ratoon.observe.run_folder import RunFolder
from ratoon.observe.summary import write_summary
from ratoon.records import Completion
from ratoon.rl.rewards import build_rewards
from ratoon.rl.rewards.pool import RewardPool
from ratoon.stopping import Stop, Stopped


def run_rl(
    config: RLConfig, folder: RunFolder, observer: Observer, stop: Stop | None = None
) -> None:
    """Train as configured; continues after the last checkpoint in `folder`, if there is one.

    Raises: Stopped as `stop` asks, when the last complete step is saved; RatoonError of all kinds.
    Whatever is raised, no process is left behind.
    """
    stop = stop or Stop()
    config = with_machine(config)
    checkpoint = latest_checkpoint(folder)
    with _context(config, folder, observer, stop) as run:
        report_numerics(run.workers, observer, "a replay counts the tokens that rounding flips")
        findings = Findings()
        if checkpoint is None:
            _begin(run, findings)
        else:
            restore(run, checkpoint)
            observer.resume_after(checkpoint.step)
        with stop.deferred(), _saving_when_stopped(run, folder):
            _train(run, folder, findings, checkpoint)
        _save_products(run, folder)
        figures = figures_of(step_records(folder), findings)
        notes = [*run.notes]
        if config.replay_last_step and findings.replay is None:
            notes.append(
                "The run was interrupted after its last step, which was not replayed any more: no "
                "tokens were compared."
            )
        if notes:
            figures["notes"] = notes
        figures |= {"numerics": run.workers.numerics, "seconds": observer.elapsed_s}
        figures |= {"steps": config.steps, "workers": len(run.workers)}
        write_card(folder, config, figures)
        write_summary(folder.summary, figures)


def _train(
    run: RunContext, folder: RunFolder, findings: Findings, checkpoint: Checkpoint | None
) -> None:
    """All steps that are left, with what belongs to each, and the replay of the last."""
    config = run.config
    if checkpoint is not None:
        run.steps_done = checkpoint.step
        samples = config.evaluation.samples
        findings.before = stored_rewards(folder, 0, samples)
        findings.after = stored_rewards(folder, run.steps_done, samples)
        if findings.after is None:
            _evaluate_if_due(run, findings)
    run.observer.phase("RL", config.steps, done=run.steps_done)
    outcome: StepOutcome | None = None
    memory = run.planner_memory
    for step in range(run.steps_done + 1, config.steps + 1):
        last = step == config.steps
        if last and config.replay_last_step:
            run.workers.call_all("record")
            run.is_recorded = True
            memory = copy.deepcopy(run.planner_memory)
        run.mark()
        outcome = rl_step(run, step)
        if not run.has_drafter:
            _make_drafter(run, outcome.rollout.completions)
        run.steps_done = step
        _evaluate_if_due(run, findings)
        if last or step % config.checkpoint.every == 0:
            save_checkpoint(run, folder, step, config.checkpoint.keep)
    if config.replay_last_step and outcome is not None:
        run.observer.phase("replay of the last step")
        exact = run.workers.numerics == "invariant"
        findings.replay = replay(run, config.steps, outcome, memory, exact=exact)


def _evaluate_if_due(run: RunContext, findings: Findings) -> None:
    step, every = run.steps_done, run.config.evaluation.every
    is_due = step == run.config.steps or (every is not None and step % every == 0)
    if run.held_out and is_due:
        run.mark()
        findings.after = evaluate(run, step).rewards


@contextmanager
def _saving_when_stopped(run: RunContext, folder: RunFolder) -> Iterator[None]:
    """When a stop ends the block, save the last complete step, unless that is done already."""
    try:
        yield
    except Stopped:
        step = run.steps_done
        if step == 0:
            raise Stopped(
                "stopped in the first step, before there was anything to save; --resume begins anew"
            ) from None
        if not has_checkpoint(folder, step):
            run.abandon()
            save_checkpoint(run, folder, step, run.config.checkpoint.keep)
        raise Stopped(f"stopped after step {step}, which is saved; go on with --resume") from None


@contextmanager
def _context(
    config: RLConfig, folder: RunFolder, observer: Observer, stop: Stop
) -> Iterator[RunContext]:
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
    runtime = config.reward_runtime
    with (
        shared_folder(shared_bytes(config)) as shared,
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
            VersionLedger(),
            PlannerMemory(len(workers)),
            stop,
            folder.path / "recovery",
            notes=tuple(dropped),
        )


def _begin(run: RunContext, findings: Findings) -> None:
    """Make the drafter, and evaluate before the first step."""
    # What a run wrote that ended before its first checkpoint.
    run.observer.resume_after(-1)
    if _vocabulary_is_full(run):
        _make_drafter(run, ())
    if run.held_out:
        run.observer.phase("evaluation before training")
        run.mark()
        result = evaluate(run, 0)
        findings.before = result.rewards
        if not run.has_drafter:
            _make_drafter(run, result.rollout.completions)


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


def _save_products(run: RunContext, folder: RunFolder) -> None:
    """The trained model, and the drafter beside it."""
    # Both are of the model that lies beside them.
    folder.summary.unlink(missing_ok=True)
    folder.certificate.unlink(missing_ok=True)
    for product in (folder.model, folder.adapter, folder.drafter):
        if product.exists():
            shutil.rmtree(product)
    run.workers.call(0, "save_model", folder=folder.model)
    if run.config.lora is not None:
        run.workers.call(0, "save_adapter", folder=folder.adapter)
    if run.has_drafter:
        run.workers.call(0, "save_drafter", folder=folder.drafter)
