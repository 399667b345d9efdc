"""Where prompts come from, and what counts as a good answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ratoon.config.base import ExistingFile, Settings, require


class PromptColumns(Settings):
    """Which field of a row holds what."""

    prompt: str = Field("prompt", description="Field that holds the user's message.")
    answer: str | None = Field(
        "answer", description="Field that holds the reference answer; null if there is none."
    )


class JsonlPrompts(Settings):
    """Prompts from a file with one JSON object a line; a prompt's uid is its line."""

    kind: Literal["jsonl"] = "jsonl"
    path: ExistingFile = Field(description="The file.")
    columns: PromptColumns = Field(PromptColumns(), description="Names of the fields to read.")
    limit: int | None = Field(None, ge=1, description="Use the first rows only. Rows; null = all.")


class ReasoningGymPrompts(Settings):
    """A procedural task of the package `reasoning-gym` (extra `tasks`)."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    name: str = Field(description="Name of the task, such as `chain_sum`.")
    size: int = Field(1000, ge=1, description="Number of prompts.")
    seed: int = Field(0, ge=0, description="Seed of the generator; give `eval` another one.")
    options: dict[str, Any] = Field({}, description="The task's own options.")


class ArithmeticRange(Settings):
    """Size of the generated sums: a few long ones among many short ones."""

    size: int = Field(2000, ge=1, description="Number of problems.")
    seed: int = Field(0, ge=0, description="Seed of the generator.")
    min_terms: int = Field(2, ge=2, description="Fewest terms of a sum.")
    max_terms: int = Field(6, ge=2, description="Most terms of a sum.")
    max_value: int = Field(20, ge=1, description="Largest term.")

    @model_validator(mode="after")
    def _check(self) -> ArithmeticRange:
        require(
            self.min_terms <= self.max_terms,
            f"min_terms = {self.min_terms} must be <= max_terms = {self.max_terms}",
        )
        return self


class ArithmeticPrompts(ArithmeticRange):
    """Generated sums. `train` and `eval` share no problem, whatever their seeds."""

    kind: Literal["arithmetic"] = "arithmetic"


Prompts = Annotated[
    JsonlPrompts | ReasoningGymPrompts | ArithmeticPrompts, Field(discriminator="kind")
]


class RLData(Settings):
    """Prompts to learn from, prompts held out, and how both are shown to the model."""

    train: Prompts = Field(description="Prompts to learn from.")
    eval: Prompts | None = Field(None, description="Held-out prompts; null = no evaluation.")
    system_prompt: str | None = Field(
        None, description="System message put before each prompt; null = none."
    )
    chat_template: bool | None = Field(
        None,
        description="Wrap prompts in the model's chat template; null = where it has one, false = "
        "plain text.",
    )

    @model_validator(mode="after")
    def _check(self) -> RLData:
        check_template(self.system_prompt, self.chat_template)
        require(self.eval != self.train, "data.eval is the same as data.train; hold data out")
        return self


def check_template(system_prompt: str | None, chat_template: bool | None) -> None:
    """Refuse a system message that no template would show.

    Raises:
        ValueError: there is a system message but the chat template is off.
    """
    require(
        system_prompt is None or chat_template is not False,
        "data.system_prompt would have no effect because data.chat_template is false; "
        "write it into the prompts or switch the template on",
    )


class _Reward(Settings):
    weight: float = Field(1.0, gt=0, description="Factor in the weighted sum.")


class NumberReward(_Reward):
    """1 if the number after the last `Answer:`, or else the last one, is the answer, else 0."""

    kind: Literal["number"] = "number"


class ExactReward(_Reward):
    """1 if the response, without outer white space, is the answer, else 0."""

    kind: Literal["exact"] = "exact"


class FormatReward(_Reward):
    """1 if the pattern is found in the response, else 0."""

    kind: Literal["format"] = "format"
    pattern: str = Field(description="Regular expression, searched with dot matching newlines.")

    @model_validator(mode="after")
    def _check(self) -> FormatReward:
        import re

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
    """A function of yours: `(response, answer, fields) -> float`."""

    kind: Literal["python"] = "python"
    function: str = Field(
        pattern=r"^[^:]+:[A-Za-z_]\w*$",
        description="`path/to/file.py:function` or `package.module:function`.",
    )


Reward = Annotated[
    NumberReward | ExactReward | FormatReward | ReasoningGymReward | PythonReward,
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
