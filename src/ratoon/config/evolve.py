"""Settings of training on subnetworks that grow, part of `ratoon pretrain`."""

from __future__ import annotations

import itertools
from typing import Literal

from pydantic import Field, model_validator

from ratoon.config.base import Items, Settings, forbid_without_effect, require

Scaling = Literal["inv_p", "inv_sqrt_p", "none"]


class EvolveStage(Settings):
    """A stage: from where on, and what share of the model takes part."""

    start: float = Field(ge=0, lt=1, description="Where it starts. Share of the run's steps.")
    layers: float = Field(1.0, gt=0, le=1, description="Share of layers that take part.")
    heads: float = Field(1.0, gt=0, le=1, description="Share of heads that take part.")
    neurons: float = Field(1.0, gt=0, le=1, description="Share of MLP neurons that take part.")

    @property
    def rates(self) -> tuple[float, float, float]:
        """Shares of layers, heads and neurons."""
        return self.layers, self.heads, self.neurons


class RandomChoice(Settings):
    """How random subnetworks are drawn and scaled."""

    every: Literal["step", "micro_batch"] = Field(
        "step", description="A subnetwork lasts for a step, or for a micro-batch."
    )
    share_indices: bool = Field(
        False, description="The same heads and neurons in all layers; false = drawn for each."
    )
    depth: Literal["layers", "sequences"] = Field(
        "layers",
        description="Skip whole layers, or let each layer run on a random share of the sequences.",
    )
    pinned_layers: Items[int] = Field(
        (), description="Layers that always run; negative numbers count from the end."
    )
    scale_attention: Scaling = Field(
        "inv_p", description="Scale of attention outputs at a share p of heads."
    )
    scale_mlp: Scaling = Field("inv_p", description="Scale of MLP outputs at a share p of neurons.")
    scale_layers: Scaling = Field(
        "inv_p", description="Scale of a layer's outputs at a share p of layers."
    )


class Evolve(Settings):
    """Subnetworks that grow until the whole model trains."""

    method: Literal["random", "nested"] = Field(
        "nested",
        description="A fresh random subnetwork each step (Evolving Subnetwork Training), or the "
        "same first layers, heads and neurons until they grow.",
    )
    stages: Items[EvolveStage] = Field(
        min_length=2, description="In order; the last is the whole model."
    )
    random: RandomChoice = Field(RandomChoice(), description="Random subnetworks.")
    new_layers: Literal["stack", "zero_output"] = Field(
        "stack",
        description="What nested layers begin as when they join: copies of the trained ones with "
        "their moments, or layers that add nothing yet.",
    )
    neuron_block: int = Field(1, ge=1, description="Neurons that are chosen together.")
    head_unit: Literal["group", "within_group"] | None = Field(
        None,
        description="Choose whole groups of a key/value head, or query heads inside each group; "
        "null = inside where there are at most 4 groups.",
    )
    unsampled: Literal["freeze", "decay"] = Field(
        "freeze",
        description="What becomes of weights outside a step's subnetwork: nothing, or momentum and "
        "weight decay go on.",
    )
    moments: Literal["keep", "reset"] = Field(
        "keep", description="What becomes of the optimizer's moments when a stage begins."
    )
    lr_scale: float = Field(
        1.0, gt=0, description="Factor on the learning rate before the last stage."
    )

    @model_validator(mode="after")
    def _check(self) -> Evolve:
        starts = [stage.start for stage in self.stages]
        require(starts[0] == 0, f"evolve.stages start at {starts}; the first must start at 0")
        require(
            all(before < after for before, after in itertools.pairwise(starts)),
            f"evolve.stages start at {starts}; each must start later than the one before",
        )
        for before, after in itertools.pairwise(self.stages):
            require(
                all(b >= a for a, b in zip(before.rates, after.rates, strict=True)),
                f"evolve.stages: rates {after.rates} follow {before.rates}; a subnetwork never "
                "shrinks",
            )
        require(
            self.stages[-1].rates == (1.0, 1.0, 1.0),
            f"evolve.stages: the last has rates {self.stages[-1].rates}; training must end with "
            "the whole model: give 1, 1, 1",
        )
        if self.method == "nested":
            forbid_without_effect("evolve.random", self.random, "evolve.method is nested")
        else:
            require(
                "new_layers" not in self.changed_keys(),
                "evolve.new_layers would have no effect because evolve.method is random; remove it",
            )
        return self
