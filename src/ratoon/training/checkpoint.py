"""A trainer's state on disk: masters and moments in safetensors, plain values in JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ratoon.errors import CheckpointError
from ratoon.models.directories import whole_directory
from ratoon.training.core import TrainerCore

TENSORS = "trainer.safetensors"
COUNTERS = "trainer.json"

# Tensors by kind (masters, each moment), then by the parameter's name.
Kinds = Mapping[str, Mapping[str, Tensor]]


def save_trainer(folder: Path, core: TrainerCore) -> None:
    """Write everything that `load_trainer` needs to continue with the same bits, or nothing."""
    state = core.state_dict()
    save_state(folder, state["tensors"], {"steps_done": state["steps_done"]})


def load_trainer(folder: Path, core: TrainerCore) -> None:
    """Continue from what `save_trainer` wrote.

    Raises: CheckpointError if it is missing, damaged or of another model.
    """
    kinds, values = load_state(folder)
    core.load_state_dict({"tensors": kinds, "steps_done": values["steps_done"]})


def save_state(folder: Path, kinds: Kinds, values: Mapping[str, Any]) -> None:
    """Write tensors and plain values into a folder that appears whole or not at all."""
    tensors = {
        f"{kind}.{name}": value for kind, views in kinds.items() for name, value in views.items()
    }
    size = sum(value.nbytes for value in tensors.values())
    with whole_directory(folder, size) as draft:
        save_file({name: value.contiguous() for name, value in tensors.items()}, draft / TENSORS)
        counters = {**values, "tensors": len(tensors)}
        (draft / COUNTERS).write_text(json.dumps(counters) + "\n", encoding="utf-8")


def load_state(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """What `save_state` wrote.

    Raises: CheckpointError if it is missing or damaged.
    """
    try:
        counters: dict[str, Any] = json.loads((folder / COUNTERS).read_text(encoding="utf-8"))
        tensors = load_file(folder / TENSORS)
        expected = counters["tensors"]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} holds no whole trainer state ({error}); resume from another checkpoint"
        ) from None
    if len(tensors) != expected:
        raise CheckpointError(
            f"{folder / TENSORS} has {len(tensors)} tensors, {expected} were written; "
            "resume from another checkpoint"
        )
    kinds: dict[str, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        kind, _, parameter = name.partition(".")
        kinds.setdefault(kind, {})[parameter] = value
    return kinds, counters
