"""Prompts for reinforcement learning and evaluation.

A prompt's uid is (data set, row): the noise of its responses hangs on it, so it depends on where
the prompt stands and not on what it says or on the rows around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from ratoon.data.arithmetic import Split, make_problems
from ratoon.data.columns import Messages, answer_of, said_in
from ratoon.data.rows import KINDS as ROW_KINDS
from ratoon.data.rows import open_rows
from ratoon.errors import CapabilityError, ConfigError, DataError
from ratoon.models.tokenizer import Tokenizer
from ratoon.records import Prompt


@dataclass(frozen=True, slots=True)
class PromptStyle:
    """How prompts are shown to the model, and how long they may be (tokens; None = no limit).

    `chat_template` is as in `Tokenizer.prompt`. `limit` says in errors which settings the longest
    length comes from. What is too long is an error, or left out where `say_too_long` is told so;
    prompts without an answer stay, or are left out where `say_no_answer` is told so.
    """

    system_prompt: str | None = None
    chat_template: bool | None = None
    max_tokens: int | None = None
    limit: str | None = None
    say_too_long: Callable[[str], None] | None = None
    say_no_answer: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True)
class _Source:
    """One untokenised prompt."""

    row: int
    said: str | Messages
    answer: str | None
    fields: Mapping[str, Any]


def load_prompts(
    settings: Mapping[str, Any], tokenizer: Tokenizer, *, split: Split, style: PromptStyle
) -> list[Prompt]:
    """Load and tokenise the prompts that a configuration section describes.

    Args:
        settings: `kind` and the arguments of that kind, as in the configuration.
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
    prompts: list[Prompt] = []
    unanswered: list[int] = []
    for source in sources:
        if style.say_no_answer is not None and not (source.answer or "").strip():
            unanswered.append(source.row)
            continue
        said = source.said if isinstance(source.said, str) else question_of(source.said)
        ids = prompt_ids(said, tokenizer, style, f"{dataset}, row {source.row}")
        text, messages = (said, None) if isinstance(said, str) else (said[-1]["content"], said)
        prompts.append(
            Prompt(dataset, source.row, text, ids, source.answer, source.fields, messages)
        )
    if unanswered and style.say_no_answer is not None:
        if not prompts:
            raise DataError(f"{dataset}: no row has an answer; map the column that holds it.")
        style.say_no_answer(
            f"{dataset}: {len(unanswered)} of {len(unanswered) + len(prompts)} rows have no "
            f"answer, the first is row {unanswered[0]}. They are left out."
        )
    return only_fitting(dataset, prompts, [len(prompt.ids) for prompt in prompts], style)


def question_of(messages: Messages) -> Messages:
    """A conversation without the assistant's last turn, which is an answer to learn from."""
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def prompt_ids(
    said: str | Messages, tokenizer: Tokenizer, style: PromptStyle, where: str
) -> tuple[int, ...]:
    """Ids of a prompt, plain or a conversation; `where` names its row in errors.

    Raises:
        DataError: it is empty, or a conversation that the style cannot show.
    """
    if isinstance(said, str):
        ids = tokenizer.prompt(said, system=style.system_prompt, chat_template=style.chat_template)
    else:
        if style.chat_template is False or not tokenizer.has_chat_template:
            raise DataError(
                f"{where}: the prompt is a conversation, which needs a chat template, and none is "
                "used (the model has none, or data.chat_template is false); map a column with text."
            )
        if style.system_prompt is not None:
            if said and said[0]["role"] == "system":
                raise DataError(
                    f"{where}: the conversation has a system message of its own; leave "
                    "data.system_prompt out."
                )
            said = ({"role": "system", "content": style.system_prompt}, *said)
        ids = tokenizer.chat(said) if said else ()
    if not ids:
        raise DataError(f"{where}: the prompt is empty.")
    return ids


class _Row(Protocol):
    @property
    def row(self) -> int: ...


R = TypeVar("R", bound=_Row)


def only_fitting(
    dataset: str, items: Sequence[R], lengths: Sequence[int], style: PromptStyle
) -> list[R]:
    """The items that are not too long; the others are counted aloud.

    Raises:
        DataError: some are too long and are not to be left out, or all are.
    """
    limit = style.max_tokens
    kept = [
        item
        for item, length in zip(items, lengths, strict=True)
        if limit is None or length <= limit
    ]
    num_long = len(items) - len(kept)
    if not num_long:
        return kept
    longest, item = max(zip(lengths, items, strict=True), key=lambda pair: pair[0])
    found = (
        f"{num_long} of {len(items)} rows have more than {limit} tokens"
        f"{f' (`{style.limit}`)' if style.limit else ''}; the longest is row {item.row} with "
        f"{longest}"
    )
    if style.say_too_long is None or not kept:
        raise DataError(
            f"{dataset}: {found}. Raise the limit, shorten the rows"
            f"{' or drop them (data.too_long: drop)' if kept else ''}."
        )
    style.say_too_long(f"{dataset}: {found}. They are left out.")
    return kept


def _from_rows(
    kind: str, arguments: Mapping[str, Any], split: Split
) -> tuple[str, Iterator[_Source]]:
    found, columns = open_rows(kind, arguments), arguments["columns"]
    prompt_column, answer_column = columns["prompt"], columns["answer"]
    shown = {prompt_column} if isinstance(prompt_column, str) else set(prompt_column)

    def sources() -> Iterator[_Source]:
        for index, row in found.rows:
            where = found.where(index)
            said = said_in(row, prompt_column, where)
            answer = answer_of(row, answer_column, where)
            fields = {key: value for key, value in row.items() if key not in shown}
            yield _Source(index, said, answer, fields)

    return found.name, sources()


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


_KINDS: Mapping[str, Callable[[Mapping[str, Any], Split], tuple[str, Iterator[_Source]]]] = {
    **{kind: partial(_from_rows, kind) for kind in ROW_KINDS},
    "arithmetic": _from_arithmetic,
    "reasoning_gym": _from_gym,
}
