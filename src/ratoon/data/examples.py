"""Examples for supervised fine-tuning: a prompt that is read, a completion that is learned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ratoon.data.arithmetic import Split, make_problems
from ratoon.data.columns import Messages, said_in
from ratoon.data.prompts import PromptStyle, only_fitting, prompt_ids
from ratoon.data.rows import KINDS as ROW_KINDS
from ratoon.data.rows import open_rows
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
        settings: `kind` and the arguments of that kind, as in the configuration.
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
    for row, said, completion in rows:
        where = f"{dataset}, row {row}"
        prompt = prompt_ids(said, tokenizer, style, where)
        if not completion:
            raise DataError(f"{where}: the completion is empty.")
        examples.append(Example(dataset, row, prompt, tokenizer.completion(completion)))
    lengths = [len(example.prompt_ids) + len(example.completion_ids) for example in examples]
    return only_fitting(dataset, examples, lengths, style)


# A data set's name and its rows: index, prompt, completion.
_Texts = tuple[str, Iterator[tuple[int, str | Messages, str]]]


def _from_rows(kind: str, arguments: Mapping[str, Any], split: Split) -> _Texts:
    found, columns = open_rows(kind, arguments), arguments["columns"]

    def texts() -> Iterator[tuple[int, str | Messages, str]]:
        for index, row in found.rows:
            where = found.where(index)
            if columns["messages"] is None:
                said = said_in(row, columns["prompt"], where)
                answer = said_in(row, columns["completion"], where)
            else:
                whole = said_in(row, columns["messages"], where)
                said, answer = (whole, "") if isinstance(whole, str) else (whole[:-1], whole[-1:])
            yield index, said, answer if isinstance(answer, str) else _last_turn(answer, where)

    return found.name, texts()


def _last_turn(messages: Messages, where: str) -> str:
    """What the assistant says in the one message of a completion."""
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"{where}: a conversation must end with one turn of the assistant, the one to learn, "
            f"found: {roles}."
        )
    return messages[0]["content"]


def _from_arithmetic(arguments: Mapping[str, Any], split: Split) -> _Texts:
    problems = make_problems(split, **arguments)
    return "arithmetic", (
        (row, problem.text, problem.solution) for row, problem in enumerate(problems)
    )


_KINDS: Mapping[str, Callable[[Mapping[str, Any], Split], _Texts]] = {
    **{kind: partial(_from_rows, kind) for kind in ROW_KINDS},
    "arithmetic": _from_arithmetic,
}
