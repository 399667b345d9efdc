"""Live rows that all arms of a benchmark decode from the same point, again and again.

Prompts are computed once. An arm begins each round behind them, under the round's keys; all arms
share the prompts' keys and values, and what one writes behind them, the next overwrites.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import NamedTuple

from ratoon.bench.subject import Subject
from ratoon.records import DrawKey, Request, SamplingParams, Stream
from ratoon.rollout.native.drafting import Drafting
from ratoon.rollout.native.engine import RolloutEngine
from ratoon.rollout.native.rows import Rows
from ratoon.sampling.keyed_noise import sequence_keys
from ratoon.speculation.tuner import Tuner, never

# Tokens of each row, on average, that an arm decodes in a round.
TOKENS = 32
# What a round changes of rows, besides keys, values and states behind the prompts.
_OF_A_ROUND = (
    "tokens",
    "logprobs",
    "lengths",
    "host_lengths",
    "carried",
    "host_carried",
    "prompt_lengths",
    "last_positions",
)


def positions_behind(depth: int) -> int:
    """What one round can write behind a prompt when trees are `depth` deep."""
    return (TOKENS + 1) * (depth + 1)


class Decoded(NamedTuple):
    """One arm's round: decode steps at full live batch.

    `answers` and `logprobs` are those of each row, which may be of different lengths.
    """

    tokens: int
    seconds: float
    rows: int
    nodes: int
    answers: list[tuple[int, ...]]
    logprobs: list[tuple[float, ...]]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class LiveRows:
    """Rows behind their prompts; any first ones of them can be decoded."""

    def __init__(self, subject: Subject, prompts: Sequence[tuple[int, ...]]) -> None:
        self.subject = subject
        self.prompts = prompts
        count = len(prompts)
        # With drafters, so that the states that these read are kept.
        engine = subject.engine(count, subject.drafting(count))
        for request in self._requests(count, 0, 1.0):
            engine.submit(request)
        while engine.num_waiting:
            engine.step()
        self.rows = engine.rows

    def engine(
        self,
        size: int,
        number: int,
        temperature: float = 1.0,
        drafting: Drafting | None = None,
        tuner: Tuner | None = None,
    ) -> RolloutEngine:
        """One whose live batch is the first `size` rows at the end of their prompts.

        `number` is that of the round; `tuner` None decodes plainly.
        """
        requests = self._requests(size, number, temperature)
        subject = self.subject
        engine = _Engine(
            subject.model,
            max_rows=size,
            # Its own cache is not used.
            max_length=1,
            vocab_limit=subject.vocab_limit,
            drafting=drafting,
            tuner=tuner or never(),
            confirm=subject.confirm,
        )
        engine.take(self._first(size, requests, drafting), requests)
        return engine

    def decode(
        self,
        size: int,
        number: int,
        temperature: float = 1.0,
        drafting: Drafting | None = None,
        tuner: Tuner | None = None,
    ) -> Decoded:
        """Decode until so many tokens have come; arguments as of `engine`."""
        engine = self.engine(size, number, temperature, drafting, tuner)
        tokens = rows = nodes = 0
        seconds = 0.0
        while tokens < TOKENS * size:
            start = time.perf_counter()
            engine.step()
            seconds += time.perf_counter() - start
            stats = engine.take_stats()
            tokens, rows = tokens + stats.tokens, rows + stats.rows_decoded
            nodes += stats.nodes_drafted
        ends = (engine.rows.lengths[:size] + 1).tolist()
        starts = [len(prompt) for prompt in self.prompts]
        spans = [(row, slice(starts[row], end)) for row, end in enumerate(ends)]
        return Decoded(
            tokens,
            seconds,
            rows,
            nodes,
            [tuple(engine.rows.tokens[span].tolist()) for span in spans],
            [tuple(engine.rows.logprobs[span].tolist()) for span in spans],
        )

    def _requests(self, size: int, number: int, temperature: float) -> list[Request]:
        params = SamplingParams(temperature=temperature)
        return [
            Request(
                DrawKey(1, Stream.EVAL, number, "bench", row, 0),
                prompt,
                self.subject.max_length - len(prompt),
                (),
                params,
            )
            for row, prompt in enumerate(self.prompts[:size])
        ]

    def _first(self, size: int, requests: Sequence[Request], drafting: Drafting | None) -> Rows:
        rows = copy.copy(self.rows)
        rows.num_live = size
        for name in _OF_A_ROUND:
            setattr(rows, name, getattr(rows, name)[:size].clone())
        rows.sequence_keys = sequence_keys(request.key for request in requests)
        if drafting is None or not drafting.needs_features:
            rows.features, rows.hidden = rows.features[..., :0], rows.hidden[..., :0]
        return rows


class _Engine(RolloutEngine):
    """An engine that goes on with rows whose prompts another one has computed."""

    def take(self, rows: Rows, requests: Sequence[Request]) -> None:
        """Answer `requests`, which are those of `rows`, in their order."""
        self._use_params(requests[0].params)
        self.rows = rows
        self._requests = list(requests)
        for slot, request in enumerate(requests):
            self._ends.begin(slot, request)
            if self._drafting is not None:
                self._drafting.begin(slot, request)


class Guessing:
    """An arm that guesses, and starts each round from what it had learned before the first.

    That was learned on other prompts: one that has seen the answers would guess them all.
    """

    def __init__(self, others: LiveRows, size: int, temperature: float, tuner: Tuner) -> None:
        """Learn while the first `size` of `others` are decoded."""
        self._size, self._temperature = size, temperature
        self.drafting = others.subject.drafting(size)
        others.decode(size, 0, temperature, self.drafting, tuner)
        self._state, self._tuner = self.drafting.state_dict(), tuner

    def engine(self, live: LiveRows, number: int) -> RolloutEngine:
        """As `LiveRows.engine`."""
        return live.engine(self._size, number, self._temperature, *self._learned())

    def decode(self, live: LiveRows, number: int) -> Decoded:
        """As `LiveRows.decode`."""
        return live.decode(self._size, number, self._temperature, *self._learned())

    def _learned(self) -> tuple[Drafting, Tuner]:
        self.drafting.load_state_dict(self._state)
        return self.drafting, copy.deepcopy(self._tuner)
