"""Settings of `ratoon pretrain`; those of evolving subnetworks are in `evolve.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ratoon.config.base import (
    ModelDirectory,
    MustExist,
    Name,
    Pair,
    PathText,
    Settings,
    forbid_without_effect,
    require,
)
from ratoon.config.evolve import Evolve
from ratoon.config.training import Checkpoints

TokenFolder = Annotated[PathText, MustExist("directory", "make it with `ratoon data prepare`")]


class ModelShape(Settings):
    """A new model; its vocabulary is that of the data's tokenizer."""

    family: Literal["llama", "mistral", "gpt2", "qwen2", "qwen3"] = Field(
        "llama", description="How it computes, and how it is stored."
    )
    width: int = Field(ge=8, description="Width of the residual stream.")
    layers: int = Field(ge=1, description="Number of layers.")
    heads: int = Field(ge=1, description="Query heads of a layer.")
    kv_heads: int | None = Field(
        None, ge=1, description="Key/value heads of a layer; null = as many as query heads."
    )
    head_width: int | None = Field(None, ge=2, description="Width of a head; null = width / heads.")
    mlp_width: int = Field(ge=1, description="Neurons of a layer's MLP.")
    positions: int | None = Field(
        None, ge=8, description="Longest context. Tokens; null = data.sequence_length."
    )
    tie_embeddings: bool = Field(True, description="Use the embedding as output matrix too.")
    vocab_multiple: int = Field(
        64, ge=1, description="The vocabulary is filled up to a multiple of this. Tokens."
    )

    @model_validator(mode="after")
    def _check(self) -> ModelShape:
        kv_heads = self.kv_heads or self.heads
        require(
            self.heads % kv_heads == 0,
            f"model.shape.heads = {self.heads} must be a multiple of kv_heads = {kv_heads}",
        )
        require(
            self.head_width is not None or self.width % self.heads == 0,
            f"model.shape.width = {self.width} is no multiple of heads = {self.heads}; change one "
            "or give head_width",
        )
        if self.family == "gpt2":
            require(
                kv_heads == self.heads and self.head_width in (None, self.width // self.heads),
                "family gpt2 has as many key/value heads as query heads, of width / heads each; "
                "remove kv_heads and head_width, or choose another family",
            )
        return self


class PretrainModel(Settings):
    """The model: a new one, or one to go on with."""

    shape: ModelShape | None = Field(None, description="A new model with random weights.")
    path: ModelDirectory | None = Field(
        None, description="Directory in Hugging Face format to go on with, instead of `shape`."
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="Number format of computation; master weights are float32. auto: bfloat16 "
        "where the hardware multiplies it, else float32.",
    )

    @model_validator(mode="after")
    def _check(self) -> PretrainModel:
        require(
            (self.shape is None) != (self.path is None),
            "model: give either shape (a new model) or path (one to go on with)",
        )
        return self


class PretrainData(Settings):
    """Token files, as `ratoon data prepare` makes them."""

    path: TokenFolder = Field(description="Folder that `ratoon data prepare` made.")
    sequence_length: int = Field(
        1024, ge=8, description="Tokens that a sequence feeds to the model."
    )


class PretrainOptimizer(Settings):
    """AdamW or Muon with float32 master weights. Defaults are nanoGPT's for GPT-2."""

    kind: Literal["adamw", "muon"] = Field(
        "adamw",
        description="muon updates the layers' matrices with Muon, all else with AdamW, at one "
        "learning rate (steps have AdamW's size).",
    )
    lr: float = Field(6e-4, ge=0, lt=1, description="Peak learning rate.")
    betas: Pair[float] = Field(
        (0.9, 0.95), description="AdamW's decay of the two moment averages, each in [0, 1)."
    )
    momentum: float = Field(0.95, ge=0, lt=1, description="Muon's momentum.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay of matrices.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    warmup_steps: int = Field(0, ge=0, description="Linear warm-up. Optimizer steps.")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine",
        description="Learning rate after warm-up: constant; falling to the end; or constant, then "
        "falling linearly in the last part (wsd).",
    )
    decay_frac: float = Field(0.2, gt=0, le=1, description="Share of the run in which wsd falls.")
    final_lr_frac: float = Field(
        0.1, ge=0, le=1, description="Learning rate at the end, as a share of the peak."
    )

    @model_validator(mode="after")
    def _check(self) -> PretrainOptimizer:
        require(
            all(0 <= beta < 1 for beta in self.betas),
            f"betas = {list(self.betas)} must lie in [0, 1)",
        )
        idle = {
            "momentum": self.kind != "muon",
            "decay_frac": self.schedule != "wsd",
            "final_lr_frac": self.schedule == "constant",
        }
        for key in self.changed_keys():
            require(
                not idle.get(key),
                f"optimizer.{key} would have no effect with kind = {self.kind}, schedule = "
                f"{self.schedule}; remove it or change that",
            )
        return self


class PretrainUpdate(Settings):
    """Size of a step, how it is cut, and what saves memory or time; never changes the gradient."""

    batch_tokens: int = Field(
        524_288, ge=8, description="Tokens of one optimizer step, over all processes."
    )
    micro_batch_tokens: int = Field(
        16_384, ge=8, description="Tokens of one forward and backward pass of a process."
    )
    activation_checkpointing: bool = Field(
        False, description="Compute layers again in backward instead of keeping what they made."
    )
    compile: bool = Field(
        False,
        description="Compile layers with torch.compile: minutes at the start and where stages "
        "begin, faster steps. Needs a C++ compiler, or triton on a GPU.",
    )
    shard: bool = Field(
        False,
        description="Shard weights and moments over the processes of torchrun (FSDP2); false = "
        "each process holds all of them.",
    )


class PretrainEvaluation(Settings):
    """Loss of the whole model on held-out tokens, whatever subnetwork is in training."""

    every: int | None = Field(
        None, ge=1, description="After this many steps. Steps; null = before and after only."
    )
    sequences: int | None = Field(
        256, ge=1, description="The first held-out sequences. Sequences; null = all."
    )


class Energy(Settings):
    """Factors that turn time into energy and emissions, in the report only."""

    watts_per_process: float | None = Field(
        None, gt=0, description="Power of the device of a process. W; null = not reported."
    )
    kg_co2_per_kwh: float = Field(
        0.445,
        ge=0,
        description="Emissions of electricity, kg CO2 per kWh; the default is the world's mean "
        "of 2024 (IEA, Electricity 2025).",
    )

    @model_validator(mode="after")
    def _check(self) -> Energy:
        if self.watts_per_process is None:
            forbid_without_effect("energy", self, "energy.watts_per_process is null")
        return self


class PretrainConfig(Settings):
    """Pretraining on token files, whole or with subnetworks that grow."""

    name: Name = Field(description="Name of the run, and of its folder.")
    output_dir: PathText = Field(Path("runs"), description="The run's folder is made in here.")
    seed: int = Field(
        0, ge=0, lt=2**63, description="Seed of new weights, order of sequences, and subnetworks."
    )
    model: PretrainModel = Field(description="The model to train.")
    data: PretrainData = Field(description="What it learns from.")
    steps: int = Field(ge=1, description="Optimizer steps.")
    optimizer: PretrainOptimizer = Field(PretrainOptimizer(), description="The optimizer.")
    update: PretrainUpdate = Field(PretrainUpdate(), description="Size and cut of a step.")
    evolve: Evolve | None = Field(
        None, description="Train subnetworks that grow; null = the whole model from the start."
    )
    evaluation: PretrainEvaluation = Field(PretrainEvaluation(), description="Held-out loss.")
    log_every: int = Field(
        10, ge=1, description="Record metrics after this many steps; losses are means over them."
    )
    checkpoint: Checkpoints = Field(Checkpoints(every=1000), description="States to resume from.")
    energy: Energy = Field(Energy(), description="Factors of the report.")

    @model_validator(mode="after")
    def _check(self) -> PretrainConfig:
        length, update = self.data.sequence_length, self.update
        for key in ("batch_tokens", "micro_batch_tokens"):
            value = getattr(update, key)
            require(
                value % length == 0,
                f"update.{key} = {value} must be a multiple of data.sequence_length = {length}",
            )
        require(
            self.optimizer.warmup_steps < self.steps,
            f"optimizer.warmup_steps = {self.optimizer.warmup_steps} must be < steps = "
            f"{self.steps}, or the peak learning rate is never reached",
        )
        require(
            not (self.update.shard and self.optimizer.kind == "muon"),
            "optimizer.kind = muon needs whole matrices, which update.shard = true does not keep; "
            "choose adamw, or update.shard = false",
        )
        require(
            not (self.update.shard and self.update.compile),
            "update.compile = true has not been tried with update.shard = true; choose one",
        )
        shape = self.model.shape
        require(
            shape is None or shape.positions is None or shape.positions >= length,
            f"model.shape.positions = {shape.positions if shape else None} must be >= "
            f"data.sequence_length = {length}",
        )
        return self
