"""Responses as they are stored in the run folder: text for people, ids for checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from ratoon.observe.files import write_lines
from ratoon.records import Completion, Prompt

Split = Literal["train", "eval"]


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


def completions_path(folder: Path, split: Split, step: int) -> Path:
    """File of one step inside a run's `completions` folder."""
    return folder / f"{split}_{step:06d}.jsonl"


def write_completions(
    folder: Path, split: Split, step: int, rows: Iterable[StoredCompletion]
) -> None:
    """Write the responses of one step, atomically, in the order given."""
    write_lines(completions_path(folder, split, step), (asdict(row) for row in rows))
