"""Speculative decoding, the drafter behind it, and its training in idle time."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ratoon.config.base import DrafterDirectory, Items, Settings, forbid_without_effect, require


class Speculation(Settings):
    """When and how far to guess ahead. Changes speed only: the tokens stay the same."""

    enabled: bool = Field(True, description="Guess ahead at all.")
    drafters: Items[Literal["suffix", "learned"]] = Field(
        ("suffix", "learned"),
        min_length=1,
        description="Who proposes: `suffix` repeats earlier text, `learned` is an EAGLE-3 model. "
        "Both together fill one tree.",
    )
    depth: int = Field(4, ge=1, le=16, description="Tokens guessed ahead at most.")
    branching: int = Field(
        4, ge=1, le=32, description="Candidates that each drafter gives per node. Candidates."
    )
    beam: int = Field(
        4, ge=1, le=128, description="Nodes of a level that get candidates of their own. Nodes."
    )
    budget: int = Field(
        12, ge=1, le=128, description="Candidates verified per sequence and step. Candidates."
    )
    max_rows: int = Field(
        64,
        ge=2,
        le=1024,
        description="Rows of one verification, all sequences together: the more sequences are "
        "live, the smaller their trees. Rows.",
    )
    tuner: Literal["cost_model", "bandit", "table"] = Field(
        "cost_model",
        description="Who chooses the tree of each step. `cost_model` weighs measured seconds "
        "against measured gains, and decodes plainly where guessing loses; `bandit` is TLT's, "
        "which tries several depths; `table` goes by the live batch alone.",
    )
    max_live_batch: int = Field(
        24,
        ge=1,
        description="Of `bandit` and `table`: guess ahead while at most this many sequences are "
        "live.",
    )
    hysteresis: int = Field(
        2,
        ge=0,
        description="Of `table`: once guessing, go on until the live batch exceeds the limit by "
        "this many.",
    )

    @model_validator(mode="after")
    def _check(self) -> Speculation:
        require(
            len(set(self.drafters)) == len(self.drafters),
            f"speculation.drafters = {list(self.drafters)} names one twice",
        )
        shared = 2 * self.max_live_batch <= self.max_rows
        used = {"table": {"max_live_batch", "hysteresis"}, "bandit": {"max_live_batch"}}
        idle = {"max_live_batch", "hysteresis"} - used.get(self.tuner, set())
        idle &= set(self.changed_keys())
        require(
            not self.enabled or not idle,
            f"speculation.{', speculation.'.join(sorted(idle))} would have no effect because "
            f"speculation.tuner is {self.tuner}; remove it, or set tuner: table",
        )
        require(
            not self.enabled or self.tuner == "cost_model" or shared,
            f"speculation.max_live_batch = {self.max_live_batch} must be <= half of "
            f"speculation.max_rows = {self.max_rows}: each sequence has a root and a candidate",
        )
        if not self.enabled:
            forbid_without_effect("speculation", self, "speculation.enabled is false", "enabled")
        require(
            self.budget >= self.depth,
            f"speculation.budget = {self.budget} must be >= speculation.depth = {self.depth}: "
            "one candidate for each level is the smallest tree that deep",
        )
        return self

    @property
    def uses_learned(self) -> bool:
        """Whether the learned drafter proposes in this run."""
        return self.enabled and "learned" in self.drafters


class Drafter(Settings):
    """The learned drafter and how it is trained. Ignored by the policy's gradient."""

    path: DrafterDirectory | None = Field(
        None, description="A trained drafter to start from; null = start afresh."
    )
    draft_vocab_size: int = Field(
        8192, ge=16, description="Tokens that the drafter can propose, the most frequent."
    )
    window: int = Field(
        512, ge=16, description="The drafter sees this much of the context. Tokens."
    )
    unroll: int = Field(
        4,
        ge=1,
        le=8,
        description="Training follows the drafter's own output so many steps. Below "
        "`speculation.depth` the deeper guesses are untrained and mostly wrong.",
    )
    lr: float = Field(1e-3, gt=0, lt=1, description="Learning rate of its AdamW.")
    batch_tokens: int = Field(256, ge=32, description="Tokens in one optimizer step.")
    loss: Literal["kl", "tv", "hybrid"] = Field(
        "hybrid",
        description="`kl` imitates the policy's distribution, `tv` raises the chance of a match, "
        "`hybrid` is `kl` + 3 `tv`.",
    )
    compiled: bool = Field(
        False,
        description="Compile its optimizer with torch.compile: some seconds at the start of every "
        "worker, a tenth of each training step less. Needs a C++ compiler.",
    )


class Spot(Settings):
    """Training of the drafter by workers that wait for the last long responses."""

    enabled: bool = Field(True, description="Train the drafter in idle time.")
    publish_every_steps: int = Field(
        8, ge=1, description="Send new weights to those still decoding. Drafter optimizer steps."
    )
    share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of a waiting worker's time that trains. Pauses leave memory bandwidth "
        "to those still decoding.",
    )
    deterministic_steps: int | None = Field(
        None,
        ge=1,
        description="Train exactly this many drafter steps after each rollout instead of while "
        "idle, so that a run repeats bit for bit. Optimizer steps; null = use idle time.",
    )
    buffer_tokens: int = Field(
        65536, ge=1024, description="Features kept for training, long responses first. Tokens."
    )

    @model_validator(mode="after")
    def _check(self) -> Spot:
        if not self.enabled:
            forbid_without_effect("spot", self, "spot.enabled is false", "enabled")
        require(
            self.deterministic_steps is None or "share" not in self.changed_keys(),
            "spot.share would have no effect because spot.deterministic_steps is given; remove one",
        )
        return self
