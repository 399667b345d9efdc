"""What must hold before weights are updated or loaded; each check raises one clear error."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ratoon.errors import CapabilityError, CheckpointError, NumericsError


def require_finite(norm: float) -> None:
    """Raise NumericsError if a gradient norm is not finite."""
    if not math.isfinite(norm):
        raise NumericsError(
            f"the gradient norm is {norm}; it must be finite. Weights are unchanged. Lower the "
            "learning rate, or look for broken weights."
        )


def require_same(
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]],
    stored: Mapping[str, Mapping[str, Tensor]],
    counts: Mapping[str, int],
    stored_counts: Mapping[str, int],
) -> None:
    """Raise CheckpointError unless `stored` has tensors of exactly these shapes."""
    found = {
        (kind, name, tuple(value.shape))
        for kind, views in stored.items()
        for name, value in views.items()
    }
    expected = {
        (kind, name, shape) for kind, views in shapes.items() for name, shape in views.items()
    }
    if expected != found or counts.keys() != stored_counts.keys():
        wrong = sorted(expected ^ found)[:4]
        raise CheckpointError(
            f"the trainer's state is of another model: {wrong} are on one side only; give the "
            "checkpoint of the configured model"
        )


def require_muon() -> None:
    """Raise CapabilityError if this torch has no Muon."""
    if not hasattr(torch.optim, "Muon"):
        raise CapabilityError(
            f"optimizer.kind = muon needs torch 2.9 or later, but torch is {torch.__version__}; "
            "upgrade torch or choose adamw"
        )
