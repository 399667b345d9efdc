"""The learning rate of pretraining, step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LearningRate:
    """Linear warm-up over `warmup_steps` to `peak`, then one of four shapes until `total_steps`.

    `constant`; `linear` and `cosine` fall from the end of warm-up to `final_frac` of the peak;
    `wsd` (warm-up, stable, decay) is constant and falls linearly in the last `decay_frac` of all
    steps. Source of the last: Hu et al. 2024, https://arxiv.org/abs/2404.06395; of linear decay
    to a small rest: Hägele et al. 2024, https://arxiv.org/abs/2405.18392.
    """

    peak: float
    total_steps: int
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    decay_frac: float = 0.2
    final_frac: float = 0.1

    @property
    def decay_start(self) -> int:
        """The first step at a rate below the peak after warm-up; `total_steps` if there is none."""
        if self.schedule == "constant":
            return self.total_steps
        if self.schedule == "wsd":
            decay_steps = round(self.decay_frac * self.total_steps)
            return max(self.warmup_steps, self.total_steps - decay_steps)
        return self.warmup_steps

    def at(self, step: int) -> float:
        """The rate of optimizer step `step`, counted from 0."""
        warmup = min(1.0, (step + 1) / (self.warmup_steps + 1))
        start = self.decay_start
        progress = min(1.0, max(0, step - start) / max(1, self.total_steps - start))
        if self.schedule == "cosine":
            progress = 0.5 * (1.0 - math.cos(math.pi * progress))
        return self.peak * warmup * (1.0 - (1.0 - self.final_frac) * progress)
