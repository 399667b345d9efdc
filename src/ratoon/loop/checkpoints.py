"""States to resume from: written whole or not at all, checked when read, the last few kept.

A checkpoint holds files of its parts, `state.json` with the counters, and `SHA256SUMS` of all of
them, which `sha256sum --check` reads, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratoon.errors import CheckpointError, ConfigError
from ratoon.loop.run_context import RunContext
from ratoon.models.directories import whole_directory
from ratoon.observe.run_folder import RunFolder

STATE = "state.json"
SUMS = "SHA256SUMS"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files are as they were written; `state` are the values of its counters."""

    path: Path
    step: int
    state: dict[str, Any]


@contextmanager
def whole_checkpoint(folder: RunFolder, step: int, keep: int, **state: Any) -> Iterator[Path]:
    """A folder to write the state after `step` into; older ones than the last `keep` go after."""
    target = _path(folder, step)
    with whole_directory(target) as draft:
        yield draft
        values = {"step": step, **state}
        (draft / STATE).write_text(json.dumps(values) + "\n", encoding="utf-8")
        sums = [f"{_digest(draft / name, sync=True)}  {name}\n" for name in _files(draft)]
        (draft / SUMS).write_text("".join(sums), encoding="utf-8")
        _sync(draft / SUMS)
    _sync(folder.checkpoints)
    for old in checkpoints(folder)[:-keep]:
        # Under a name that is no checkpoint's, so that one half removed is not taken for one.
        shutil.rmtree(old.rename(old.with_name(f".{old.name}-{os.getpid()}.part")))


def latest_checkpoint(folder: RunFolder) -> Checkpoint | None:
    """The newest checkpoint, every file of it read and compared with its checksum.

    Raises: CheckpointError if it is damaged.
    """
    found = checkpoints(folder)
    return read_checkpoint(found[-1]) if found else None


def read_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint, every file of it read and compared with its checksum.

    Raises: CheckpointError if it is damaged.
    """
    _verify(path)
    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    return Checkpoint(path, int(state["step"]), state)


def save_checkpoint(run: RunContext, folder: RunFolder, step: int, keep: int) -> None:
    """Write policy, drafter, both optimizers, the counters, and what each worker alone knows."""
    state = {
        "drafter": run.has_drafter,
        "drafter_version": run.ledger.drafter,
        "prompts_drawn": run.prompts_drawn,
        "planner": run.planner_memory.state(),
        "workers": len(run.workers),
    }
    with whole_checkpoint(folder, step, keep, **state) as draft:
        save_workers(run, draft, range(len(run.workers)))


def save_workers(run: RunContext, folder: Path, workers: Sequence[int]) -> None:
    """Write what these workers know: together, and each alone."""
    first = workers[0]
    run.workers.call(first, "save_training", folder=folder / "policy")
    if run.has_drafter:
        run.workers.call(first, "save_drafter", folder=folder / "drafter")
    run.workers.call_some(workers, "save_own", folder=folder)


def has_checkpoint(folder: RunFolder, step: int) -> bool:
    """Whether the state after `step` was saved."""
    return _path(folder, step).exists()


def restore(run: RunContext, checkpoint: Checkpoint) -> None:
    """Load a checkpoint into all workers.

    Raises: ConfigError if it is of another number of workers.
    """
    path, state = checkpoint.path, checkpoint.state
    if state["workers"] != len(run.workers):
        raise ConfigError(
            f"`workers.count` is {len(run.workers)}, but {path} was written by "
            f"{state['workers']} workers, each with a state of its own; resume with as many"
        )
    run.has_drafter = bool(state["drafter"])
    run.ledger.drafter = int(state["drafter_version"])
    run.ledger.policy = checkpoint.step
    run.prompts_drawn = int(state["prompts_drawn"])
    run.planner_memory.load_state(state["planner"])
    load_workers(run, path, range(len(run.workers)))


def load_workers(run: RunContext, folder: Path, workers: Sequence[int]) -> None:
    """Let all workers go on from what `save_workers` wrote of these, others without their own."""
    run.workers.call_all("load_training", folder=folder / "policy")
    if run.has_drafter:
        version = run.ledger.drafter
        run.workers.call_all("restore_drafter", folder=folder / "drafter", version=version)
    run.workers.call_all("serve_policy", version=run.ledger.policy)
    run.workers.call_some(workers, "load_own", folder=folder)


def _path(folder: RunFolder, step: int) -> Path:
    return folder.checkpoints / f"step_{step:06d}"


def checkpoints(folder: RunFolder) -> list[Path]:
    """All of them, the oldest first."""
    found = {path.name.removeprefix("step_"): path for path in folder.checkpoints.glob("step_*")}
    numbers = sorted((number for number in found if number.isdecimal()), key=int)
    return [found[number] for number in numbers]


def _files(checkpoint: Path) -> list[str]:
    files = (path for path in checkpoint.rglob("*") if path.is_file() and path.name != SUMS)
    return sorted(path.relative_to(checkpoint).as_posix() for path in files)


def _verify(checkpoint: Path) -> None:
    """Compare all files with their checksums. Raises: CheckpointError naming the first other."""
    try:
        *lines, rest = (checkpoint / SUMS).read_text(encoding="utf-8").split("\n")
        pairs = [line.split("  ", 1) for line in lines]
        expected = {name: digest for digest, name in pairs}
        if rest:
            raise ValueError("cut short")
        for name in sorted({STATE, *expected, *_files(checkpoint)}):
            if not (checkpoint / name).is_file():
                raise _damaged(checkpoint, name, "is missing")
            if _digest(checkpoint / name) != expected.get(name):
                raise _damaged(checkpoint, name, f"has another checksum than {SUMS} says")
    except (OSError, ValueError) as error:
        raise _damaged(checkpoint, SUMS, f"cannot be read ({error})") from None


def _damaged(checkpoint: Path, name: str, words: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint / name} {words}: the checkpoint is damaged; remove {checkpoint} to resume "
        "from the checkpoint before it"
    )


def _digest(path: Path, *, sync: bool = False) -> str:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
