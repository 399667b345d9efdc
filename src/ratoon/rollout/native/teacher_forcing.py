"""Selecting the tokens of finished responses again, one forward pass per response.

Decoding computes a token after the other. Once all are known, all can be computed side by side:
what the engine selected is what selection gives at each position of the known text. Several
responses go through a pass together, with the precautions of `forward`, so that where these keep
bits, logits have the bits that decoding saw.

Shape letters: B responses of a pass, N new tokens of each, R tokens to select, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ratoon.models.kv_cache import KVCache, attention_width
from ratoon.records import DrawKey, SamplingParams
from ratoon.rollout.native.forward import InferenceModel, attention_mask
from ratoon.sampling.keyed_noise import exponential, row_keys, sequence_key
from ratoon.sampling.prefixes import Prefixes
from ratoon.sampling.select import Selector
from ratoon.sampling.transforms import change_logits, transform
from ratoon.sampling.uniformity import hash_uniforms, integral_transform

# Cached positions of all responses of a pass, and new tokens of all in one step of it.
_CACHED = 8192
_NEW = 1024
_CHUNK = 128
# Tokens selected at once: as many rows of the vocabulary are held several times.
_SELECTED = 128


class Text(Protocol):
    """The tokens of a finished response."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The prompt's."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """The response's."""
        ...


class Known(NamedTuple):
    """A finished response: its key, its tokens, and the ids that could have ended it."""

    key: DrawKey
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    end_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Reselected:
    """What selection gives at each position of one response, given the text before it.

    `token_ids` are the selected ones. Of the response's own tokens, `logprobs` are the
    log-probabilities (with the bits that selection gives, where it selects them), `gaps` say by how
    much they lose against the selected ones in log p + g (0 where they are the same), and
    `uniforms` are their integral transforms. At temperature 0 there is no noise: gaps are those of
    the logits, and there are no transforms.
    """

    token_ids: list[int]
    logprobs: list[float]
    gaps: list[float]
    uniforms: list[float]


@torch.inference_mode()
def reselect(
    model: InferenceModel,
    responses: Sequence[Known],
    params: SamplingParams,
    vocab_limit: int,
) -> Iterator[tuple[int, Reselected]]:
    """Yield each response's index and what selection gives for it; responses of a length together.

    Token ids must be below the model's vocabulary size, and responses no longer than
    `model.num_positions`.
    Raises: NumericsError where logits are NaN.
    """
    selector = Selector(model.config.vocab_size, vocab_limit, model.embedding.device)
    for index, _, hidden in known_states(model, responses):
        response = responses[index]
        drawn_from = hidden[len(response.prompt_ids) - 1 :]
        yield index, _select(model, response, drawn_from, params, selector)


@torch.inference_mode()
def known_states(
    model: InferenceModel, responses: Sequence[Text]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each response's index and its states; responses of a length together.

    States are features `[T, num_taps * D]` and final states `[T, D]` of all tokens but the last,
    the prompt's with them. Bounds of ids and lengths are those of `reselect`.
    """
    order = sorted(range(len(responses)), key=lambda index: _length(responses[index]))
    while order:
        longest = _length(responses[order[-1]])
        count = max(1, min(_CACHED // longest, _NEW // _CHUNK))
        chosen, order = order[-count:], order[:-count]
        states = _states(model, [responses[index] for index in chosen])
        for index, (features, hidden) in zip(chosen, states, strict=True):
            yield index, features, hidden


def _length(response: Text) -> int:
    return len(response.prompt_ids) + len(response.token_ids)


def _states(model: InferenceModel, responses: Sequence[Text]) -> list[tuple[Tensor, Tensor]]:
    """Features and final states of each response."""
    device = model.embedding.device
    # The last token is drawn, and nothing from it.
    texts = [[*r.prompt_ids, *r.token_ids][:-1] for r in responses]
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)
    lengths = torch.tensor([len(text) for text in texts], device=device)
    cache = model.make_cache(len(texts), longest)
    features: list[list[Tensor]] = [[] for _ in texts]
    hidden: list[list[Tensor]] = [[] for _ in texts]
    for start in range(0, longest, _CHUNK):
        new = tokens[:, start : start + _CHUNK]
        present = (start + torch.arange(new.shape[1], device=device)) < lengths[:, None]
        found, counts = _forward(model, new, start, present, cache), present.sum(1).tolist()
        for pieces, states in zip((hidden, features), found, strict=True):
            for piece, part in zip(pieces, states.split(counts), strict=True):
                piece.append(part)
    return [(torch.cat(f), torch.cat(h)) for f, h in zip(features, hidden, strict=True)]


def _forward(
    model: InferenceModel, new: Tensor, start: int, present: Tensor, cache: KVCache
) -> tuple[Tensor, Tensor]:
    """The model's `forward` of the present ones of new tokens `[B, N]` behind `start` cached."""
    num_rows, num_new = new.shape
    device = new.device
    positions = torch.arange(start, start + num_new, device=device).expand(num_rows, -1)
    slots = torch.arange(num_rows, device=device)[:, None] * cache.num_positions
    chain = torch.ones(num_new, num_new, dtype=torch.bool, device=device).tril()
    mask = attention_mask(
        positions[:, 0],
        chain.expand(num_rows, -1, -1),
        attention_width(start + num_new, model.dtype),
        model.config.num_heads // model.config.num_kv_heads,
        model.dtype,
    )
    places = present.flatten().nonzero()[:, 0]
    return model.forward(
        new,
        positions,
        slots + positions,
        mask,
        cache,
        present=places if len(places) < new.numel() else None,
    )


def _select(
    model: InferenceModel,
    response: Known,
    hidden: Tensor,
    params: SamplingParams,
    selector: Selector,
) -> Reselected:
    """Select at every position of one response from its states `[T, D]`."""
    device, limit = hidden.device, selector.vocab_limit
    words = torch.tensor([sequence_key(response.key)], device=device)
    text = torch.tensor([*response.prompt_ids, *response.token_ids], device=device)
    end_ids = torch.tensor(response.end_ids, dtype=torch.int64, device=device)
    first = len(response.prompt_ids)
    found = Reselected([], [], [], [])
    for t in torch.arange(first, len(text), device=device).split(_SELECTED):
        keys, own = row_keys(words.expand(len(t), -1), t), text[t]
        before = Prefixes(
            tokens=text.expand(len(t), -1),
            lengths=t,
            prompt_lengths=torch.full_like(t, first),
            end_ids=end_ids.expand(len(t), -1),
        )
        logits = model.logits(hidden[t - first])
        ids, logprobs = selector.select(logits, keys, params, before)
        pair = torch.stack([ids, own], dim=1)
        if params.temperature == 0.0:
            race = change_logits(logits, params, limit, before).gather(1, pair).double()
        else:
            scores = transform(logits, params, limit, before)
            race = scores.gather(1, pair).double() - exponential(keys, pair, limit).log_()
            uniforms, own_logprobs = integral_transform(scores, own, hash_uniforms(response.key, t))
            logprobs = torch.where(ids == own, logprobs, own_logprobs)
            found.uniforms.extend(uniforms.tolist())
        found.token_ids.extend(ids.tolist())
        found.logprobs.extend(logprobs.tolist())
        found.gaps.extend((race[:, 0] - race[:, 1]).tolist())
    return found
