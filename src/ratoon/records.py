"""Frozen values that travel between the parts of Ratoon. No tensors, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal


class Stream(IntEnum):
    """What a draw is for; keeps the noise of different uses apart."""

    TRAIN = 1
    EVAL = 2
    SERVE = 3
    WARMUP = 4


@dataclass(frozen=True, slots=True)
class DrawKey:
    """Identity of one response; with the position `t` it fixes the noise of each token.

    `round` is the logical index of the draw (the RL step), so that a prompt that returns gets
    fresh noise. `(dataset, row)` is the prompt's uid. `sample` is the member of the group.
    `attempt` counts deliberate resampling; a crash and retry keeps it.

    Example: `DrawKey(seed=7, stream=Stream.TRAIN, round=3, dataset="arith", row=41, sample=0)`
    """

    seed: int
    stream: Stream
    round: int
    dataset: str
    row: int
    sample: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How logits become the distribution p that tokens are drawn from.

    `top_k = 0`, `top_p = 1` and `min_p = 0` switch the respective transform off.
    `temperature = 0` means argmax (lowest id on ties).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One response to generate."""

    key: DrawKey
    prompt_ids: tuple[int, ...]
    max_tokens: int
    eos_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished response.

    `token_ids` includes the end-of-sequence id when `finish` is `"stop"`. `logprobs[i]` is the
    natural log-probability of `token_ids[i]` under the distribution it was drawn from.
    """

    key: DrawKey
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]
    policy_version: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a data set. `(dataset, row)` is its uid.

    `ids` is the tokenised prompt as the policy sees it; `answer` and `fields` are what rewards
    may look at.
    """

    dataset: str
    row: int
    text: str
    ids: tuple[int, ...]
    answer: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
