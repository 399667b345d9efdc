"""Where prompts and examples come from, and how they are shown to the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ratoon.config.base import ExistingFile, Items, Settings, require


class JsonlFile(Settings):
    """Rows from a file with one JSON object a line; a row's number is its line."""

    kind: Literal["jsonl"] = "jsonl"
    path: ExistingFile = Field(description="The file.")


class JsonFile(Settings):
    """Rows from a file with one JSON list of objects."""

    kind: Literal["json"] = "json"
    path: ExistingFile = Field(description="The file.")


class CsvFile(Settings):
    """Rows from a CSV file whose first line names the columns."""

    kind: Literal["csv"] = "csv"
    path: ExistingFile = Field(description="The file.")


class ParquetFile(Settings):
    """Rows from a Parquet file (extra `parquet`)."""

    kind: Literal["parquet"] = "parquet"
    path: ExistingFile = Field(description="The file.")


class HubSet(Settings):
    """Rows of a data set of the Hugging Face hub (extra `hub`)."""

    kind: Literal["hub"] = "hub"
    name: str = Field(description="Its id, or a folder that the package `datasets` can load.")
    subset: str | None = Field(None, description="One of its configurations; null = the default.")
    split: str = Field(description="Its split, such as `train` or `test[:200]`.")
    revision: str | None = Field(None, description="Commit, branch or tag; null = the newest.")


def presets(columns: type[Settings], names: Mapping[str, Mapping[str, Any]]) -> BeforeValidator:
    """Puts the columns in the place of a name for them, so that a resolved file spells them out."""

    def expand(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        require(
            value in names,
            f"columns = {value!r}: must be one of {', '.join(names)}, or a section that names "
            "the columns",
        )
        return dict(names[value])

    return BeforeValidator(expand, json_schema_input_type=str | columns)


class PromptColumns(Settings):
    """Which column of a row holds what; `a.b` is column b inside column a."""

    prompt: str | Items[str] = Field(
        "prompt",
        description="Column with the user's message or a conversation (a list of messages with "
        "`role` and `content`); several are joined by a space.",
    )
    answer: str | None = Field(
        "answer", description="Column with the reference answer; null if there is none."
    )


PROMPT_PRESETS = {
    "trl": {"prompt": "prompt", "answer": None},
    "verl": {"prompt": "prompt", "answer": "reward_model.ground_truth"},
    "openrlhf": {"prompt": "input", "answer": "label"},
}


class _Prompts(Settings):
    columns: Annotated[PromptColumns, presets(PromptColumns, PROMPT_PRESETS)] = Field(
        PromptColumns(), description="Columns to read, or `trl`, `verl` or `openrlhf` for theirs."
    )
    limit: int | None = Field(None, ge=1, description="Use the first rows only. Rows; null = all.")


class JsonlPrompts(_Prompts, JsonlFile):
    """Prompts from a file with one JSON object a line; a prompt's uid is its line."""


class JsonPrompts(_Prompts, JsonFile):
    """Prompts from a file with one JSON list of objects."""


class CsvPrompts(_Prompts, CsvFile):
    """Prompts from a CSV file whose first line names the columns."""


class ParquetPrompts(_Prompts, ParquetFile):
    """Prompts from a Parquet file (extra `parquet`)."""


class HubPrompts(_Prompts, HubSet):
    """Prompts from a data set of the Hugging Face hub (extra `hub`)."""


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
    JsonlPrompts
    | JsonPrompts
    | CsvPrompts
    | ParquetPrompts
    | HubPrompts
    | ReasoningGymPrompts
    | ArithmeticPrompts,
    Field(discriminator="kind"),
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

    too_long: Literal["error", "drop"] = Field(
        "error",
        description="What a prompt does that leaves no room for the longest response: `drop` "
        "leaves it out, and the run says how many there were.",
    )
    no_answer: Literal["keep", "drop"] = Field(
        "keep",
        description="What happens to a prompt whose answer is null or blank: a reward that needs "
        "one refuses it, or `drop` leaves it out, and the run says how many there were.",
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
