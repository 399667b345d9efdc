"""One teacher-forced pass selects what decoding selected, to the bit; and nothing else passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decoding_world import (
    MAX_LENGTH,
    SHARED,
    TREE,
    VOCAB_LIMIT,
    World,
    completions,
    make_requests,
    make_world,
    rule_of,
    run,
    tiny_decoder,
)

from ratoon.models.hf_config import FAMILIES
from ratoon.records import Completion, DrawKey, SamplingParams
from ratoon.rollout.native import teacher_forcing
from ratoon.rollout.native.teacher_forcing import Known, Reselected, reselect
from ratoon.speculation.strategy import PLAIN

PLAIN_PARAMS = SamplingParams()
CHANGED = [
    SamplingParams(0.7, top_k=20),
    SamplingParams(0.0, suppress_tokens=(3, 4)),
    SamplingParams(1.1, repetition_penalty=1.3, frequency_penalty=0.4, min_new_tokens=9),
]


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(tiny_decoder())


@pytest.fixture(scope="module")
def responses(world: World) -> list[Completion]:
    return drawn(world)


def drawn(world: World, params: SamplingParams = PLAIN_PARAMS) -> list[Completion]:
    """Responses drawn with speculation that comes and goes."""
    requests = make_requests(params)
    engine = world.engine(
        max_rows=3, drafting=world.drafting(3), rule=rule_of([PLAIN, TREE, SHARED])
    )
    found = completions(run(engine, requests))
    return [found[request.key] for request in requests]


def again(
    world: World, responses: list[Completion], params: SamplingParams = PLAIN_PARAMS
) -> list[Reselected]:
    ends = {request.key: request.eos_ids for request in make_requests()}
    known = [Known(r.key, r.prompt_ids, r.token_ids, ends[r.key]) for r in responses]
    found = dict(reselect(world.model, known, params, VOCAB_LIMIT))
    return [found[index] for index in range(len(known))]


def differing(responses: list[Completion], found: list[Reselected]) -> int:
    return sum(
        a != b
        for response, item in zip(responses, found, strict=True)
        for a, b in zip(response.token_ids, item.token_ids, strict=True)
    )


@pytest.mark.parametrize(
    ("family", "params"),
    [*((family, PLAIN_PARAMS) for family in FAMILIES), *(("llama", params) for params in CHANGED)],
)
def test_every_token_and_log_probability_is_selected_again(
    family: str, params: SamplingParams
) -> None:
    world = make_world(tiny_decoder(family=family, max_positions=MAX_LENGTH))
    responses = drawn(world, params)
    for response, found in zip(responses, again(world, responses, params), strict=True):
        assert tuple(found.token_ids) == response.token_ids
        assert not any(found.gaps)
        assert all(0 <= u <= 1 for u in found.uniforms)
        assert len(found.uniforms) == (len(found.token_ids) if params.temperature else 0)
        if world.exact:
            assert tuple(found.logprobs) == response.logprobs
        else:
            assert found.logprobs == pytest.approx(response.logprobs, abs=1e-5)


@pytest.mark.parametrize("chunk", [7, 128])
def test_neither_pieces_nor_neighbours_matter(
    world: World, responses: list[Completion], monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    expected = again(world, responses)
    monkeypatch.setattr(teacher_forcing, "_CHUNK", chunk)
    monkeypatch.setattr(teacher_forcing, "_NEW", 3 * chunk)
    monkeypatch.setattr(teacher_forcing, "_SELECTED", 5)
    found = again(world, responses[::-1])[::-1]
    assert [item.token_ids for item in found] == [item.token_ids for item in expected]
    if world.exact:
        assert found == expected


def test_a_token_altered_by_one_id_is_seen_where_it_stands(
    world: World, responses: list[Completion]
) -> None:
    longest = max(range(len(responses)), key=lambda index: len(responses[index].token_ids))
    tokens = list(responses[longest].token_ids)
    tokens[2] = (tokens[2] + 1) % VOCAB_LIMIT
    altered = responses.copy()
    altered[longest] = replace(responses[longest], token_ids=tuple(tokens))
    found = again(world, altered)[longest]
    assert found.token_ids[:3] == list(responses[longest].token_ids[:3])
    assert found.gaps[2] > 0
    assert not any(found.gaps[:2])
    # What follows was not drawn behind this text.
    assert differing([altered[longest]], [found]) > len(tokens) // 3


@pytest.mark.parametrize("field", ["round", "sample"])
def test_a_key_that_lacks_a_part_is_seen(
    world: World, responses: list[Completion], monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """Here it is the check that lacks it; every response's own value is another than 9."""
    correct = teacher_forcing.sequence_key

    def without(key: DrawKey) -> tuple[int, int]:
        return correct(replace(key, **{field: 9}))

    monkeypatch.setattr(teacher_forcing, "sequence_key", without)
    assert differing(responses, again(world, responses)) > 20


def test_other_weights_are_seen(responses: list[Completion]) -> None:
    decoder = tiny_decoder()
    with torch.no_grad():
        decoder.norm.weight.mul_(1.5)
    assert differing(responses, again(make_world(decoder), responses)) > 5
    found = again(make_world(tiny_decoder(seed=1)), responses)
    assert differing(responses, found) > 40
