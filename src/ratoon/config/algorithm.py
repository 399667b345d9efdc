"""The policy-gradient method of `ratoon rl`; `docs/algorithms.md` compares the names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from ratoon.config.base import Settings, require

# What an algorithm's name sets where the configuration does not.
PRESETS: dict[str, dict[str, Any]] = {
    "dr_grpo": {"scale_rewards": "none", "reduction": "constant"},
    "dapo": {"max_sampling_rounds": 10},
    "gspo": {"reduction": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    "rloo": {"reduction": "constant"},
    "reinforce_plus_plus": {"kl_in": "reward", "kl_estimator": "k1"},
}
_GROUP_RELATIVE = ("grpo", "dr_grpo", "dapo", "gspo")


class Algorithm(Settings):
    """The policy-gradient method."""

    name: Literal["grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce_plus_plus", "raft"] = Field(
        "grpo", description="How advantages are made, and the defaults of some settings below."
    )
    prompts_per_step: int = Field(8, ge=1, description="Prompts of one step.")
    group_size: int = Field(
        8, ge=1, description="Responses to each prompt; 1 for `reinforce_plus_plus` only."
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        "group",
        description="Advantages are divided by the standard deviation of the group's rewards, of "
        "all the step's, or not; dr_grpo: none.",
    )
    epochs: int = Field(1, ge=1, description="Passes over one step's responses.")
    minibatches: int = Field(
        1, ge=1, description="Optimizer steps that one pass over the responses is split over."
    )
    clip_low: float = Field(
        0.2, gt=0, lt=1, description="The ratio is clipped below 1 - this; gspo: 3e-4."
    )
    clip_high: float = Field(
        0.28, gt=0, description="The ratio is clipped above 1 + this; gspo: 4e-4."
    )
    importance_sampling_cap: float | None = Field(
        2.0,
        gt=1,
        description="A token's loss is multiplied by its probability in training over that in "
        "generation, at most this; equal bits give exactly 1. null = off.",
    )
    reduction: Literal["token_mean", "sequence_mean", "constant"] = Field(
        "token_mean",
        description="Mean over the step's tokens, over responses of the mean over their tokens, "
        "or sum divided by responses times sampling.max_tokens; gspo: sequence_mean, dr_grpo and "
        "rloo: constant.",
    )
    kl_coef: float = Field(
        0.0, ge=0, description="Weight of the divergence from the first policy; 0 = none."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="Estimator of that divergence (Schulman 2020); reinforce_plus_plus: k1.",
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss",
        description="Add it to the loss, or take it from the reward; reinforce_plus_plus: reward.",
    )
    entropy_coef: float = Field(
        0.0, ge=0, description="Weight of the policy's exact entropy as a bonus; 0 = none."
    )
    mask_truncated_completions: bool = Field(
        False, description="Learn nothing from responses that were cut at sampling.max_tokens."
    )
    max_sampling_rounds: int = Field(
        1,
        ge=1,
        description="Dynamic sampling: groups whose rewards are all equal are replaced by the next "
        "prompts', in at most so many rounds; 1 = none, dapo: 10.",
    )

    @property
    def penalises_rewards(self) -> bool:
        """Whether the divergence from the first policy is taken from rewards."""
        return self.kl_coef > 0 and self.kl_in == "reward"

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not isinstance(values.get("name"), str):
            return values
        return {**PRESETS.get(values["name"], {}), **values}

    @model_validator(mode="after")
    def _check(self) -> Algorithm:
        require(
            self.group_size > 1 or self.name == "reinforce_plus_plus",
            f"algorithm.group_size = {self.group_size} must be >= 2: {self.name} compares the "
            "responses to one prompt; only reinforce_plus_plus does without",
        )
        if self.name not in _GROUP_RELATIVE:
            self._forbid(f"{self.name} has a scale of its own", "scale_rewards")
        if self.name == "reinforce_plus_plus":
            self._forbid(f"{self.name} compares no groups", "max_sampling_rounds")
        if self.kl_coef == 0:
            self._forbid("algorithm.kl_coef is 0", "kl_estimator", "kl_in")
        if self.epochs * self.minibatches == 1:
            self._forbid(
                "with one epoch and one minibatch every ratio is 1", "clip_low", "clip_high"
            )
        require(
            self.minibatches <= self.prompts_per_step,
            f"algorithm.minibatches = {self.minibatches} must be <= algorithm.prompts_per_step = "
            f"{self.prompts_per_step}: a group is never split",
        )
        return self

    def _forbid(self, reason: str, *names: str) -> None:
        """Refuse settings that differ from the algorithm's own although they change nothing."""
        for name in names:
            value = getattr(self, name)
            own = PRESETS.get(self.name, {}).get(name, type(self).model_fields[name].default)
            require(
                value == own,
                f"algorithm.{name} = {value!r} would have no effect because {reason}; remove it or "
                "change that",
            )
