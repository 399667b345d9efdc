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
