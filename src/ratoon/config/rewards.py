"""What counts as a good response, and how that is computed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ratoon.config.base import Items, Settings, require


class _Reward(Settings):
    weight: float = Field(1.0, gt=0, description="Factor in the weighted sum.")


class NumberReward(_Reward):
    """1 if the number of the marked answer, or else the last one, is the answer's, else 0."""

    kind: Literal["number"] = "number"
    percent: bool = Field(
        False, description="`50%` is 0.5; otherwise the sign is a unit like any other."
    )


class ExactReward(_Reward):
    """1 if the response, without outer white space, is the answer, else 0."""

    kind: Literal["exact"] = "exact"
    final: bool = Field(
        False, description="Compare the marked answer instead of the whole response."
    )


class MathVerifyReward(_Reward):
    """1 if the answer is symbolically equal to the reference (extra `math`), else 0."""

    kind: Literal["math_verify"] = "math_verify"
    timeout_s: float = Field(
        5.0, gt=0, description="An answer that takes longer counts as wrong. Seconds."
    )


class ChoiceReward(_Reward):
    """1 if the response chooses the answer's letter, else 0."""

    kind: Literal["choice"] = "choice"
    letters: str = Field(
        "ABCDE", pattern=r"^[A-Z]{2,26}$", description="The letters to choose from."
    )


class LengthReward(_Reward):
    """0 up to `target`, falling linearly to -1 at `limit`: a penalty for long responses."""

    kind: Literal["length"] = "length"
    target: int = Field(ge=0, description="Longest response without a penalty. Tokens.")
    limit: int = Field(ge=1, description="Length of the full penalty. Tokens.")

    @model_validator(mode="after")
    def _check(self) -> LengthReward:
        require(
            self.target < self.limit,
            f"target = {self.target} must be smaller than limit = {self.limit}",
        )
        return self


class CodeReward(_Reward):
    """1 if the response's code passes the tests of its row, else 0."""

    kind: Literal["code"] = "code"
    allow_code_execution: bool = Field(
        False,
        description="Run what the model writes, confined; nothing is run unless this is true.",
    )
    tests: str | Items[str] = Field(
        "tests",
        description="Column with Python source, or a list of it, that raises on failure; or "
        "several such columns.",
    )
    timeout_s: float = Field(5.0, gt=0, description="Longest time of one program. Seconds.")
    memory_mb: int = Field(512, ge=64, description="Largest address space of one program. MB.")

    @model_validator(mode="after")
    def _check(self) -> CodeReward:
        require(
            self.allow_code_execution,
            "the reward `code` runs what the model writes (confined: see docs/rewards.md); say "
            "allow_code_execution: true to have that",
        )
        return self


class FormatReward(_Reward):
    """1 if the pattern is found in the response, else 0."""

    kind: Literal["format"] = "format"
    pattern: str = Field(description="Regular expression, searched with dot matching newlines.")

    @model_validator(mode="after")
    def _check(self) -> FormatReward:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(
                f"pattern {self.pattern!r} is not a regular expression: {error}"
            ) from None
        return self


class ReasoningGymReward(_Reward):
    """Score of the reasoning-gym task that the prompt came from."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    strict: bool = Field(
        True,
        description="Count only a full score: the scorers give wrong answers small rewards.",
    )


class PythonReward(_Reward):
    """A function of yours: `(response, answer, fields) -> float`, or as TRL or verl call theirs."""

    kind: Literal["python"] = "python"
    function: str = Field(
        pattern=r"^[^:]+:[A-Za-z_]\w*$",
        description="`path/to/file.py:function` or `package.module:function`.",
    )


Reward = Annotated[
    NumberReward
    | ExactReward
    | MathVerifyReward
    | ChoiceReward
    | FormatReward
    | LengthReward
    | ReasoningGymReward
    | CodeReward
    | PythonReward,
    Field(discriminator="kind"),
]


class RewardRuntime(Settings):
    """How rewards are computed, beside the rollout."""

    workers: int = Field(1, ge=1, le=64, description="Worker processes.")
    timeout_s: float = Field(10.0, gt=0, description="Longest time for one response. Seconds.")
    on_error: Literal["fail", "count"] = Field(
        "fail",
        description="What a reward that raises, hangs, or returns NaN or None does: `fail` ends "
        "the run, `count` gives 0 and is counted in `reward/errors`.",
    )


def check_rewards(rewards: Sequence[Reward], runtime: RewardRuntime, max_tokens: int) -> None:
    """Refuse rewards that could have no effect, or whose own clock could never run out.

    Raises:
        ValueError: a penalty begins beyond the longest response, or a reward's time is longer than
            the one that all rewards together have.
    """
    for reward in rewards:
        if isinstance(reward, LengthReward):
            require(
                reward.target < max_tokens,
                f"a reward of kind length with target = {reward.target} would have no effect "
                f"because sampling.max_tokens = {max_tokens}; lower target",
            )
        if isinstance(reward, MathVerifyReward | CodeReward):
            require(
                reward.timeout_s < runtime.timeout_s,
                f"timeout_s = {reward.timeout_s:g} of the reward {reward.kind} must be smaller "
                f"than reward_runtime.timeout_s = {runtime.timeout_s:g}, after which a response "
                "counts as a failure",
            )
