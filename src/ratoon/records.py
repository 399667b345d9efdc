"""Frozen values that travel between the parts of Ratoon. No tensors, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

    `repetition_penalty` is Hugging Face's and counts the prompt; 1 = off. `presence_penalty` and
    `frequency_penalty` are OpenAI's and count the response alone; 0 = off. `logit_bias` holds pairs
    of an id and what is added to its logit. `suppress_tokens` are never drawn. The first
    `min_new_tokens` tokens of a response cannot end it.

    `logits_processor` has the signature of Hugging Face's `LogitsProcessor`: it is called for one
    draw at a time with the ids of prompt and response so far, `[1, T]` int64, and their logits,
    `[1, V]`, and returns logits `[1, V]`. It must be a function of these two alone: the engine
    calls it for any prefix, in any order. `sampling/transforms.py` tells the order of all of these.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    min_new_tokens: int = 0
    logits_processor: Callable[[Any, Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One response to generate.

    It ends with an id of `eos_ids`, with the token that completes one of `stop_strings` in its
    text, or after `max_tokens`.
    """

    key: DrawKey
    prompt_ids: tuple[int, ...]
    max_tokens: int
    eos_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished response.

    `token_ids` includes what ended it when `finish` is `"stop"`: the end-of-sequence id, or the
    token that completed `stop_string`. `logprobs[i]` is the natural log-probability of
    `token_ids[i]` under the distribution it was drawn from.
    """

    key: DrawKey
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]
    policy_version: int
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a data set. `(dataset, row)` is its uid.

    `ids` is the tokenised prompt as the policy sees it; `answer` and `fields` are what rewards
    may look at. `messages` is the conversation where the row holds one instead of plain text.
    """

    dataset: str
    row: int
    text: str
    ids: tuple[int, ...]
    answer: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, str], ...] | None = None
