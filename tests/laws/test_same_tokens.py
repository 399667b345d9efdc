"""Law: however the engine guesses ahead, it returns the tokens and the bits of plain decoding.

Plain decoding means: no drafter, one row, one request after the other. Against it stand all
drafters, chains and trees, batches, random changes of strategy, and drafters that are broken on
purpose. A drafter that knows the answer seven times in ten, at random places among its children,
makes sure that paths beside the main one are really taken, carried over and confirmed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ratoon.drafter.learned import LearnedDrafter
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.drafter.suffix import SuffixDrafter
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.hf_config import FAMILIES, family_config
from ratoon.models.hf_io import load_decoder
from ratoon.models.tiny import random_decoder
from ratoon.records import Completion, DrawKey, Request, SamplingParams, Stream
from ratoon.rollout.native import engine as engine_module
from ratoon.rollout.native.drafting import Drafting
from ratoon.rollout.native.engine import Finished, RolloutEngine, positions_needed
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.numerics import check_invariance
from ratoon.sampling.keyed_noise import sequence_key
from ratoon.speculation.proposer import Proposals, Source, StepNoise
from ratoon.speculation.strategy import PLAIN, RandomStrategies, Strategy
from ratoon.speculation.verify import Verified

VOCAB, VOCAB_LIMIT = 96, 90
MAX_LENGTH = 112
MAX_NODES = 12
PREFILL_CHUNK = 16
CHAIN = Strategy(depth=4, branching=1, beam=1, budget=4, min_chance=1e-6)
TREE = Strategy(depth=4, branching=3, beam=3, budget=MAX_NODES - 1, min_chance=1e-6)
DRAFTERS = {"suffix": (False, True), "learned": (True, False), "merged": (True, True)}
PARAMS = {
    "temperature 1": SamplingParams(),
    "top-k": SamplingParams(temperature=0.7, top_k=20),
    "top-p and min-p": SamplingParams(temperature=1.2, top_p=0.9, min_p=0.01),
    "temperature 0": SamplingParams(temperature=0.0),
}
Answers = dict[DrawKey, Completion]


def tiny_decoder(seed: int = 0, family: str = "llama", max_positions: int = 512) -> Decoder:
    """Random weights with an entropy of about two nats a token."""
    config = family_config(
        family,
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4 if family == "gpt2" else 2,
        head_dim=16,
        max_positions=max_positions,
    )
    decoder = random_decoder(config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        decoder.norm.weight.mul_(3)
        for layer in decoder.layers:
            layer.qkv_proj.weight.mul_(2)
        for name, parameter in decoder.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0.0, 0.3, generator=generator)
    return decoder


@dataclass
class World:
    """A target, the requests to answer, and the answers of plain decoding."""

    decoder: Decoder
    model: InferenceModel
    exact: bool
    max_length: int = MAX_LENGTH
    vocab_limit: int = VOCAB_LIMIT
    _answers: dict[tuple[Request, ...], Answers] = field(default_factory=dict)

    def answers(self, requests: Sequence[Request]) -> Answers:
        """What plain decoding answers, one request after the other."""
        key = tuple(requests)
        if key not in self._answers:
            engine = self.engine(max_rows=1)
            self._answers[key] = {}
            for request in requests:
                self._answers[key] |= completions(run(engine, [request]))
        return self._answers[key]

    def engine(
        self,
        *,
        max_rows: int,
        drafting: Drafting | None = None,
        rule: Callable[[int], Strategy] = lambda num_live: PLAIN,
        **options: Any,
    ) -> RolloutEngine:
        options = {"confirm": self.exact, "prefill_chunk": PREFILL_CHUNK, **options}
        return RolloutEngine(
            self.model,
            max_rows=max_rows,
            max_length=self.max_length,
            vocab_limit=self.vocab_limit,
            drafting=drafting,
            strategy_rule=rule,
            **options,
        )

    def drafting(
        self, max_rows: int, *, learned: bool = True, suffix: bool = True, seed: int = 0
    ) -> Drafting:
        """Both drafters; the learned one starts as the target's last layer."""
        config = DrafterConfig.for_target(self.decoder.config, draft_vocab_size=8192, window=48)
        drafting = Drafting(
            num_rows=max_rows,
            vocab_limit=self.vocab_limit,
            max_nodes=MAX_NODES,
            suffix=SuffixDrafter(max_rows, capacity=4096) if suffix else None,
            learned=LearnedDrafter(
                config,
                num_rows=max_rows,
                num_positions=self.max_length + 2 * MAX_NODES,
                num_tree_slots=TREE.beam * TREE.depth,
                dtype=self.model.dtype,
            )
            if learned
            else None,
        )
        if learned:
            vocabulary = torch.arange(config.draft_vocab_size)
            drafter = Eagle3Drafter.from_target(config, self.decoder, vocabulary)
            drafting.load(drafter, self.model.embedding)
        return drafting

    def check(self, found: Answers, requests: Sequence[Request]) -> None:
        """Same tokens, same reason to finish, same bits of the log-probabilities."""
        expected = self.answers(requests)
        assert found.keys() == expected.keys()
        for key, completion in found.items():
            assert completion.token_ids == expected[key].token_ids
            assert completion.finish == expected[key].finish
            if self.exact:
                assert completion.logprobs == expected[key].logprobs
            else:
                assert completion.logprobs == pytest.approx(expected[key].logprobs, abs=1e-5)


def make_world(decoder: Decoder, **options: Any) -> World:
    """In bf16 where its bits hold on this machine, in float64 elsewhere."""
    taps = DrafterConfig.for_target(decoder.config, draft_vocab_size=8192, window=48).taps
    positions = options.get("max_length", MAX_LENGTH) + 2 * MAX_NODES

    def build(dtype: torch.dtype) -> InferenceModel:
        return InferenceModel(decoder, num_positions=positions, dtype=dtype, taps=taps)

    model = build(torch.bfloat16)
    exact = check_invariance(model).holds
    return World(decoder, model if exact else build(torch.float64), exact, **options)


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(tiny_decoder())


def run(engine: RolloutEngine, requests: Iterable[Request]) -> list[Finished]:
    for request in requests:
        engine.submit(request)
    finished = []
    while engine.has_work:
        finished += engine.step()
    return finished


def completions(finished: Iterable[Finished]) -> Answers:
    return {item.completion.key: item.completion for item in finished}


def make_requests(params: SamplingParams = PARAMS["temperature 1"]) -> list[Request]:
    """Prompts shorter and longer than the prefill chunk, in groups; few and many tokens."""
    generator = torch.Generator().manual_seed(3)
    requests = []
    for row, length in enumerate((1, 40, 2, 17, 9, 16)):
        prompt = tuple(torch.randint(VOCAB_LIMIT, (length,), generator=generator).tolist())
        for sample, max_tokens in enumerate((28, 1, 5)):
            key = DrawKey(4, Stream.TRAIN, 2, "laws", row, sample)
            eos_ids = (5, 17, 40) if row % 2 else (11,)
            requests.append(Request(key, prompt, max_tokens, eos_ids, params))
    return requests


def rule_of(strategies: Sequence[Strategy], seed: int = 0) -> Callable[[int], Strategy]:
    """Changes at random between strategies; one alone stays."""
    picker = RandomStrategies(strategies, seed)
    state = 0

    def rule(num_live: int) -> Strategy:
        nonlocal state
        strategy, state = picker.pick(num_live, state)
        return strategy

    return rule


class Guide:
    """Proposes the true next token with a chance of `right`, at a random place, among others.

    It knows the answers by the key of the response. Where a node is not on the true path it
    proposes all the same.
    """

    def __init__(self, answers: Answers, right: float, seed: int = 0) -> None:
        self._answers = {
            sequence_key(key): completion.prompt_ids + completion.token_ids
            for key, completion in answers.items()
        }
        self._right = right
        self._generator = torch.Generator().manual_seed(seed)

    def root(self, noise: StepNoise, num_children: int) -> Proposals:
        return self._propose(noise, torch.zeros(noise.num_rows, 1), 0, num_children)

    def advance(
        self, parents: Tensor, tokens: Tensor, noise: StepNoise, depth: int, num_children: int
    ) -> Proposals:
        return self._propose(noise, tokens, depth, num_children)

    def _propose(self, noise: StepNoise, nodes: Tensor, depth: int, num_children: int) -> Proposals:
        shape = (*nodes.shape, num_children)
        tokens = torch.stack(
            [
                torch.randperm(VOCAB_LIMIT, generator=self._generator)[:num_children]
                for _ in range(nodes.numel())
            ]
        ).view(shape)
        for row, key in enumerate(noise.sequence_keys.tolist()):
            answer = self._answers[tuple(key)]
            place = int(noise.t0[row]) + depth
            for node in range(nodes.shape[1]):
                if place < len(answer) and self._chance() < self._right:
                    child = int(self._chance() * num_children)
                    tokens[row, node, child] = answer[place]
        return Proposals(tokens, torch.rand(shape, generator=self._generator) * 0.6 + 0.1)

    def _chance(self) -> float:
        return float(torch.rand((), generator=self._generator))


@dataclass
class Counts:
    """What an engine's steps did: tokens final at once, carried over, refuted."""

    final: int = 0
    carried: int = 0
    refuted: int = 0
    beside: int = 0


def watch(engine: RolloutEngine, corrupt: Callable[[RolloutEngine], None] | None = None) -> Counts:
    """Count what is committed; `corrupt` may change the carried tokens after each step."""
    counts = Counts()
    commit = engine.rows.commit

    def counted(verified: Verified, known: Tensor, final: Tensor, states: Tensor) -> None:
        rows = engine.rows
        levels = torch.arange(verified.path.shape[1])
        counts.beside += int(((verified.path != levels) & (levels < known[:, None])).sum())
        counts.final += int(final.sum())
        counts.carried += int((known - final).sum())
        places = (rows.lengths[: len(known), None] + 1 + levels).clamp_max(rows.tokens.shape[1] - 1)
        guessed = rows.tokens[: len(known)].gather(1, places)
        was_carried = levels < torch.minimum(rows.carried[: len(known)], known)[:, None]
        counts.refuted += int(((guessed != verified.tokens) & was_carried).sum())
        commit(verified, known, final, states)
        if corrupt is not None:
            corrupt(engine)

    engine.rows.commit = counted  # type: ignore[method-assign]
    return counts


def guided(world: World, requests: Sequence[Request], max_rows: int, **options: Any) -> Drafting:
    drafting = world.drafting(max_rows, **options)
    drafting._proposers[Source.SUFFIX] = Guide(world.answers(requests), right=0.7)
    return drafting


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
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
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
    strategies = [PLAIN, CHAIN, TREE]
    strategies += [
        replace(s, use_learned=x, use_suffix=y) for s in (CHAIN, TREE) for x, y in DRAFTERS.values()
    ]
    engine = world.engine(
        max_rows=max_rows, drafting=world.drafting(max_rows), rule=rule_of(strategies, max_rows)
    )
    world.check(completions(run(engine, requests)), requests)


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

    def shifted(tree: Any, logits: Tensor, *rest: Any) -> Verified:
        index = tree.parents.clamp_min(0).unsqueeze(2).expand_as(logits)
        return walk(tree, logits.gather(1, index), *rest)

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
        (6, [PLAIN, CHAIN, TREE]),
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
