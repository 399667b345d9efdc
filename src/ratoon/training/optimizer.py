"""Settings of AdamW, and its learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


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
