"""Law: penalties, biases, processors and ends mean at each draft position what they mean alone.

The oracle is `naive_sampling`: definitions, one token at a time, without an engine. Against it
stands the engine, which guesses ahead with all drafters under random changes of strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from decoding_world import (
    CHAIN,
    DRAFTERS,
    SHARED,
    TREE,
    VOCAB_LIMIT,
    Answers,
    Counts,
    Guide,
    World,
    completions,
    make_requests,
    make_world,
    rule_of,
    run,
    tiny_decoder,
    watch,
)
from naive_sampling import naive_completion, params_named
from torch import Tensor

from ratoon.records import Completion, Request, SamplingParams
from ratoon.rollout.native import engine as engine_module
from ratoon.rollout.native.numerics import decode as forward
from ratoon.rollout.native.rows import Rows
from ratoon.sampling.prefixes import Prefixes
from ratoon.sampling.stop_strings import text_before
from ratoon.speculation import verify
from ratoon.speculation.proposer import Source
from ratoon.speculation.strategy import PLAIN
from ratoon.speculation.tree import Tree

Oracle = Callable[[Sequence[Request]], Answers]
PARAMS = params_named()
STRATEGIES = [PLAIN] + [
    replace(shape, use_learned=use_learned, use_suffix=use_suffix)
    for shape in (CHAIN, TREE, SHARED)
    for use_learned, use_suffix in DRAFTERS.values()
]
# Characters lie across tokens, and every seventh token shows no text.
LETTERS = (b"a", b"b", b"ab", b"\xc3", b"\xa9", b"b\xc3")
PIECES = [LETTERS[token % 6] if token % 7 else b"" for token in range(VOCAB_LIMIT)]
STOPS = ("b\u00e9", "aab", "abbb", "bbbbb")


def text_of(ids: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in ids).decode(errors="replace")


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(tiny_decoder())


@pytest.fixture(scope="module")
def oracle(world: World) -> Oracle:
    @cache
    def next_logits(text: tuple[int, ...]) -> Tensor:
        kv_cache = world.model.make_cache(1, 128)
        logits = forward(world.model, kv_cache, torch.tensor([text]), [0])
        return logits[0, -1, :VOCAB_LIMIT]

    @cache
    @torch.inference_mode()
    def answer(request: Request) -> Completion:
        return naive_completion(request, next_logits, text_of)

    return lambda requests: {request.key: answer(request) for request in requests}


def requests_with(params: SamplingParams) -> list[Request]:
    """Responses of up to 16 tokens, and of as many as a block may have or some fewer."""
    return [
        replace(request, max_tokens=16 if request.key.sample == 0 else 1 + request.key.row)
        for request in make_requests(params)
        if request.key.row in (1, 3) and request.key.sample < 2
    ]


def speculate(
    world: World, expected: Answers, requests: Sequence[Request], max_rows: int
) -> tuple[Answers, Counts]:
    """What the engine answers while a drafter knows the answer seven times in ten."""
    drafting = world.drafting(max_rows)
    drafting._proposers[Source.SUFFIX] = Guide(expected, right=0.7)
    engine = world.engine(
        max_rows=max_rows, drafting=drafting, rule=rule_of(STRATEGIES, max_rows), decode=text_of
    )
    counts = watch(engine)
    found = completions(run(engine, requests))
    return found, counts


def without_bits(answers: Answers) -> Answers:
    return {key: replace(completion, logprobs=()) for key, completion in answers.items()}


def check(found: Answers, expected: Answers) -> None:
    assert without_bits(found) == without_bits(expected)
    for key, completion in found.items():
        assert completion.logprobs == pytest.approx(expected[key].logprobs, abs=1e-4)


@pytest.mark.parametrize("max_rows", [1, 3])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_every_transform_means_the_same_at_each_draft_position(
    world: World, oracle: Oracle, params: SamplingParams, max_rows: int
) -> None:
    requests = requests_with(params)
    expected = oracle(requests)
    found, _ = speculate(world, expected, requests, max_rows)
    check(found, expected)
    # And the log-probabilities have the bits of plain decoding.
    world.check(found, requests)


def test_every_transform_changes_what_is_drawn(oracle: Oracle) -> None:
    """Else the law above would hold for an engine that forgot one."""
    plain = SamplingParams()
    for name, params in PARAMS.items():
        changed = [f.name for f in fields(plain) if getattr(params, f.name) != f.default]
        for field in changed:
            if name != "all" and field != "temperature":
                without = replace(params, **{field: getattr(plain, field)})
                first, second = (
                    without_bits(oracle(requests_with(p)[::2])) for p in (params, without)
                )
                assert first != second, (name, field)


@pytest.mark.parametrize(("min_new_tokens", "max_rows"), [(0, 1), (0, 4), (4, 4)])
def test_stop_strings_end_a_response_wherever_token_borders_lie(
    world: World, oracle: Oracle, min_new_tokens: int, max_rows: int
) -> None:
    requests = stopping(SamplingParams(min_new_tokens=min_new_tokens))
    expected = oracle(requests)
    found, counts = speculate(world, expected, requests, max_rows)
    check(found, expected)
    ended = [answer for answer in expected.values() if answer.stop_string]
    assert len({answer.stop_string for answer in ended}) >= 3
    assert all(len(answer.token_ids) > min_new_tokens for answer in ended)
    free = oracle(stopping(SamplingParams())).values()
    assert min_new_tokens == 0 or min(len(answer.token_ids) for answer in free) <= min_new_tokens
    assert any(completes_across_tokens(answer) for answer in ended)
    assert counts.carried > 5 or not world.exact


def test_a_stop_string_at_the_limit_is_a_stop(world: World, oracle: Oracle) -> None:
    requests = stopping(SamplingParams())
    lengths = {key: len(answer.token_ids) for key, answer in oracle(requests).items()}
    requests = [replace(request, max_tokens=lengths[request.key]) for request in requests]
    expected = oracle(requests)
    found, _ = speculate(world, expected, requests, 3)
    check(found, expected)
    assert sum(answer.stop_string is not None for answer in found.values()) > 3


def stopping(params: SamplingParams) -> list[Request]:
    """Requests whose responses end with strings, mostly."""
    return [
        replace(request, max_tokens=24, eos_ids=(), stop_strings=STOPS)
        for request in make_requests(params)
        if request.key.sample < 1 or request.key.row < 2
    ]


def completes_across_tokens(answer: Completion) -> bool:
    """Whether three tokens or more make up the string that ended the response."""
    assert answer.stop_string is not None
    return answer.stop_string not in text_of(answer.token_ids[-2:])


def test_what_stands_before_a_stop_string_can_be_kept_alone(oracle: Oracle) -> None:
    answers = oracle(stopping(SamplingParams())).values()
    ended = [answer for answer in answers if answer.stop_string is not None]
    assert len(ended) > 3
    for answer in ended:
        assert answer.stop_string is not None
        text = text_of(answer.token_ids)
        kept = text_before(text_of, answer.token_ids, answer.stop_string)
        assert text.startswith(kept + answer.stop_string)
        assert not any(stop in kept for stop in STOPS)


def ignored(self: Prefixes, rows: Tensor, ids: Tensor) -> None:
    """One vector of penalties for all positions of a block."""
    self.lengths[rows] += 1


def leaked(tree: Tree, *rest: Any) -> verify.Verified:
    """The drafted tokens are counted, and not taken back where they are refuted."""
    *others, prefixes = rest
    for node in range(1, tree.tokens.shape[1]):
        prefixes.append(tree.valid[:, node].nonzero()[:, 0], tree.tokens[tree.valid[:, node], node])
    return verify.walk(tree, *others, prefixes)


def counted_with(of_prompt: bool) -> Callable[..., Tensor]:
    counts = Prefixes.counts

    def patched(self: Prefixes, like: Tensor, **_: bool) -> Tensor:
        return counts(self, like, of_prompt=of_prompt)

    return patched


MUTATIONS = {
    "penalties of the block's first position": ("repetition", Prefixes, "append", ignored),
    "siblings that are counted": ("frequency", engine_module, "walk", leaked),
    "a prompt that is penalised": ("presence", Prefixes, "counts", counted_with(of_prompt=True)),
    "a prompt that is left out": ("repetition", Prefixes, "counts", counted_with(of_prompt=False)),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_history_that_is_counted_wrongly_is_caught(
    world: World, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, mutation: Any
) -> None:
    name, *patch = mutation
    requests = [
        replace(r, prompt_ids=(*r.prompt_ids, *range(20, 30))) for r in requests_with(PARAMS[name])
    ]
    expected = oracle(requests)
    found, _ = speculate(world, expected, requests, 3)
    check(found, expected)
    monkeypatch.setattr(*patch)
    found, _ = speculate(world, expected, requests, 3)
    assert without_bits(found) != without_bits(expected)


def test_carried_tokens_that_are_counted_twice_are_caught(
    world: World, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not world.exact:
        pytest.skip("tokens are carried only where bits hold")
    requests = requests_with(PARAMS["frequency"])
    expected = oracle(requests)
    prefixes_of = Rows.prefixes

    def doubled(rows: Rows, num_rows: int, *rest: Any) -> Prefixes:
        prefixes = prefixes_of(rows, num_rows, *rest)
        prefixes.lengths.add_(rows.carried[:num_rows])
        return prefixes

    monkeypatch.setattr(Rows, "prefixes", doubled)
    found, counts = speculate(world, expected, requests, 3)
    assert counts.carried > 2
    assert without_bits(found) != without_bits(expected)
