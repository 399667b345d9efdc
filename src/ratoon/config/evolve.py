"""Settings of training on subnetworks that grow, part of `ratoon pretrain`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ratoon.config.base import (
    Items,
    MustExist,
    PathText,
    Settings,
    forbid_without_effect,
    require,
)

Scaling = Literal["inv_p", "inv_sqrt_p", "none"]
GrowthFile = Annotated[
    PathText, MustExist("file", "an adaptive run writes it into its folder as growth.json")
]


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


class Adaptive(Settings):
    """Growth that is decided from losses.

    Now and then a copy of the run trains for a few steps at the next larger rates and at full ones;
    the subnetwork grows when a larger one's held-out loss falls faster per operation than its own.
    """

    layers: float = Field(0.5, gt=0, le=1, description="Share of layers to begin with.")
    heads: float = Field(0.5, gt=0, le=1, description="Share of heads to begin with.")
    neurons: float = Field(0.5, gt=0, le=1, description="Share of MLP neurons to begin with.")
    quantum: float = Field(
        0.25, gt=0, le=1, description="Rates grow by this much: layers first, then the others."
    )
    min_frac: float = Field(
        0.1, gt=0, lt=1, description="Shortest stage. Share of the run's steps."
    )
    max_frac: float = Field(0.4, gt=0, le=1, description="Longest stage. Share of the run's steps.")
    deadline_frac: float = Field(
        0.6, gt=0, lt=1, description="The whole model trains from here on. Share of the steps."
    )
    observe_every: int = Field(
        50, ge=1, description="Measure the subnetwork's held-out loss after this many steps."
    )
    window: int = Field(4, ge=2, description="Such losses that its slope is taken from.")
    check_every: int = Field(200, ge=1, description="Probe after this many steps at the soonest.")
    probe_steps: int = Field(20, ge=1, description="Optimizer steps of a probe.")
    margin: float = Field(
        1.0, gt=0, description="A larger subnetwork's slope must exceed its own by this factor."
    )

    @model_validator(mode="after")
    def _check(self) -> Adaptive:
        require(
            min(self.layers, self.heads, self.neurons) < 1,
            "evolve.adaptive begins with the whole model; lower a rate, or remove evolve",
        )
        require(
            self.min_frac <= min(self.max_frac, self.deadline_frac),
            f"evolve.adaptive.min_frac = {self.min_frac} must be <= max_frac = {self.max_frac} and "
            f"<= deadline_frac = {self.deadline_frac}",
        )
        return self


class Evolve(Settings):
    """Subnetworks that grow until the whole model trains."""

    method: Literal["random", "nested"] = Field(
        "nested",
        description="A fresh random subnetwork each step (Evolving Subnetwork Training), or the "
        "same first layers, heads and neurons until they grow.",
    )
    stages: Items[EvolveStage] = Field(
        (), description="Fixed stages, in order; the last is the whole model."
    )
    adaptive: Adaptive | None = Field(
        None, description="Growth decided from losses, instead of `stages`."
    )
    replay: GrowthFile | None = Field(
        None,
        description="growth.json of an adaptive run: grow where that run grew, without probes. The "
        "same weights come out where all else is the same.",
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
    switch_sequences: int = Field(
        0,
        ge=0,
        description="Measure subnetwork and whole model on so many held-out sequences before and "
        "after each switch; 0 = not.",
    )
    switch_draws: int = Field(
        8, ge=1, description="Random subnetworks whose loss is averaged at a switch."
    )
    lr_scale: float = Field(
        1.0, gt=0, description="Factor on the learning rate before the last stage."
    )

    @model_validator(mode="after")
    def _check(self) -> Evolve:
        given = (bool(self.stages), self.adaptive is not None, self.replay is not None)
        require(sum(given) == 1, "evolve: give one of stages, adaptive and replay")
        if self.stages:
            _check_stages(self.stages)
        require(
            self.switch_sequences > 0 or "switch_draws" not in self.changed_keys(),
            "evolve.switch_draws would have no effect because evolve.switch_sequences is 0",
        )
        require(
            self.switch_sequences == 0 or self.random.depth == "layers",
            f"evolve.switch_sequences = {self.switch_sequences} needs evolve.random.depth = layers:"
            " with sequences, a draw is no part of the model",
        )
        if self.method == "nested":
            require(
                "switch_draws" not in self.changed_keys(),
                "evolve.switch_draws would have no effect because evolve.method is nested; "
                "remove it",
            )
            forbid_without_effect("evolve.random", self.random, "evolve.method is nested")
        else:
            require(
                "new_layers" not in self.changed_keys(),
                "evolve.new_layers would have no effect because evolve.method is random; remove it",
            )
        return self


def _check_stages(stages: Sequence[EvolveStage]) -> None:
    starts = [stage.start for stage in stages]
    require(starts[0] == 0, f"evolve.stages start at {starts}; the first must start at 0")
    require(
        len(stages) > 1,
        "evolve.stages has one stage only, which is training of the whole model; remove evolve",
    )
    require(
        all(before < after for before, after in itertools.pairwise(starts)),
        f"evolve.stages start at {starts}; each must start later than the one before",
    )
    for before, after in itertools.pairwise(stages):
        require(
            all(b >= a for a, b in zip(before.rates, after.rates, strict=True)),
            f"evolve.stages: rates {after.rates} follow {before.rates}; a subnetwork never shrinks",
        )
    require(
        stages[-1].rates == (1.0, 1.0, 1.0),
        f"evolve.stages: the last has rates {stages[-1].rates}; training must end with the whole "
        "model: give 1, 1, 1",
    )
