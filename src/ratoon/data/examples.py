"""Examples for supervised fine-tuning: a prompt that is read, a completion that is learned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratoon.data.arithmetic import Split, make_problems
from ratoon.data.jsonl import read_rows, text_of
from ratoon.data.prompts import PromptStyle, refuse_long
from ratoon.errors import DataError
from ratoon.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Example:
    """One tokenised example; `completion_ids` ends with the end of the model's turn."""

    dataset: str
    row: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]


def load_examples(
    settings: Mapping[str, Any], tokenizer: Tokenizer, *, split: Split, style: PromptStyle
) -> list[Example]:
    """Load and tokenise the examples that a configuration section describes.

    Args:
        settings: `kind` (`"jsonl"` or `"arithmetic"`) and the arguments of that kind.
        tokenizer: the policy's.
        split: names the data set; for generated problems it also decides which ones.
        style: how prompts are shown; `max_tokens` bounds prompt and completion together.

    Raises:
        DataError: if a file is missing, empty or malformed, or an example is too long or empty.
    """
    arguments = dict(settings)
    kind = arguments.pop("kind")
    dataset, rows = _KINDS[kind](arguments, split)
    dataset = f"{dataset}/{split}"
    examples = []
    for row, text, completion in rows:
        prompt = tokenizer.prompt(
            text, system=style.system_prompt, chat_template=style.chat_template
        )
        if not prompt:
            raise DataError(f"{dataset}, row {row}: the prompt is empty.")
        if not completion:
            raise DataError(f"{dataset}, row {row}: the completion is empty.")
        examples.append(Example(dataset, row, prompt, tokenizer.completion(completion)))
    lengths = {
        example.row: len(example.prompt_ids) + len(example.completion_ids) for example in examples
    }
    refuse_long(dataset, lengths, style)
    return examples


# A data set's name and its (row, prompt, completion) texts.
_Texts = tuple[str, Iterator[tuple[int, str, str]]]


def _from_jsonl(arguments: Mapping[str, Any], split: Split) -> _Texts:
    path, columns = Path(arguments["path"]), arguments["columns"]
    rows = read_rows(path, arguments.get("limit"))
    return path.stem, (
        (
            index,
            text_of(row, columns["prompt"], path, index),
            text_of(row, columns["completion"], path, index),
        )
        for index, row in rows
    )


def _from_arithmetic(arguments: Mapping[str, Any], split: Split) -> _Texts:
    problems = make_problems(split, **arguments)
    return "arithmetic", (
        (row, problem.text, problem.solution) for row, problem in enumerate(problems)
    )


_KINDS = {"jsonl": _from_jsonl, "arithmetic": _from_arithmetic}
