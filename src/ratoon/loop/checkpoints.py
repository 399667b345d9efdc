"""States to resume from: written whole or not at all, the last few kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ratoon.errors import CheckpointError
from ratoon.loop.rl_step import RunContext
from ratoon.models.directories import whole_directory
from ratoon.observe.run_folder import RunFolder

STATE = "state.json"


@contextmanager
def whole_checkpoint(folder: RunFolder, step: int, keep: int, **state: Any) -> Iterator[Path]:
    """A folder to write the state after `step` into; older ones than the last `keep` go after."""
    target = folder.checkpoints / f"step_{step:06d}"
    with whole_directory(target) as draft:
        yield draft
        values = {"step": step, **state}
        (draft / STATE).write_text(json.dumps(values) + "\n", encoding="utf-8")
    for old in _checkpoints(folder)[:-keep]:
        shutil.rmtree(old)


def latest_checkpoint(folder: RunFolder) -> Path | None:
    """The newest whole checkpoint."""
    found = _checkpoints(folder)
    return found[-1] if found else None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The counters of a checkpoint. Raises `CheckpointError` if they are damaged."""
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        return {**state, "step": int(state["step"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint / STATE} is damaged ({error}); remove {checkpoint} to resume from the "
            "checkpoint before it"
        ) from None


def save_checkpoint(run: RunContext, folder: RunFolder, step: int, keep: int) -> None:
    """Write policy, drafter, both optimizers and the counters."""
    state = {
        "drafter": run.has_drafter,
        "drafter_version": run.ledger.version,
        "prompts_drawn": run.prompts_drawn,
    }
    with whole_checkpoint(folder, step, keep, **state) as draft:
        run.workers.call(0, "save_training", folder=draft / "policy")
        if run.has_drafter:
            run.workers.call(0, "save_drafter", folder=draft / "drafter")


def restore(run: RunContext, checkpoint: Path) -> int:
    """Load a checkpoint into all workers; returns its step."""
    state = read_state(checkpoint)
    run.workers.call_all("load_training", folder=checkpoint / "policy")
    if state["drafter"]:
        version = int(state["drafter_version"])
        folder = checkpoint / "drafter"
        run.workers.call_all("restore_drafter", folder=folder, version=version)
        run.ledger.version = version
        run.has_drafter = True
    run.prompts_drawn = int(state["prompts_drawn"])
    step = int(state["step"])
    run.workers.call_all("serve_policy", version=step)
    return step


def _checkpoints(folder: RunFolder) -> list[Path]:
    return sorted(path for path in folder.checkpoints.glob("step_*") if (path / STATE).is_file())
