"""AdamW on master weights, its learning rate, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ratoon.errors import NumericsError


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW and its schedule.

    The rate rises linearly over `warmup_steps`, then is constant or falls to 0 at `total_steps`,
    which only falling schedules need. Gradients are scaled down to `max_grad_norm`. Weight decay is
    decoupled and applies to matrices alone.

    Source: Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: int | None = None

    def __post_init__(self) -> None:
        if self.schedule != "constant" and not self.total_steps:
            raise ValueError(f"schedule = {self.schedule!r} needs total_steps, the step it ends at")


def learning_rate(settings: OptimizerSettings, step: int) -> float:
    """The rate of optimizer step `step`, counted from 0."""
    warmup = min(1.0, (step + 1) / (settings.warmup_steps + 1))
    if settings.schedule == "constant":
        return settings.lr * warmup
    assert settings.total_steps is not None
    falling_steps = max(1, settings.total_steps - settings.warmup_steps)
    progress = min(1.0, max(0, step - settings.warmup_steps) / falling_steps)
    if settings.schedule == "linear":
        return settings.lr * warmup * (1.0 - progress)
    return settings.lr * warmup * 0.5 * (1.0 + math.cos(math.pi * progress))


def make_adamw(
    parameters: Iterable[nn.Parameter], settings: OptimizerSettings
) -> torch.optim.AdamW:
    """One fused AdamW; matrices decay, vectors (norms) do not."""
    everything = list(parameters)
    matrices = [parameter for parameter in everything if parameter.dim() >= 2]
    vectors = [parameter for parameter in everything if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True
    )


def clip_gradients(gradients: list[Tensor], flat: Tensor, max_norm: float) -> float:
    """Scale `flat`, of which `gradients` are views, down to `max_norm`; returns the norm before.

    The norm is taken tensor by tensor, so that float32 sums stay short.
    Host-device syncs: one.
    Raises: NumericsError if the norm is not finite.
    """
    norm = float(torch.nn.utils.get_total_norm(gradients))
    if not math.isfinite(norm):
        raise NumericsError(
            f"the gradient norm is {norm}; it must be finite. Weights are unchanged. Lower the "
            "learning rate, or look for broken weights or advantages."
        )
    if norm > max_norm:
        flat.mul_(max_norm / norm)
    return norm
