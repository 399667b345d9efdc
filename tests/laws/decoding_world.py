"""Tiny engines whose answers are compared with plain decoding, and drafters that know them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ratoon.drafter.learned import LearnedDrafter
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.drafter.suffix import SuffixDrafter
from ratoon.models.decoder import Decoder
from ratoon.models.hf_config import family_config
from ratoon.models.tiny import random_decoder
from ratoon.records import Completion, DrawKey, Request, SamplingParams, Stream
from ratoon.rollout.native.drafting import Drafting
from ratoon.rollout.native.engine import Finished, RolloutEngine
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.numerics import check_invariance
from ratoon.sampling.keyed_noise import sequence_key
from ratoon.speculation.proposer import Proposals, Source, StepNoise
from ratoon.speculation.strategy import PLAIN, RandomStrategies, Strategy
from ratoon.speculation.tuner import RuleTuner
from ratoon.speculation.verify import Verified

VOCAB, VOCAB_LIMIT = 96, 90
MAX_LENGTH = 112
MAX_NODES = 12
PREFILL_CHUNK = 16
CHAIN = Strategy(depth=4, branching=1, beam=1, budget=4, min_chance=1e-6)
TREE = Strategy(depth=4, branching=3, beam=3, budget=MAX_NODES - 1, min_chance=1e-6)
SHARED = replace(TREE, budget=2, cap=MAX_NODES - 1)
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
        options = {
            "confirm": self.exact,
            "prefill_chunk": PREFILL_CHUNK,
            "tuner": RuleTuner(rule),
            **options,
        }
        return RolloutEngine(
            self.model,
            max_rows=max_rows,
            max_length=self.max_length,
            vocab_limit=self.vocab_limit,
            drafting=drafting,
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
    """In bf16 or float32 where their bits hold on this machine, in float64 elsewhere."""
    taps = DrafterConfig.for_target(decoder.config, draft_vocab_size=8192, window=48).taps
    positions = options.get("max_length", MAX_LENGTH) + 2 * MAX_NODES

    def build(dtype: torch.dtype) -> InferenceModel:
        return InferenceModel(decoder, num_positions=positions, dtype=dtype, taps=taps)

    for dtype in (torch.bfloat16, torch.float32):
        model = build(dtype)
        if check_invariance(model).holds:
            return World(decoder, model, exact=True, **options)
    return World(decoder, build(torch.float64), exact=False, **options)


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

    def counted(verified: Verified, known: Tensor, final: Tensor, *rest: Tensor) -> None:
        rows = engine.rows
        levels = torch.arange(verified.path.shape[1])
        counts.beside += int(((verified.path != levels) & (levels < known[:, None])).sum())
        counts.final += int(final.sum())
        counts.carried += int((known - final).sum())
        positions = (rows.lengths[: len(known), None] + 1 + levels).clamp_max(
            rows.tokens.shape[1] - 1
        )
        guessed = rows.tokens[: len(known)].gather(1, positions)
        was_carried = levels < torch.minimum(rows.carried[: len(known)], known)[:, None]
        counts.refuted += int(((guessed != verified.tokens) & was_carried).sum())
        commit(verified, known, final, *rest)
        if corrupt is not None:
            corrupt(engine)

    engine.rows.commit = counted  # type: ignore[method-assign]
    return counts


def guided(world: World, requests: Sequence[Request], max_rows: int, **options: Any) -> Drafting:
    drafting = world.drafting(max_rows, **options)
    drafting._proposers[Source.SUFFIX] = Guide(world.answers(requests), right=0.7)
    return drafting
