"""The policy's model, its optimizer, and how a batch is cut into pieces that fit."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ratoon.config.base import Items, ModelDirectory, Pair, Settings, require


class ModelSettings(Settings):
    """The model to train."""

    path: ModelDirectory = Field(description="Directory in Hugging Face format.")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="Number format of computation; the trainer's master weights are float32. "
        "auto: bfloat16 where the hardware multiplies it, else float32.",
    )


class Optimizer(Settings):
    """AdamW with float32 master weights."""

    lr: float = Field(ge=0, lt=1, description="Peak learning rate.")
    betas: Pair[float] = Field(
        (0.9, 0.99), description="Decay of the two moment averages, each in [0, 1)."
    )
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    warmup_steps: int = Field(0, ge=0, description="Linear warm-up. Optimizer steps.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning rate after warm-up; linear and cosine end at 0."
    )

    @model_validator(mode="after")
    def _check(self) -> Optimizer:
        require(
            all(0 <= beta < 1 for beta in self.betas),
            f"betas = {list(self.betas)} must lie in [0, 1)",
        )
        return self


class RLOptimizer(Optimizer):
    """AdamW for reinforcement learning."""

    lr: float = Field(1e-6, ge=0, lt=1, description="Peak learning rate.")


class SFTOptimizer(Optimizer):
    """AdamW for supervised fine-tuning."""

    lr: float = Field(2e-5, ge=0, lt=1, description="Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "cosine", description="Learning rate after warm-up; linear and cosine end at 0."
    )


class Update(Settings):
    """How the training batch is cut; changes memory and speed, never the gradient."""

    micro_batch_tokens: int = Field(
        4096, ge=64, description="Packed tokens in one forward and backward pass."
    )
    freeze_embeddings: bool = Field(
        False, description="Leave the embedding and the output head as they are."
    )


class LoRA(Settings):
    """Low-rank adapters instead of all weights, merged into the policy as it is trained.

    They need learning rates some ten times as high.
    """

    rank: int = Field(16, ge=1, description="Rank of each adapter.")
    alpha: float = Field(32.0, gt=0, description="Adapters count alpha / rank times.")
    targets: Items[str] = Field(
        ("all-linear",),
        min_length=1,
        description="Matrices of the layers by their names in Hugging Face's model, such as "
        "`q_proj`; `all-linear` = all of them.",
    )

    @model_validator(mode="after")
    def _check(self) -> LoRA:
        require(
            len(self.targets) == 1 or "all-linear" not in self.targets,
            f"targets = {list(self.targets)}: names beside all-linear would have no effect; keep "
            "one or the other",
        )
        return self


def check_lora(lora: LoRA | None, update: Update) -> None:
    """Raise ValueError where freezing would have no effect beside adapters."""
    require(
        lora is None or not update.freeze_embeddings,
        "update.freeze_embeddings = true would have no effect because lora trains adapters of the "
        "layers alone; remove it",
    )


class Workers(Settings):
    """Worker processes of this machine; each rolls out, trains the drafter, and updates."""

    count: int | None = Field(
        None, ge=1, le=256, description="Processes; null = one per usable core."
    )
    threads: int = Field(1, ge=1, description="Computing threads of each.")
    timeout_s: float = Field(
        300.0,
        gt=0,
        description="A worker without a sign of life for so long is ended. Seconds.",
    )


class RLWorkers(Workers):
    """Worker processes that are replaced if they are lost in a rollout."""

    max_restarts: int = Field(
        3, ge=0, description="How often lost workers are replaced before the run ends."
    )


class Checkpoints(Settings):
    """Complete states to resume from, written whole or not at all."""

    every: int = Field(10, ge=1, description="Write one after this many steps.")
    keep: int = Field(2, ge=1, description="Keep the last ones and delete older. Checkpoints.")
