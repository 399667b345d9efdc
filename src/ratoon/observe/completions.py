"""Responses as they are stored in the run folder: text for people, ids for checks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ratoon.errors import DataError
from ratoon.observe.files import read_lines, write_lines
from ratoon.records import Completion, DrawKey, Prompt, Stream

Split = Literal["train", "eval"]

_INTEGERS = ("seed", "round", "row", "sample", "attempt", "policy_version")
_TYPES = "what a run stores there: whole numbers, in logprobs finite numbers, or text"


@dataclass(frozen=True, slots=True)
class StoredCompletion:
    """One response with its reward; one line of `completions/<split>_<step>.jsonl`.

    `seed`, `stream`, `round`, `dataset`, `row`, `sample` and `attempt` are the response's key,
    so that the file alone says which noise drew each token.
    """

    seed: int
    stream: str
    round: int
    dataset: str
    row: int
    sample: int
    attempt: int
    policy_version: int
    prompt: str
    response: str
    answer: str | None
    reward: float
    finish: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward_parts: Mapping[str, float] = field(default_factory=dict)


def stored(
    completion: Completion,
    prompt: Prompt,
    *,
    response: str,
    reward: float,
    reward_parts: Mapping[str, float] | None = None,
) -> StoredCompletion:
    """Join a completion, the prompt it answers, its text and its reward."""
    key = completion.key
    return StoredCompletion(
        seed=key.seed,
        stream=key.stream.name.lower(),
        round=key.round,
        dataset=key.dataset,
        row=key.row,
        sample=key.sample,
        attempt=key.attempt,
        policy_version=completion.policy_version,
        prompt=prompt.text,
        response=response,
        answer=prompt.answer,
        reward=reward,
        finish=completion.finish,
        prompt_ids=completion.prompt_ids,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        reward_parts=dict(reward_parts or {}),
    )


def key_of(row: StoredCompletion) -> DrawKey:
    """The key that a stored response names. Its stream must be one."""
    return DrawKey(
        seed=row.seed,
        stream=Stream[row.stream.upper()],
        round=row.round,
        dataset=row.dataset,
        row=row.row,
        sample=row.sample,
        attempt=row.attempt,
    )


def completions_path(folder: Path, split: Split, step: int) -> Path:
    """File of one step inside a run's `completions` folder."""
    return folder / f"{split}_{step:06d}.jsonl"


def write_completions(
    folder: Path, split: Split, step: int, rows: Iterable[StoredCompletion]
) -> None:
    """Write the responses of one step, atomically, in the order given."""
    write_lines(completions_path(folder, split, step), (asdict(row) for row in rows))


def stored_steps(folder: Path) -> list[tuple[Split, int]]:
    """Of which steps there are responses, in the order in which they were drawn."""
    found: list[tuple[Split, int]] = []
    splits: tuple[Split, Split] = ("train", "eval")
    for split in splits:
        numbers = (path.stem.rpartition("_")[2] for path in folder.glob(f"{split}_*.jsonl"))
        found += [(split, int(number)) for number in numbers if number.isdecimal()]
    return sorted(found, key=lambda item: (item[1], splits.index(item[0])))


def read_completions(folder: Path, split: Split, step: int) -> list[StoredCompletion]:
    """The responses of one step, in the order in which they were stored.

    Raises: DataError if a line lacks a value or holds another type.
    """
    path = completions_path(folder, split, step)
    return [_checked(row, f"{path}, line {n}") for n, row in enumerate(read_lines(path), start=1)]


def _checked(row: dict[str, Any], place: str) -> StoredCompletion:
    known = fields(StoredCompletion)
    needed = {item.name for item in known if item.default_factory is MISSING}
    missing, unknown = sorted(needed - row.keys()), sorted(row.keys() - {f.name for f in known})
    if missing or unknown:
        raise DataError(f"{place}: missing values {missing}, unknown values {unknown}")
    lists: dict[str, type] = {"prompt_ids": int, "token_ids": int, "logprobs": float}
    wrong = [name for name in _INTEGERS if type(row[name]) is not int]
    wrong += [name for name in ("stream", "dataset", "finish") if type(row[name]) is not str]
    for name, kind in lists.items():
        items = row[name]
        if not isinstance(items, list) or any(type(item) is not kind for item in items):
            wrong.append(name)
    if not wrong and not all(map(math.isfinite, row["logprobs"])):
        wrong.append("logprobs")
    if wrong:
        raise DataError(f"{place}: {', '.join(wrong)} must hold {_TYPES}")
    return StoredCompletion(**row | {name: tuple(row[name]) for name in lists})
