"""A worker's share of the policy's training: RL updates or supervised steps, and their state."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import distributed

from ratoon.cluster.spec import TrainingSpec, WorkerSpec
from ratoon.config.algorithm import Algorithm
from ratoon.config.training import LoRA
from ratoon.models.compute_dtype import DTYPES
from ratoon.models.decoder import Decoder
from ratoon.training.checkpoint import load_trainer, save_trainer
from ratoon.training.core import TrainerCore
from ratoon.training.data_parallel import DataParallel
from ratoon.training.lora import LoRASettings
from ratoon.training.optimizer import OptimizerSettings
from ratoon.training.policy_trainer import PolicyLossSettings, PolicyTrainer
from ratoon.training.samples import Example, Sample
from ratoon.training.sft import SFTTrainer


class TrainingUnit:
    """Trains `decoder` in place, together with the other workers."""

    def __init__(self, spec: WorkerSpec, training: TrainingSpec, decoder: Decoder) -> None:
        settings = training.optimizer
        algorithm = training.algorithm
        steps = algorithm.epochs * algorithm.minibatches if algorithm is not None else 1
        group = distributed.group.WORLD if spec.count > 1 else None
        self._core = TrainerCore(
            decoder,
            OptimizerSettings(
                lr=settings.lr,
                betas=settings.betas,
                weight_decay=settings.weight_decay,
                max_grad_norm=settings.max_grad_norm,
                warmup_steps=settings.warmup_steps,
                schedule=settings.schedule,
                total_steps=training.total_steps * steps,
            ),
            compute_dtype=DTYPES[spec.model.dtype],
            micro_batch_tokens=training.update.micro_batch_tokens,
            temperature=training.temperature,
            vocab_limit=spec.vocab_limit,
            workers=DataParallel(group),
            lora=_lora(training.lora),
            freeze_embeddings=training.update.freeze_embeddings,
            seed=spec.seed,
        )
        self._algorithm = algorithm
        self._policy = None
        self._sft = None
        if algorithm is None:
            self._sft = SFTTrainer(self._core)
            return
        reference = copy.deepcopy(self._core.compute) if algorithm.kl_coef > 0 else None
        loss = loss_settings(algorithm, training.max_tokens)
        self._policy = PolicyTrainer(self._core, loss, reference=reference)

    def divergences(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        """Each token's divergence from the first policy; see `PolicyTrainer.divergences`."""
        assert self._policy is not None
        assert self._algorithm is not None
        return self._policy.divergences(samples, self._algorithm.kl_estimator)

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One RL step; see `PolicyTrainer.update`."""
        assert self._policy is not None
        assert self._algorithm is not None
        return self._policy.update(
            samples, minibatches=self._algorithm.minibatches, epochs=self._algorithm.epochs
        )

    def train_batch(self, examples: Sequence[Example]) -> dict[str, float]:
        """One supervised step; see `SFTTrainer.step`."""
        assert self._sft is not None
        return self._sft.step(examples)

    def evaluate_batch(self, examples: Sequence[Example]) -> float:
        """Mean loss per completion token of all examples."""
        assert self._sft is not None
        return self._sft.evaluate(examples)

    def save_adapter(self, folder: Path, base_model: Path) -> None:
        """Write the adapters as PEFT reads them."""
        self._core.save_adapter(folder, str(base_model))

    def save(self, folder: Path) -> None:
        """Write master weights, moments and counters."""
        save_trainer(folder, self._core)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""
        with torch.no_grad():
            load_trainer(folder, self._core)


def _lora(lora: LoRA | None) -> LoRASettings | None:
    return None if lora is None else LoRASettings(lora.rank, lora.alpha, lora.targets)


def loss_settings(algorithm: Algorithm, max_tokens: int) -> PolicyLossSettings:
    """What the trainer needs to know of an algorithm; `max_tokens` is the longest response."""
    return PolicyLossSettings(
        ratio="sequence" if algorithm.name == "gspo" else "token",
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        reduction=algorithm.reduction,
        max_tokens=max_tokens,
        kl_coef=algorithm.kl_coef if algorithm.kl_in == "loss" else 0.0,
        kl_estimator=algorithm.kl_estimator,
        entropy_coef=algorithm.entropy_coef,
        mismatch_cap=algorithm.importance_sampling_cap,
    )
