"""Responses of the target with its states: what drafters are trained and compared on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ratoon.models.decoder import Decoder
from ratoon.records import Completion, DrawKey, Request, SamplingParams, Stream
from ratoon.rollout.native.engine import Finished, RolloutEngine
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.teacher_forcing import known_states

MAX_LIVE = 32

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A model, prompts for it, and how many tokens responses to them may have."""

    decoder: Decoder
    model: InferenceModel
    prompts: Sequence[Ids]
    eos_ids: Ids
    vocab_limit: int
    max_tokens: int

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt and a response to it."""
        return max(map(len, self.prompts)) + self.max_tokens

    def with_taps(self, taps: Sequence[int]) -> Source:
        """The same, keeping the inputs of these layers."""
        if tuple(taps) == self.model.taps:
            return self
        model = InferenceModel(
            self.decoder,
            num_positions=self.model.num_positions,
            dtype=self.model.dtype,
            taps=taps,
        )
        return replace(self, model=model)


def record(source: Source, rows: range, temperature: float) -> list[Finished]:
    """Responses to the prompts of `rows`, plainly decoded, with their states."""
    engine = RolloutEngine(
        source.model,
        max_rows=min(MAX_LIVE, len(rows)),
        max_length=source.max_length,
        vocab_limit=source.vocab_limit,
        collect=True,
    )
    params = SamplingParams(temperature=temperature)
    for row in rows:
        key = DrawKey(1, Stream.EVAL, 1, "recorded", row, 0)
        prompt = source.prompts[row]
        engine.submit(Request(key, prompt, source.max_tokens, source.eos_ids, params))
    finished: list[Finished] = []
    while engine.has_work:
        finished += engine.step()
    return sorted(finished, key=lambda item: item.completion.key.row)


def forced(source: Source, completions: Sequence[Completion]) -> list[Finished]:
    """Stored responses with the states that the source's model has along them.

    Nothing is drawn: one forward pass a response. The source's prompts are not looked at.
    """
    found = [Finished(completion, None, None) for completion in completions]
    for index, features, hidden in known_states(source.model, completions):
        found[index] = Finished(completions[index], features, hidden)
    return found


def select_taps(
    finished: Sequence[Finished], recorded: Sequence[int], taps: Sequence[int]
) -> list[Finished]:
    """Responses recorded with some layers' states, with those of `taps` alone."""
    places = [list(recorded).index(tap) for tap in taps]
    kept = []
    for item in finished:
        assert item.features is not None
        parts = item.features.chunk(len(recorded), dim=-1)
        kept.append(replace(item, features=torch.cat([parts[place] for place in places], dim=-1)))
    return kept


def entropy(finished: Sequence[Finished]) -> float:
    """Nats per token, estimated by the log-probabilities of what was drawn."""
    surprises = [-value for item in finished for value in item.completion.logprobs]
    return sum(surprises) / max(1, len(surprises))


def all_ids(item: Finished) -> Tensor:
    """Prompt and response `[n]`."""
    return torch.tensor(item.completion.prompt_ids + item.completion.token_ids)
