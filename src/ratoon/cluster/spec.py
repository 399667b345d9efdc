"""What a worker is told before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ratoon.config.algorithm import Algorithm
from ratoon.config.rl import Rollout
from ratoon.config.speculation import Drafter, Speculation, Spot
from ratoon.config.training import LoRA, ModelSettings, Optimizer, Update


@dataclass(frozen=True, slots=True)
class TrainingSpec:
    """How the policy is updated. `algorithm` is None for supervised fine-tuning.

    `max_tokens` is the longest response; `total_steps` the run's length, for falling rates.
    """

    optimizer: Optimizer
    update: Update
    lora: LoRA | None
    algorithm: Algorithm | None
    temperature: float
    max_tokens: int
    total_steps: int


@dataclass(frozen=True, slots=True)
class DraftingSpec:
    """Who drafts, how far, and how the learned drafter is trained."""

    speculation: Speculation
    drafter: Drafter
    spot: Spot
    temperature: float


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker process.

    `folder` is private to the run's workers: the rendezvous file and the shared memory lie there.
    `rollout` is None for a worker that only trains.
    """

    index: int
    count: int
    threads: int
    timeout_s: float
    seed: int
    folder: Path
    model: ModelSettings
    vocab_limit: int
    training: TrainingSpec | None
    rollout: Rollout | None
    drafting: DraftingSpec | None

    @property
    def rendezvous(self) -> Path:
        """The file by which the workers find each other."""
        return self.folder / "rendezvous"
