"""Law: however the engine guesses ahead, it returns the tokens and the bits of plain decoding.

Plain decoding means: no drafter, one row, one request after the other. Against it stand all
drafters, chains and trees, batches, random changes of strategy, and drafters that are broken on
purpose. A drafter that knows the answer seven times in ten, at random places among its children,
makes sure that paths beside the main one are really taken, carried over and confirmed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_world import (
    CHAIN,
    DRAFTERS,
    MAX_LENGTH,
    PARAMS,
    PREFILL_CHUNK,
    SHARED,
    TREE,
    VOCAB,
    VOCAB_LIMIT,
    Answers,
    World,
    completions,
    guided,
    make_requests,
    make_world,
    rule_of,
    run,
    tiny_decoder,
    watch,
)
from torch import Tensor

from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.models.decoder import DecoderConfig
from ratoon.models.hf_config import FAMILIES
from ratoon.models.hf_io import load_decoder
from ratoon.models.tiny import random_decoder
from ratoon.records import DrawKey, Request, SamplingParams, Stream
from ratoon.rollout.native import engine as engine_module
from ratoon.rollout.native.engine import RolloutEngine, positions_needed
from ratoon.speculation.cost_model import CostModelTuner, Latency
from ratoon.speculation.proposer import Proposals, Source, StepNoise
from ratoon.speculation.strategy import PLAIN, Strategy
from ratoon.speculation.verify import Verified


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(tiny_decoder())


@pytest.mark.parametrize("prefill_chunk", [PREFILL_CHUNK, 100])
@pytest.mark.parametrize("max_rows", [3, 16])
def test_plain_decoding_does_not_depend_on_the_batch(
    world: World, max_rows: int, prefill_chunk: int
) -> None:
    """Neither on the decoding batch nor on which prompts are prefilled together."""
    requests = make_requests()
    engine = world.engine(max_rows=max_rows, prefill_chunk=prefill_chunk)
    world.check(completions(run(engine, requests)), requests)


@pytest.mark.parametrize("max_rows", [1, 3, 16])
@pytest.mark.parametrize("shape", [CHAIN, TREE, SHARED], ids=["chain", "tree", "shared"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_gives_the_tokens_of_plain_decoding(
    world: World, name: str, shape: Strategy, max_rows: int
) -> None:
    use_learned, use_suffix = DRAFTERS[name]
    strategy = replace(shape, use_learned=use_learned, use_suffix=use_suffix)
    requests = make_requests()
    engine = world.engine(
        max_rows=max_rows, drafting=world.drafting(max_rows), rule=lambda num_live: strategy
    )
    world.check(completions(run(engine, requests)), requests)
    stats = engine.take_stats()
    assert stats.speculative_steps > 0
    assert stats.tokens == sum(len(a.token_ids) for a in world.answers(requests).values())


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
def test_every_family_gives_the_tokens_of_plain_decoding(family: str) -> None:
    """Up to its last position, which drafts lie beyond; learned positions end there."""
    world = make_world(tiny_decoder(family=family, max_positions=MAX_LENGTH))
    text = tuple(range(MAX_LENGTH - 20))
    last = replace(make_requests()[0], prompt_ids=text, max_tokens=20, eos_ids=())
    requests = [*make_requests()[1:], last]
    for max_rows in (3, 16):
        engine = world.engine(
            max_rows=max_rows,
            drafting=guided(world, requests, max_rows),
            rule=rule_of([CHAIN, TREE, replace(TREE, use_learned=False)]),
        )
        world.check(completions(run(engine, requests)), requests)
        assert engine.take_stats().speculative_steps > 0


@pytest.mark.parametrize("max_rows", [1, 3, 16])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_changing_strategy_at_random_changes_no_token(
    world: World, params: SamplingParams, max_rows: int
) -> None:
    requests = make_requests(params)
    strategies = [PLAIN, CHAIN, TREE, SHARED]
    strategies += [
        replace(s, use_learned=x, use_suffix=y)
        for s in (CHAIN, TREE, SHARED)
        for x, y in DRAFTERS.values()
    ]
    engine = world.engine(
        max_rows=max_rows, drafting=world.drafting(max_rows), rule=rule_of(strategies, max_rows)
    )
    world.check(completions(run(engine, requests)), requests)


@pytest.mark.parametrize("max_rows", [1, 3, 16])
def test_a_tuner_that_goes_by_the_clock_changes_no_token(world: World, max_rows: int) -> None:
    """On a machine where guessing seems free at first, and then turns out not to be."""
    requests = make_requests()
    latency = Latency([(1, 1.0), (64, 1.0)])
    engine = world.engine(
        max_rows=max_rows,
        drafting=world.drafting(max_rows),
        tuner=CostModelTuner(replace(TREE, cap=TREE.budget), 64, latency),
    )
    world.check(completions(run(engine, requests)), requests)
    stats = engine.take_stats()
    assert stats.speculative_steps > 0


@pytest.mark.parametrize("max_rows", [1, 3, 16])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_paths_beside_the_main_one_are_carried_and_confirmed(
    world: World, params: SamplingParams, max_rows: int
) -> None:
    requests = make_requests(params)
    alone = replace(TREE, use_learned=False)
    engine = world.engine(
        max_rows=max_rows,
        drafting=guided(world, requests, max_rows),
        rule=rule_of([alone, TREE, CHAIN, PLAIN]),
    )
    counts = watch(engine)
    world.check(completions(run(engine, requests)), requests)
    assert counts.beside > 10
    assert counts.final == sum(len(a.token_ids) for a in world.answers(requests).values())
    if world.exact:
        assert counts.carried > 10
        assert counts.refuted < 3


@pytest.mark.parametrize("max_rows", [1, 4])
def test_carried_tokens_that_are_wrong_are_replaced(world: World, max_rows: int) -> None:
    """A confirmation fails once in some hundred tokens; here carried tokens are made wrong."""
    if not world.exact:
        pytest.skip("tokens are carried only where bits hold")
    requests = make_requests()
    generator = torch.Generator().manual_seed(0)

    def corrupt(engine: RolloutEngine) -> None:
        rows = engine.rows
        for row in range(rows.num_live):
            for place in range(int(rows.carried[row])):
                if torch.rand((), generator=generator) < 0.3:
                    column = int(rows.lengths[row]) + 1 + place
                    rows.tokens[row, column] = (rows.tokens[row, column] + 1) % VOCAB_LIMIT

    engine = world.engine(
        max_rows=max_rows, drafting=guided(world, requests, max_rows), rule=lambda num_live: TREE
    )
    counts = watch(engine, corrupt)
    world.check(completions(run(engine, requests)), requests)
    assert counts.refuted > 5


class Poison:
    """Always proposes the same tokens with the same chance."""

    def __init__(self, token: int, chance: float) -> None:
        self._token, self._chance = token, chance

    def root(self, noise: StepNoise, num_children: int) -> Proposals:
        return self._propose((noise.num_rows, 1, num_children))

    def advance(
        self, parents: Tensor, tokens: Tensor, noise: StepNoise, depth: int, num_children: int
    ) -> Proposals:
        return self._propose((*tokens.shape, num_children))

    def _propose(self, shape: tuple[int, ...]) -> Proposals:
        return Proposals(torch.full(shape, self._token), torch.full(shape, self._chance))


POISONS = {
    "always end of sequence": Poison(11, 0.9),
    "a token beyond the limit": Poison(VOCAB_LIMIT + 1, 0.9),
    "a token beyond the vocabulary": Poison(10**9, 0.9),
    "a negative token": Poison(-3, 0.9),
    "NaN": Poison(7, float("nan")),
    "infinite": Poison(7, float("inf")),
    "more than certain": Poison(7, 3.0),
    "nothing": Poison(7, 0.0),
}


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
def test_a_poisoned_drafter_changes_no_token(world: World, poison: Poison) -> None:
    requests = make_requests()
    drafting = world.drafting(3)
    drafting._proposers[Source.SUFFIX] = poison
    engine = world.engine(max_rows=3, drafting=drafting, rule=lambda num_live: TREE)
    world.check(completions(run(engine, requests)), requests)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_poisoned_drafter_weights_change_no_token(world: World, value: float) -> None:
    requests = make_requests()
    drafting = world.drafting(3)
    config = DrafterConfig.for_target(world.decoder.config, draft_vocab_size=8192, window=48)
    drafter = Eagle3Drafter(config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.fill_(value)
    drafting.load(drafter, world.model.embedding)
    engine = world.engine(max_rows=3, drafting=drafting, rule=lambda num_live: TREE)
    world.check(completions(run(engine, requests)), requests)


def test_new_drafter_weights_in_the_middle_change_no_token(world: World) -> None:
    requests = make_requests()
    drafting = world.drafting(4)
    engine = world.engine(max_rows=4, drafting=drafting, rule=lambda num_live: TREE)
    drafter = Eagle3Drafter(
        DrafterConfig.for_target(world.decoder.config, draft_vocab_size=8192, window=48)
    )
    for request in requests:
        engine.submit(request)
    finished = []
    for number in range(10_000):
        if not engine.has_work:
            break
        finished += engine.step()
        if number % 11 == 0:
            drafting.load(drafter, world.model.embedding)
    world.check(completions(finished), requests)


@pytest.mark.parametrize("prefill_chunk", range(1, 8))
def test_prompts_in_chunks_of_any_size_change_no_token(world: World, prefill_chunk: int) -> None:
    requests = make_requests()[4:9:2]
    engine = world.engine(
        max_rows=2,
        drafting=world.drafting(2),
        rule=lambda num_live: TREE,
        prefill_chunk=prefill_chunk,
    )
    world.check(completions(run(engine, requests)), requests)


def test_rows_that_come_and_go_at_every_step_change_no_token(world: World) -> None:
    requests = [replace(r, max_tokens=1 + n % 4) for n, r in enumerate(make_requests())]
    engine = world.engine(
        max_rows=4, drafting=guided(world, requests, 4), rule=rule_of([TREE, CHAIN, PLAIN])
    )
    waiting = list(requests)
    finished, changes = [], 0
    while waiting or engine.has_work:
        before = engine.num_live
        if waiting:
            engine.submit(waiting.pop())
        finished += engine.step()
        changes += engine.num_live != before
    world.check(completions(finished), requests)
    assert changes > len(requests)


def test_arrival_order_and_time_change_no_token(world: World) -> None:
    requests = make_requests()
    engine = world.engine(
        max_rows=4, drafting=guided(world, requests, 4), rule=rule_of([TREE, CHAIN, PLAIN])
    )
    waiting = list(reversed(requests))
    finished = []
    while waiting or engine.has_work:
        if waiting and engine.num_live < 2:
            engine.submit(waiting.pop())
        finished += engine.step()
    world.check(completions(finished), requests)


@pytest.mark.parametrize("prefill_chunk", [PREFILL_CHUNK, 100])
def test_collected_states_are_those_of_a_forward_over_the_finished_text(
    world: World, prefill_chunk: int
) -> None:
    """The drafter's training data: features of each token but the last, in their places."""
    requests = make_requests()
    engine = world.engine(
        max_rows=4,
        drafting=guided(world, requests, 4),
        rule=rule_of([TREE, CHAIN, PLAIN]),
        collect=True,
        prefill_chunk=prefill_chunk,
    )
    finished = run(engine, requests)
    world.check(completions(finished), requests)
    teacher = world.engine(max_rows=1, collect=True)
    for item in finished:
        text = item.completion.prompt_ids + item.completion.token_ids
        assert item.features is not None
        assert item.hidden is not None
        assert len(item.features) == len(item.hidden) == len(text) - 1
        # A prompt of the whole text is prefilled in chunks; its last token is decoded.
        request = replace(requests[0], prompt_ids=text, max_tokens=1)
        (forced,) = run(teacher, [request])
        for found, expected in ((item.features, forced.features), (item.hidden, forced.hidden)):
            assert expected is not None
            if world.exact:
                assert torch.equal(found, expected[:-1])
            else:
                torch.testing.assert_close(found, expected[:-1])


def test_without_confirmation_bits_are_lost(world: World) -> None:
    """Why tokens are confirmed: a path beside the main one is summed in another order."""
    if not world.exact:
        pytest.skip("tokens are carried only where bits hold")
    config = DecoderConfig(
        family="llama",
        vocab_size=VOCAB,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=6,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_positions=512,
    )
    decoder = random_decoder(config, 0)
    with torch.no_grad():
        for layer in decoder.layers:
            layer.qkv_proj.weight.mul_(2)
    wide = make_world(decoder)
    requests = [
        replace(r, max_tokens=24, eos_ids=()) for r in make_requests() if len(r.prompt_ids) > 8
    ]
    strategy = replace(TREE, use_learned=False)

    def answer(*, confirm: bool) -> Answers:
        engine = wide.engine(
            max_rows=12,
            drafting=guided(wide, requests, 12, learned=False),
            rule=lambda num_live: strategy,
            confirm=confirm,
        )
        return completions(run(engine, requests))

    wide.check(answer(confirm=True), requests)
    expected = wide.answers(requests)
    assert any(c.logprobs != expected[key].logprobs for key, c in answer(confirm=False).items())


def test_a_walk_that_reads_the_parents_logits_is_caught(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests()
    walk = engine_module.walk

    def shifted(tree: Any, logits: Tensor, places: Tensor, *rest: Any) -> Verified:
        return walk(tree, logits, places.gather(1, tree.parents.clamp_min(0)), *rest)

    monkeypatch.setattr(engine_module, "walk", shifted)
    engine = world.engine(
        max_rows=4, drafting=guided(world, requests, 4), rule=lambda num_live: TREE
    )
    found = completions(run(engine, requests))
    expected = world.answers(requests)
    assert any(completion.token_ids != expected[key].token_ids for key, completion in found.items())


def test_smollm2_gives_the_same_tokens_and_bits(smollm2: Path) -> None:
    world = make_world(load_decoder(smollm2), max_length=160, vocab_limit=49152)
    if not world.exact:
        pytest.skip("these kernels do not keep SmolLM2's bits")
    assert positions_needed(160, world.drafting(1)) <= world.model.num_positions
    prompts = [[1, 504, 28, 216, 33], list(range(300, 340)), [1, 19556]]
    requests = [
        Request(DrawKey(0, Stream.TRAIN, 1, "laws", row, sample), tuple(prompt), max_tokens, (2,))
        for row, prompt in enumerate(prompts)
        for sample, max_tokens in enumerate((16, 24))
    ]
    for max_rows, strategies in (
        (1, [replace(TREE, use_learned=False)]),
        (3, [TREE]),
        (6, [PLAIN, CHAIN, TREE, SHARED]),
    ):
        engine = world.engine(
            max_rows=max_rows,
            drafting=guided(world, requests, max_rows),
            rule=rule_of(strategies),
            prefill_chunk=64,
        )
        counts = watch(engine)
        world.check(completions(run(engine, requests)), requests)
        assert counts.carried > 0
