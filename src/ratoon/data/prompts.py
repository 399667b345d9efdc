"""Prompts for reinforcement learning and evaluation.

A prompt's uid is (data set, row): the noise of its responses hangs on it, so it depends on where
the prompt stands and not on what it says or on the rows around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratoon.data.arithmetic import Split, make_problems
from ratoon.data.jsonl import read_rows, text_of
from ratoon.errors import CapabilityError, ConfigError, DataError
from ratoon.models.tokenizer import Tokenizer
from ratoon.records import Prompt


@dataclass(frozen=True, slots=True)
class PromptStyle:
    """How prompts are shown to the model, and how long they may be (tokens; None = no limit).

    `chat_template` is as in `Tokenizer.prompt`. `limit` says in errors which settings the longest
    length comes from.
    """

    system_prompt: str | None = None
    chat_template: bool | None = None
    max_tokens: int | None = None
    limit: str | None = None


@dataclass(frozen=True, slots=True)
class _Source:
    """One untokenised prompt."""

    row: int
    text: str
    answer: str | None
    fields: Mapping[str, Any]


def load_prompts(
    settings: Mapping[str, Any], tokenizer: Tokenizer, *, split: Split, style: PromptStyle
) -> list[Prompt]:
    """Load and tokenise the prompts that a configuration section describes.

    Args:
        settings: `kind` (`"jsonl"`, `"arithmetic"` or `"reasoning_gym"`) and the arguments of
            that kind, as in the configuration.
        tokenizer: the policy's.
        split: names the data set; for generated problems it also decides which ones.
        style: how the prompts are shown.

    Raises:
        DataError: if a file is missing, empty or malformed, or a prompt is too long or empty.
        CapabilityError: if a package that the kind needs is missing.
        ConfigError: if reasoning-gym does not know the task or its options.
    """
    arguments = dict(settings)
    kind = arguments.pop("kind")
    dataset, sources = _KINDS[kind](arguments, split)
    return _tokenise(f"{dataset}/{split}", sources, tokenizer, style)


def _tokenise(
    dataset: str, sources: Iterator[_Source], tokenizer: Tokenizer, style: PromptStyle
) -> list[Prompt]:
    prompts = []
    for source in sources:
        ids = tokenizer.prompt(
            source.text, system=style.system_prompt, chat_template=style.chat_template
        )
        if not ids:
            raise DataError(f"{dataset}, row {source.row}: the prompt is empty.")
        prompts.append(Prompt(dataset, source.row, source.text, ids, source.answer, source.fields))
    refuse_long(
        dataset,
        {prompt.row: len(prompt.ids) for prompt in prompts},
        style,
    )
    return prompts


def refuse_long(dataset: str, lengths: Mapping[int, int], style: PromptStyle) -> None:
    """Raise `DataError` that counts the rows that are too long and names the longest."""
    max_tokens = style.max_tokens
    if max_tokens is None:
        return
    num_long = sum(length > max_tokens for length in lengths.values())
    if num_long:
        row = max(lengths, key=lengths.__getitem__)
        raise DataError(
            f"{dataset}: {num_long} of {len(lengths)} rows have more than {max_tokens} tokens"
            f"{f' (`{style.limit}`)' if style.limit else ''}; the longest is row {row} with "
            f"{lengths[row]}. Raise the limit or shorten the rows."
        )


def _from_jsonl(arguments: Mapping[str, Any], split: Split) -> tuple[str, Iterator[_Source]]:
    path, columns = Path(arguments["path"]), arguments["columns"]
    prompt_column, answer_column = columns["prompt"], columns["answer"]

    def sources() -> Iterator[_Source]:
        for index, row in read_rows(path, arguments.get("limit")):
            text = text_of(row, prompt_column, path, index)
            answer = None if answer_column is None else text_of(row, answer_column, path, index)
            fields = {key: row[key] for key in row if key not in (prompt_column, answer_column)}
            yield _Source(index, text, answer, fields)

    return path.stem, sources()


def _from_arithmetic(arguments: Mapping[str, Any], split: Split) -> tuple[str, Iterator[_Source]]:
    problems = make_problems(split, **arguments)
    return "arithmetic", (
        _Source(row, problem.text, problem.answer, {"num_terms": len(problem.terms)})
        for row, problem in enumerate(problems)
    )


def _from_gym(arguments: Mapping[str, Any], split: Split) -> tuple[str, Iterator[_Source]]:
    name, options = arguments["name"], arguments.get("options") or {}
    size, seed = arguments["size"], arguments["seed"]
    try:
        from reasoning_gym import create_dataset
    except ImportError:
        raise CapabilityError(
            f"Task {name!r} needs the package reasoning-gym, which is not installed: "
            'pip install "ratoon[tasks]".'
        ) from None
    try:
        dataset = create_dataset(name, size=size, seed=seed, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"reasoning-gym refuses the task {name!r} with options {options}: {error}"
        ) from error
    return name, (
        _Source(row, entry["question"], entry["answer"], {"task": name, "entry": entry})
        for row, entry in enumerate(dataset)
    )


_KINDS = {"jsonl": _from_jsonl, "arithmetic": _from_arithmetic, "reasoning_gym": _from_gym}
