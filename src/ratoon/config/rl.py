"""Settings of `ratoon rl`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ratoon.config.algorithm import Algorithm
from ratoon.config.base import Items, Name, PathText, Settings, forbid_without_effect, require
from ratoon.config.data import RLData
from ratoon.config.rewards import Reward, RewardRuntime, check_rewards
from ratoon.config.speculation import Drafter, Speculation, Spot
from ratoon.config.training import (
    Checkpoints,
    LoRA,
    ModelSettings,
    RLOptimizer,
    RLWorkers,
    Update,
    check_lora,
)


class Sampling(Settings):
    """How training responses are drawn: from the policy itself, at a temperature."""

    temperature: float = Field(
        1.0, ge=0, le=10, description="Divides the logits; 0 = most likely token."
    )
    max_tokens: int = Field(256, ge=1, description="Longest response. Tokens.")
    stop_strings: Items[Annotated[str, Field(min_length=1)]] = Field(
        (),
        description="Texts that end a response, with the token that completes one. They hold in "
        "evaluation, too.",
    )
    keep_stop_string: bool = Field(
        False, description="Whether rewards and stored text see the text that ended a response."
    )

    @model_validator(mode="before")
    @classmethod
    def _policy_only(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            cut = sorted(set(EvaluationSampling.model_fields) & set(values) - {"temperature"})
            require(
                not cut,
                f"{', '.join(cut)} cannot be used: training must draw from the policy itself, "
                "and a changed distribution is another one; remove it, or set it in "
                "evaluation.sampling",
            )
        return values

    @model_validator(mode="after")
    def _check(self) -> Sampling:
        require(
            bool(self.stop_strings) or not self.keep_stop_string,
            "sampling.keep_stop_string = true would have no effect because sampling.stop_strings "
            "is empty; remove it",
        )
        return self


class Rollout(Settings):
    """The engine that generates responses."""

    max_batch: int = Field(32, ge=1, description="Live sequences per worker.")
    max_length: int = Field(
        1024, ge=8, description="Prompt and response together, at most. Tokens."
    )
    prefill_chunk: int = Field(
        128, ge=1, description="Prompt tokens computed between two decode steps."
    )
    planner: Literal["longest_first", "first_come", "static"] = Field(
        "longest_first",
        description="Who gets which prompts, and when; changes no token. `longest_first` predicts "
        "lengths and measures speeds; `first_come` goes by free slots in the order of the data; "
        "`static` splits the data in advance, as `spot.deterministic_steps` always does.",
    )
    numerics: Literal["invariant", "tolerant"] = Field(
        "invariant",
        description="`invariant`: the same bits for any batch, proven at start, else a loud fall "
        "back to `tolerant`, which counts the tokens that rounding flips.",
    )


class EvaluationSampling(Settings):
    """How held-out responses are drawn, where not as the training ones."""

    temperature: float | None = Field(
        None, ge=0, le=10, description="Divides the logits; 0 = greedy; null = as in training."
    )
    top_k: int = Field(0, ge=0, description="Only the so many most likely tokens; 0 = all.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Only the most likely tokens of this mass; 1 = all."
    )
    min_p: float = Field(
        0.0, ge=0, le=1, description="Only tokens at least so likely beside the likeliest; 0 = all."
    )
    repetition_penalty: float = Field(
        1.0,
        gt=0,
        description="Divides positive and multiplies negative logits of tokens in prompt and "
        "response; 1 = none.",
    )
    presence_penalty: float = Field(
        0.0, ge=-2, le=2, description="Subtracted from the logits of tokens in the response."
    )
    frequency_penalty: float = Field(
        0.0, ge=-2, le=2, description="The same, once for each time they stand there."
    )
    logit_bias: dict[Annotated[int, Field(strict=False)], float] = Field(
        {}, description="Added to the logits of token ids."
    )
    suppress_tokens: Items[int] = Field((), description="Token ids that are never drawn.")
    min_new_tokens: int = Field(
        0, ge=0, description="So many first tokens of a response cannot end it. Tokens."
    )

    @model_validator(mode="after")
    def _check(self) -> EvaluationSampling:
        if self.temperature == 0:
            idle = sorted({"top_k", "top_p", "min_p"} & set(self.changed_keys()))
            require(
                not idle,
                f"{', '.join(idle)} would have no effect because temperature is 0; remove it",
            )
        return self


class Evaluation(Settings):
    """Held-out evaluation before, during and after, always with the same noise."""

    every: int | None = Field(
        None, ge=1, description="Also after this many steps. Steps; null = before and after only."
    )
    prompts: int = Field(64, ge=1, description="Held-out prompts, from the first on.")
    samples: int = Field(1, ge=1, description="Responses to each.")
    sampling: EvaluationSampling = Field(
        EvaluationSampling(), description="How they are drawn, where not as in training."
    )

    @model_validator(mode="after")
    def _check(self) -> Evaluation:
        require(
            self.sampling.temperature != 0 or self.samples == 1,
            f"evaluation.samples = {self.samples} would draw the same response again because "
            "evaluation.sampling.temperature is 0; set it to 1",
        )
        return self


class RLConfig(Settings):
    """Reinforcement learning of a policy on prompts with rewards."""

    serves: ClassVar[Mapping[str, tuple[str, ...]]] = {"speculation": ("drafter", "spot")}

    name: Name = Field(description="Name of the run, and of its folder.")
    output_dir: PathText = Field(Path("runs"), description="The run's folder is made in here.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of all sampling and ordering.")
    steps: int = Field(100, ge=1, description="RL steps.")
    model: ModelSettings = Field(description="The policy.")
    data: RLData = Field(description="Prompts.")
    rewards: Items[Reward] = Field(
        min_length=1, description="Their weighted sum is the reward of a response."
    )
    reward_runtime: RewardRuntime = Field(RewardRuntime(), description="How they are computed.")
    sampling: Sampling = Field(Sampling(), description="How responses are drawn.")
    algorithm: Algorithm = Field(Algorithm(), description="The policy-gradient method.")
    optimizer: RLOptimizer = Field(RLOptimizer(), description="The policy's optimizer.")
    update: Update = Field(Update(), description="How the training batch is cut.")
    lora: LoRA | None = Field(None, description="Train adapters; null = all weights.")
    rollout: Rollout = Field(Rollout(), description="The engine that generates responses.")
    speculation: Speculation = Field(Speculation(), description="Guessing ahead.")
    drafter: Drafter = Field(Drafter(), description="The learned drafter.")
    spot: Spot = Field(Spot(), description="Training the drafter in idle time.")
    workers: RLWorkers = Field(RLWorkers(), description="Processes.")
    replay_last_step: bool = Field(
        False,
        description="At the end, replay the last rollout with and without speculation, from the "
        "state before it: the tokens are compared and both times reported.",
    )
    evaluation: Evaluation = Field(Evaluation(), description="Held-out evaluation.")
    checkpoint: Checkpoints = Field(Checkpoints(), description="States to resume from.")

    @property
    def planner(self) -> Literal["longest_first", "first_come", "static"]:
        """Who plans training rollouts: in advance where the drafter's steps must not go by time."""
        fixed = self.spot.deterministic_steps is not None
        return "static" if fixed else self.rollout.planner

    @model_validator(mode="before")
    @classmethod
    def _nothing_to_train(cls, values: Any) -> Any:
        """Without a learned drafter there is nothing to train: `spot` is off unless asked for."""
        if not isinstance(values, Mapping) or "spot" in values:
            return values
        speculation = values.get("speculation", {})
        if isinstance(speculation, Mapping):
            off = speculation.get("enabled") is False
            if off or "learned" not in speculation.get("drafters", ["learned"]):
                return {**values, "spot": {"enabled": False}}
        return values

    @model_validator(mode="after")
    def _check(self) -> RLConfig:
        check_lora(self.lora, self.update)
        require(
            self.sampling.temperature > 0,
            "sampling.temperature = 0 makes all responses of a group equal "
            f"(algorithm.group_size = {self.algorithm.group_size}); it must be > 0",
        )
        require(
            self.sampling.max_tokens < self.rollout.max_length,
            f"sampling.max_tokens = {self.sampling.max_tokens} must be smaller than "
            f"rollout.max_length = {self.rollout.max_length}, which also holds the prompt",
        )
        require(
            self.evaluation.sampling.min_new_tokens <= self.sampling.max_tokens,
            f"evaluation.sampling.min_new_tokens = {self.evaluation.sampling.min_new_tokens} must "
            f"be <= sampling.max_tokens = {self.sampling.max_tokens}",
        )
        require(
            self.rollout.max_length <= self.update.micro_batch_tokens,
            f"rollout.max_length = {self.rollout.max_length} must be <= "
            f"update.micro_batch_tokens = {self.update.micro_batch_tokens}, or the longest "
            "response fits into no pass",
        )
        if not self.speculation.uses_learned:
            why = "speculation does not use the learned drafter"
            forbid_without_effect("drafter", self.drafter, why)
            require(
                not self.spot.enabled,
                f"spot.enabled = true would have no effect because {why}; set it to false",
            )
        require(
            not self.spot.enabled or self.rollout.max_length <= self.spot.buffer_tokens,
            f"rollout.max_length = {self.rollout.max_length} must be <= spot.buffer_tokens = "
            f"{self.spot.buffer_tokens}, or the drafter cannot keep the longest response",
        )
        require(
            self.speculation.enabled or not self.replay_last_step,
            "replay_last_step would compare nothing because speculation.enabled is false; "
            "set it to false",
        )
        require(
            self.spot.deterministic_steps is None or self.rollout.planner != "first_come",
            "rollout.planner = 'first_come' would have no effect because spot.deterministic_steps "
            "is given, which splits prompts in advance; remove one",
        )
        if self.data.eval is None:
            forbid_without_effect("evaluation", self.evaluation, "data.eval is null")
        check_rewards(self.rewards, self.reward_runtime, self.sampling.max_tokens)
        self._check_answers()
        if any(reward.kind == "reasoning_gym" for reward in self.rewards):
            require(
                self.data.train.kind == "reasoning_gym",
                "a reward of kind reasoning_gym needs data.train.kind = reasoning_gym, but it is "
                f"{self.data.train.kind}",
            )
        return self

    def _check_answers(self) -> None:
        compares = [r.kind for r in self.rewards if r.kind in ("number", "math_verify", "choice")]
        for split, source in (("train", self.data.train), ("eval", self.data.eval)):
            columns = getattr(source, "columns", None)
            require(
                not compares or columns is None or columns.answer is not None,
                f"data.{split}.columns.answer is null, but the reward {', '.join(compares)} "
                "compares with an answer; name the column that holds it",
            )
