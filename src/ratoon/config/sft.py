"""Settings of `ratoon sft`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ratoon.config.base import Name, PathText, Settings, require
from ratoon.config.data import (
    ArithmeticRange,
    CsvFile,
    HubSet,
    JsonFile,
    JsonlFile,
    ParquetFile,
    check_template,
    presets,
)
from ratoon.config.training import (
    Checkpoints,
    LoRA,
    ModelSettings,
    SFTOptimizer,
    Update,
    Workers,
    check_lora,
)


class ExampleColumns(Settings):
    """Which column of a row holds what; `a.b` is column b inside column a."""

    prompt: str = Field(
        "prompt", description="Column with the user's message, or a conversation up to the answer."
    )
    completion: str = Field("completion", description="Column with the answer to learn.")
    messages: str | None = Field(
        None,
        description="Instead of both: column with a conversation, whose last turn is learned.",
    )

    @model_validator(mode="after")
    def _check(self) -> ExampleColumns:
        idle = [key for key in self.changed_keys() if key != "messages"]
        require(
            self.messages is None or not idle,
            f"columns.{', columns.'.join(idle)} would have no effect because columns.messages = "
            f"{self.messages!r} holds the whole conversation; remove one of them",
        )
        return self


EXAMPLE_PRESETS = {
    "trl": {"prompt": "prompt", "completion": "completion"},
    "messages": {"messages": "messages"},
}


class _Examples(Settings):
    columns: Annotated[ExampleColumns, presets(ExampleColumns, EXAMPLE_PRESETS)] = Field(
        ExampleColumns(),
        description="Columns to read, or `trl` (prompt and completion) or `messages`.",
    )
    limit: int | None = Field(None, ge=1, description="Use the first rows only. Rows; null = all.")


class JsonlExamples(_Examples, JsonlFile):
    """Examples from a file with one JSON object a line."""


class JsonExamples(_Examples, JsonFile):
    """Examples from a file with one JSON list of objects."""


class CsvExamples(_Examples, CsvFile):
    """Examples from a CSV file whose first line names the columns."""


class ParquetExamples(_Examples, ParquetFile):
    """Examples from a Parquet file (extra `parquet`)."""


class HubExamples(_Examples, HubSet):
    """Examples from a data set of the Hugging Face hub (extra `hub`)."""


class ArithmeticExamples(ArithmeticRange):
    """Generated sums with worked solutions."""

    kind: Literal["arithmetic"] = "arithmetic"


Examples = Annotated[
    JsonlExamples | JsonExamples | CsvExamples | ParquetExamples | HubExamples | ArithmeticExamples,
    Field(discriminator="kind"),
]


class SFTData(Settings):
    """Examples to learn from, examples held out, and how both are shown to the model."""

    train: Examples = Field(description="Examples to learn from.")
    eval: Examples | None = Field(None, description="Held-out examples; null = none.")
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
        description="What an example longer than `max_length` does: `drop` leaves it out, and the "
        "run says how many there were.",
    )

    @model_validator(mode="after")
    def _check(self) -> SFTData:
        check_template(self.system_prompt, self.chat_template)
        require(self.eval != self.train, "data.eval is the same as data.train; hold data out")
        return self


class SFTUpdate(Update):
    """Size of a step, and how it is cut."""

    batch_tokens: int = Field(
        8192, ge=64, description="Packed tokens, prompts included, of one optimizer step."
    )


class SFTConfig(Settings):
    """Supervised fine-tuning on completions: prompts are read, completions are learned."""

    name: Name = Field(description="Name of the run, and of its folder.")
    output_dir: PathText = Field(Path("runs"), description="The run's folder is made in here.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the order of examples.")
    model: ModelSettings = Field(description="The model to train.")
    data: SFTData = Field(description="Examples.")
    epochs: int | None = Field(None, ge=1, description="Passes over the examples.")
    steps: int | None = Field(None, ge=1, description="Optimizer steps, instead of `epochs`.")
    max_length: int = Field(1024, ge=8, description="Longest example; see `data.too_long`. Tokens.")
    optimizer: SFTOptimizer = Field(SFTOptimizer(), description="The optimizer.")
    update: SFTUpdate = Field(SFTUpdate(), description="Size of a step.")
    lora: LoRA | None = Field(None, description="Train adapters; null = all weights.")
    workers: Workers = Field(Workers(), description="Processes.")
    evaluate_every: int | None = Field(
        None,
        ge=1,
        description="Held-out loss after this many steps. Steps; null = before and after only.",
    )
    checkpoint: Checkpoints = Field(Checkpoints(every=100), description="States to resume from.")

    @model_validator(mode="after")
    def _check(self) -> SFTConfig:
        check_lora(self.lora, self.update)
        require(
            (self.epochs is None) != (self.steps is None),
            f"give either epochs or steps, but epochs = {self.epochs} and steps = {self.steps}",
        )
        require(
            self.evaluate_every is None or self.data.eval is not None,
            "evaluate_every would have no effect because data.eval is null; remove it",
        )
        require(
            self.max_length <= self.update.micro_batch_tokens,
            f"max_length = {self.max_length} must be <= update.micro_batch_tokens = "
            f"{self.update.micro_batch_tokens}, or the longest example fits into no pass",
        )
        return self
