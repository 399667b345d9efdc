"""`ratoon eval`: draw responses to whole tasks, grade them, keep them, and compare two models.

Responses are kept as they finish. A run that was ended goes on where it was, and ends with the same
responses: each is a function of its prompt and its key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ratoon.cluster.local import LocalWorkers, shared_folder
from ratoon.cluster.spec import DraftingSpec, WorkerSpec
from ratoon.config.rl import Rollout as EngineSettings
from ratoon.config.speculation import Drafter, Speculation, Spot
from ratoon.config.training import ModelSettings, Workers
from ratoon.coordinator.memory import PlannerMemory
from ratoon.coordinator.versions import VersionLedger
from ratoon.data.prompts import PromptStyle
from ratoon.errors import CapabilityError, ConfigError
from ratoon.evals.kept import KeptResponses
from ratoon.evals.plan import EvalPlan, check_plan
from ratoon.evals.summary import compare, summarise
from ratoon.evals.tasks import Task, default_style, load_task
from ratoon.loop.order import Group, make_groups
from ratoon.loop.rollout import Rollout
from ratoon.loop.scoring import Scorer
from ratoon.loop.setup import load_tokenizer, num_workers, report_numerics
from ratoon.models.compute_dtype import fast_dtype
from ratoon.models.hf_config import read_config
from ratoon.models.tokenizer import Tokenizer
from ratoon.observe.files import (
    FolderLock,
    digest,
    files_of,
    read_lines,
    to_json,
    write_atomically,
    write_lines,
)
from ratoon.observe.observer import Observer
from ratoon.records import Completion, Prompt, Stream
from ratoon.rl.rewards import build_rewards
from ratoon.rl.rewards.pool import RewardPool

SETTINGS, SUMMARY = "settings.json", "summary.json"
_REWARD_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Machine:
    """What works: processes (None = one for each core), and live sequences of each."""

    workers: int | None = None
    batch: int = 32


@dataclass(frozen=True, slots=True)
class _Job:
    """One task with its prompts as one model sees them."""

    task: Task
    prompts: Sequence[Prompt]
    max_tokens: int

    @property
    def length(self) -> int:
        """Tokens of the longest prompt and response."""
        return max(len(prompt.ids) for prompt in self.prompts) + self.max_tokens


@dataclass(frozen=True, slots=True)
class _Subject:
    """One model, what it is asked, and where its responses are kept."""

    path: Path
    tokenizer: Tokenizer
    jobs: Sequence[_Job]
    folder: Path

    def file(self, job: _Job) -> Path:
        """Where the graded responses lie once all are there."""
        return self.folder / f"{job.task.name.replace(':', '_')}.jsonl"


def run_eval(
    models: Sequence[Path],
    plan: EvalPlan,
    output: Path,
    observer: Observer,
    machine: Machine = Machine(),
) -> dict[str, Any]:
    """Evaluate one model, or compare the first with the second; returns the summary.

    Args:
        models: one or two directories.
        plan: what is evaluated and how.
        output: folder of responses and summary; one of the same evaluation is gone on with.
        observer: shows progress.
        machine: what works; changes no response.

    Raises:
        ConfigError: the plan is contradictory, or `output` holds another evaluation.
        DataError: a task's file is missing or damaged.
        CapabilityError: the model has too few positions, or a package is missing.
    """
    check_plan(plan)
    folders = (output / "model", output / "against")
    subjects = [_subject(path, plan, folder) for path, folder in zip(models, folders, strict=False)]
    _open(output, models, plan)
    lock = FolderLock(output)
    try:
        graded = [_evaluate(subject, plan, observer, machine) for subject in subjects]
        record = _summary(models, plan, graded)
        write_atomically(output / SUMMARY, to_json(record, indent=2) + "\n")
        return record
    finally:
        lock.release()


def _summary(
    models: Sequence[Path], plan: EvalPlan, graded: Sequence[Mapping[str, list[dict[str, Any]]]]
) -> dict[str, Any]:
    record: dict[str, Any] = {"model": str(models[0]), "samples": plan.samples}
    record["tasks"] = [summarise(name, rows, plan.ks) for name, rows in graded[0].items()]
    if len(models) > 1:
        record["against"] = str(models[1])
        record["against_tasks"] = [
            summarise(name, rows, plan.ks) for name, rows in graded[1].items()
        ]
        record["differences"] = [
            compare(name, rows, graded[1][name]) for name, rows in graded[0].items()
        ]
    return record


def _subject(path: Path, plan: EvalPlan, folder: Path) -> _Subject:
    tokenizer = load_tokenizer(path)
    jobs = []
    for task in plan.tasks:
        style = default_style(task, tokenizer)
        if plan.chat_template is False:
            style = PromptStyle(chat_template=False)
        elif plan.system_prompt is not None:
            style = PromptStyle(plan.system_prompt, plan.chat_template)
        prompts = load_task(
            task, plan.data, tokenizer, limit=plan.limit, few_shot=plan.few_shot, style=style
        )
        build_rewards([_reward(task)]).check(prompts)
        jobs.append(_Job(task, prompts, plan.max_tokens or task.max_tokens))
        _check_positions(jobs[-1], path)
    return _Subject(path, tokenizer, jobs, folder)


def _check_positions(job: _Job, path: Path) -> None:
    positions = read_config(path).max_positions
    if job.length > positions:
        raise CapabilityError(
            f"the task {job.task.name} needs {job.length} positions, its longest prompt and "
            f"--max-tokens {job.max_tokens}, but the model in {path} has {positions}; lower "
            "--max-tokens"
        )


def _reward(task: Task) -> dict[str, Any]:
    # `check_plan` has asked for the user's word.
    allowed = {"allow_code_execution": True} if task.reward["kind"] == "code" else {}
    return {**task.reward, **allowed}


def _open(output: Path, models: Sequence[Path], plan: EvalPlan) -> None:
    """Make the folder, or make sure that it holds this evaluation."""
    values = {"models": [_fingerprint(path) for path in models], **asdict(plan)}
    settings = json.loads(json.dumps(values, default=str))
    file = output / SETTINGS
    if not file.is_file():
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ConfigError(f"--output {output} holds something else; name another folder")
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(file, to_json(settings, indent=2) + "\n")
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    changed = [key for key in settings if settings[key] != before.get(key)]
    if changed:
        raise ConfigError(
            f"--output {output} holds an evaluation with other {', '.join(changed)}; name another "
            "folder, or remove it"
        )


def _fingerprint(path: Path) -> dict[str, str]:
    """Which model this is: where it lies, and when its files were written."""
    return {"path": str(path.resolve()), "files": digest(files_of(path))[:16]}


def _evaluate(
    subject: _Subject, plan: EvalPlan, observer: Observer, machine: Machine
) -> dict[str, list[dict[str, Any]]]:
    """The graded responses of each task; only what is missing is drawn."""
    subject.folder.mkdir(exist_ok=True)
    missing = [job for job in subject.jobs if not subject.file(job).is_file()]
    if missing:
        observer.phase(f"loading {subject.path.name}")
        length = max(job.length for job in missing)
        with _started(subject, plan, length, machine) as workers:
            report_numerics(
                workers, observer, "with another --batch rounding may flip a token now and then"
            )
            for job in missing:
                observer.phase(f"{job.task.name} with {subject.path.name}")
                draw = partial(_draw, workers, observer, machine.batch)
                _run_task(subject, job, plan, draw)
    return {job.task.name: list(read_lines(subject.file(job))) for job in subject.jobs}


@contextmanager
def _started(
    subject: _Subject, plan: EvalPlan, length: int, machine: Machine
) -> Iterator[LocalWorkers]:
    """Worker processes that decode with the model, guessing ahead from earlier text."""
    settings = Workers(count=machine.workers)
    count = num_workers(settings)
    drafting = DraftingSpec(
        Speculation(drafters=("suffix",)), Drafter(), Spot(enabled=False), plan.params.temperature
    )
    with shared_folder() as shared:
        specs = [
            WorkerSpec(
                index=index,
                count=count,
                threads=settings.threads,
                timeout_s=settings.timeout_s,
                seed=plan.seed,
                folder=shared,
                model=ModelSettings.model_validate({"path": subject.path, "dtype": fast_dtype()}),
                vocab_limit=subject.tokenizer.vocab_size,
                training=None,
                rollout=EngineSettings(max_batch=machine.batch, max_length=length),
                drafting=drafting,
            )
            for index in range(count)
        ]
        with LocalWorkers(specs) as workers:
            workers.wait_until_ready()
            yield workers


def _draw(
    workers: LocalWorkers,
    observer: Observer,
    slots: int,
    groups: Sequence[Group],
    on_response: Callable[[Completion], None],
) -> None:
    Rollout(
        workers,
        observer,
        VersionLedger(),
        PlannerMemory(len(workers)),
        kind="longest_first",
        slots=slots,
        step=0,
        on_response=on_response,
        activity="evaluation",
    ).run(groups)


def _run_task(
    subject: _Subject,
    job: _Job,
    plan: EvalPlan,
    draw: Callable[[Sequence[Group], Callable[[Completion], None]], None],
) -> None:
    groups = make_groups(
        job.prompts,
        seed=plan.seed,
        stream=Stream.EVAL,
        round_index=0,
        group_size=plan.samples,
        max_tokens=job.max_tokens,
        eos_ids=subject.tokenizer.eos_ids,
        params=plan.params,
        stop_strings=(),
    )
    file = subject.file(job)
    unfinished = file.with_suffix(".partial.jsonl")
    with (
        RewardPool(build_rewards([_reward(job.task)]), timeout_s=_REWARD_TIMEOUT_S) as pool,
        KeptResponses(unfinished, groups) as kept,
    ):
        scorer = Scorer(pool, subject.tokenizer, job.prompts, keep_stop_string=True)
        for completion in kept.found.values():
            scorer.submit(completion)

        def on_response(completion: Completion) -> None:
            kept.add(completion)
            scorer.submit(completion)

        if kept.missing:
            draw(kept.missing, on_response)
        completions = [kept.found[request.key] for group in groups for request in group]
        records = scorer.records(completions, scorer.results(completions))
    write_lines(file, (asdict(record) for record in records))
    unfinished.unlink()
