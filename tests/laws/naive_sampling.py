"""What each sampling parameter means, by its definition: one token, one id at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ratoon.records import Completion, Request, SamplingParams
from ratoon.sampling import keyed_noise

Ids = Sequence[int]


def naive_scores(
    logits: Tensor, prompt: Ids, response: Ids, params: SamplingParams, eos_ids: Ids
) -> list[float]:
    """Scores whose softmax is p of the next token; logits `[V]` are those of drawable ids."""
    size = len(logits)
    scores = [float(x) for x in logits]
    for token, value in params.logit_bias:
        scores[token] += value
    for token in {*prompt, *response}:
        rise = scores[token] < 0
        scores[token] *= params.repetition_penalty if rise else 1 / params.repetition_penalty
    for token in set(response):
        scores[token] -= params.frequency_penalty * list(response).count(token)
        scores[token] -= params.presence_penalty
    early = eos_ids if len(response) < params.min_new_tokens else ()
    for token in (*params.suppress_tokens, *early):
        scores[token] = -math.inf
    if params.logits_processor is not None:
        ids = torch.tensor([[*prompt, *response]])
        scores = params.logits_processor(ids, torch.tensor([scores]))[0].tolist()
    if params.temperature == 0:
        return scores
    scores = [score / params.temperature for score in scores]
    order = sorted(range(size), key=lambda v: -scores[v])[: params.top_k or size]
    weights = [math.exp(scores[v] - scores[order[0]]) for v in order]
    total, before, kept = sum(weights), 0.0, set()
    for token, weight in zip(order, weights, strict=True):
        if before < params.top_p * total and weight >= params.min_p * weights[0]:
            kept.add(token)
        before += weight
    return [score if v in kept else -math.inf for v, score in enumerate(scores)]


def naive_completion(
    request: Request,
    next_logits: Callable[[tuple[int, ...]], Tensor],
    decode: Callable[[Ids], str],
) -> Completion:
    """The response to a request; `next_logits` are those `[V]` of the token behind a text."""
    params, key = request.params, torch.tensor([keyed_noise.sequence_key(request.key)])
    response: list[int] = []
    logprobs: list[float] = []
    while True:
        text = (*request.prompt_ids, *response)
        scores = naive_scores(
            next_logits(text), request.prompt_ids, response, params, request.eos_ids
        )
        noise = keyed_noise.exponential(
            keyed_noise.row_keys(key, torch.tensor([len(text)])), vocab_size=len(scores)
        )[0].tolist()
        if params.temperature == 0:
            noise = [1.0] * len(scores)
        race = [score - math.log(e) for score, e in zip(scores, noise, strict=True)]
        token = race.index(max(race))
        top = max(scores)
        total = top + math.log(sum(math.exp(score - top) for score in scores))
        response.append(token)
        logprobs.append(0.0 if params.temperature == 0 else scores[token] - total)
        stops = first_stop(request, response, decode)
        if token in request.eos_ids or stops is not None:
            break
        if len(response) == request.max_tokens:
            break
    finish = "stop" if token in request.eos_ids or stops is not None else "length"
    return Completion(
        request.key, request.prompt_ids, tuple(response), tuple(logprobs), finish, 0, stops
    )


def first_stop(request: Request, response: Ids, decode: Callable[[Ids], str]) -> str | None:
    """The stop string that the text of the response contains, but for those that came too early."""
    early = decode(response[: request.params.min_new_tokens]).rstrip("\N{REPLACEMENT CHARACTER}")
    text = decode(response) if len(response) > request.params.min_new_tokens else ""
    places = [
        (place, string)
        for string in request.stop_strings
        for place in range(len(text))
        if text.startswith(string, place) and place + len(string) > len(early)
    ]
    return min(places)[1] if places else None


def params_named() -> dict[str, SamplingParams]:
    """Each transform alone, at two temperatures, and all of them together."""
    suppressed = tuple(range(0, 90, 3))
    biased = ((1, 3.0), (17, -2.5), (40, 2.0), (88, 1.5))
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.4}
    return {
        "repetition": SamplingParams(repetition_penalty=1.6),
        "presence": SamplingParams(temperature=0.7, presence_penalty=1.5),
        "frequency": SamplingParams(temperature=0.7, frequency_penalty=0.9),
        "bias": SamplingParams(logit_bias=biased),
        "suppressed": SamplingParams(temperature=0.8, suppress_tokens=suppressed),
        "min new tokens": SamplingParams(
            min_new_tokens=4, logit_bias=tuple((token, 6.0) for token in (5, 11, 17, 40))
        ),
        "processor": SamplingParams(logits_processor=no_step_down),
        "greedy": SamplingParams(temperature=0.0, **penalties),
        "all": SamplingParams(
            temperature=0.9,
            top_k=40,
            top_p=0.95,
            min_p=0.001,
            logit_bias=biased,
            suppress_tokens=suppressed,
            min_new_tokens=3,
            logits_processor=no_step_down,
            **penalties,
        ),
    }


def no_step_down(ids: Tensor, scores: Tensor) -> Tensor:
    """A grammar whose state is the number of small tokens so far: even, then no id below 30."""
    if int((ids < 30).sum()) % 2 == 0:
        scores[:, :30] = -torch.inf
    return scores
