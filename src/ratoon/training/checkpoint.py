"""The policy trainer's state on disk: masters and moments in safetensors, counters in JSON."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ratoon.errors import CheckpointError
from ratoon.models.directories import whole_directory
from ratoon.training.core import TrainerCore

TENSORS = "trainer.safetensors"
COUNTERS = "trainer.json"


def save_trainer(folder: Path, core: TrainerCore) -> None:
    """Write everything that `load_trainer` needs to continue with the same bits, or nothing."""
    state = core.state_dict()
    tensors = {
        f"{kind}.{name}": value
        for kind, views in state["tensors"].items()
        for name, value in views.items()
    }
    size = sum(value.nbytes for value in tensors.values())
    with whole_directory(folder, size) as draft:
        save_file({name: value.contiguous() for name, value in tensors.items()}, draft / TENSORS)
        counters = {"steps_done": state["steps_done"], "tensors": len(tensors)}
        (draft / COUNTERS).write_text(json.dumps(counters) + "\n", encoding="utf-8")


def load_trainer(folder: Path, core: TrainerCore) -> None:
    """Continue from what `save_trainer` wrote.

    Raises: CheckpointError if it is missing, damaged or of another model.
    """
    try:
        counters = json.loads((folder / COUNTERS).read_text(encoding="utf-8"))
        tensors = load_file(folder / TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} holds no whole trainer state ({error}); resume from another checkpoint"
        ) from None
    if len(tensors) != counters["tensors"]:
        raise CheckpointError(
            f"{folder / TENSORS} has {len(tensors)} tensors, {counters['tensors']} were written; "
            "resume from another checkpoint"
        )
    kinds: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        kind, _, parameter = name.partition(".")
        kinds.setdefault(kind, {})[parameter] = value
    core.load_state_dict({"tensors": kinds, "steps_done": counters["steps_done"]})
