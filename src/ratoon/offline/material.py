"""What drafters are trained and measured on: a run's stored responses, or prompts to answer.

Every fifth prompt is held out, by a hash of its ids: whatever file or run it comes from, and
whoever asks, drafters are trained without it and measured on it alone.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from ratoon.config import RLConfig, load_config
from ratoon.data.documents import documents
from ratoon.data.prompts import PromptStyle, load_prompts
from ratoon.errors import DataError
from ratoon.models.tokenizer import Tokenizer
from ratoon.observe.completions import StoredCompletion, key_of, read_completions, stored_steps
from ratoon.observe.run_folder import RunFolder
from ratoon.offline.recorded import Ids
from ratoon.records import Completion

Kind = Literal["rollouts", "prompts", "text"]

HELD_OUT_EVERY = 5
PROMPT_TOKENS = 48
# Documents are read from their middle on: beginnings are titles and lists of contents.
_SKIPPED_CHARACTERS = 2000
_READ_CHARACTERS = 8 * PROMPT_TOKENS


class Given(NamedTuple):
    """A run folder, a file of prompts, or one of documents, and what it is called."""

    name: str
    kind: Kind
    path: Path


@dataclass(frozen=True, slots=True)
class Material:
    """Prompts, each as often as it is to be answered, and perhaps their stored answers.

    `stored` lies beside `prompts` and was drawn at `temperature`; both are None where responses are
    still to be drawn.
    """

    name: str
    prompts: Sequence[Ids]
    stored: Sequence[Completion] | None = None
    temperature: float | None = None

    def has_stored(self, temperature: float) -> bool:
        """Whether responses of this temperature are stored, or else must be drawn."""
        return self.stored is not None and temperature == self.temperature

    def longest(self, max_tokens: int, temperatures: Sequence[float]) -> int:
        """Tokens of the longest prompt and response, of which those drawn have `max_tokens`."""
        lengths = [len(item.prompt_ids) + len(item.token_ids) for item in self.stored or ()]
        if not all(map(self.has_stored, temperatures)):
            lengths.append(max(map(len, self.prompts)) + max_tokens)
        return max(lengths)


def is_held_out(prompt: Sequence[int]) -> bool:
    """Whether drafters are measured on this prompt, and never trained."""
    digest = hashlib.blake2b(",".join(map(str, prompt)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) % HELD_OUT_EVERY == 0


def read_material(given: Given, tokenizer: Tokenizer, *, held_out: bool, limit: int) -> Material:
    """At most `limit` prompts or stored responses, held-out ones or others.

    Of a run's training rollouts the newest come first: they are nearest to its policy.

    Raises: DataError if there are none, or what is stored is not of this tokenizer; ConfigError if
    a run's configuration is damaged.
    """

    def wanted(prompt: Sequence[int]) -> bool:
        return is_held_out(prompt) == held_out

    if given.kind == "rollouts":
        found = _stored(given, tokenizer, wanted, limit)
    else:
        prompts = filter(wanted, _PROMPTS[given.kind](tokenizer, given.path))
        found = Material(given.name, list(itertools.islice(prompts, limit)))
    if not found.prompts:
        side = "to measure on: every fifth is, by a hash" if held_out else "to train on"
        raise DataError(f"{given.path}: holds no prompts {side}; give more of them")
    return found


def _stored(
    given: Given, tokenizer: Tokenizer, wanted: Callable[[Ids], bool], limit: int
) -> Material:
    folder = RunFolder(given.path)
    if not folder.config.is_file():
        raise DataError(f"{given.path} holds no run: there is no {folder.config.name}")
    config = load_config(RLConfig, folder.config, may_miss=None)
    rows = (row for row in _newest_first(folder) if wanted(row.prompt_ids) and row.token_ids)
    chosen = list(itertools.islice(rows, limit))
    for row in chosen:
        largest = max(*row.prompt_ids, *row.token_ids)
        if largest >= tokenizer.vocab_size:
            raise DataError(
                f"{given.path}: token {largest} is stored there, but the model has "
                f"{tokenizer.vocab_size}; give the model of that run"
            )
    return Material(
        given.name,
        [row.prompt_ids for row in chosen],
        [_completion(row) for row in chosen],
        config.sampling.temperature,
    )


def _newest_first(folder: RunFolder) -> Iterator[StoredCompletion]:
    steps = [step for split, step in stored_steps(folder.completions) if split == "train"]
    if not steps:
        raise DataError(f"{folder.completions} holds no training rollouts; let the run do a step")
    for step in reversed(steps):
        yield from read_completions(folder.completions, "train", step)


def _completion(row: StoredCompletion) -> Completion:
    return Completion(
        key=key_of(row),
        prompt_ids=row.prompt_ids,
        token_ids=row.token_ids,
        logprobs=row.logprobs,
        finish="stop" if row.finish == "stop" else "length",
        policy_version=row.policy_version,
    )


def beginnings(tokenizer: Tokenizer, path: Path) -> Iterator[Ids]:
    """Prompts of `PROMPT_TOKENS` from long documents, which are read as they are asked for."""
    for document in documents([path]):
        if len(document) >= 2 * _SKIPPED_CHARACTERS:
            part = document[_SKIPPED_CHARACTERS : _SKIPPED_CHARACTERS + _READ_CHARACTERS]
            yield tokenizer.encode(part)[:PROMPT_TOKENS]


def _asked(tokenizer: Tokenizer, path: Path) -> Iterator[Ids]:
    """The prompts of JSON lines, in the model's chat template if it has one."""
    columns = {"prompt": "prompt", "answer": None}
    settings = {"kind": "jsonl", "path": path, "columns": columns}
    for prompt in load_prompts(settings, tokenizer, split="train", style=PromptStyle()):
        yield prompt.ids


_PROMPTS: Mapping[str, Callable[[Tokenizer, Path], Iterator[Ids]]] = {
    "prompts": _asked,
    "text": beginnings,
}
