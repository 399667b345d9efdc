"""Law: what the whole engine returns, drafts and all, is an exact sample of p.

A small vocabulary and short responses, so that the probability of every response is known: it is
the product of the target's own probabilities, token by token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from naive_sampling import naive_scores
from scipy.stats import chisquare
from torch import Tensor

from ratoon.drafter.learned import LearnedDrafter
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.tiny import random_decoder
from ratoon.records import DrawKey, Request, SamplingParams, Stream
from ratoon.rollout.native import engine as engine_module
from ratoon.rollout.native.drafting import Drafting
from ratoon.rollout.native.engine import RolloutEngine, positions_needed
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.numerics import decode
from ratoon.speculation import verify
from ratoon.speculation.strategy import Strategy
from ratoon.speculation.tuner import RuleTuner

VOCAB, VOCAB_LIMIT = 8, 7
EOS = 2
PROMPT = (3, 1)
MAX_TOKENS = 3
NUM_RESPONSES = 20_000
NUM_ROWS = 250
ALPHA = 1e-4
TREE = Strategy(depth=2, branching=2, beam=2, budget=5, use_suffix=False, min_chance=1e-6)
PARAMS = {
    "temperature 1": SamplingParams(),
    "transformed": SamplingParams(
        temperature=0.8,
        top_k=6,
        top_p=0.97,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias=((EOS, 1.0), (4, 0.5)),
        suppress_tokens=(5,),
        min_new_tokens=1,
    ),
}


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    config = DecoderConfig(
        family="llama",
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
    )
    return random_decoder(config, seed=2)


def make_model(decoder: Decoder, num_positions: int = 64) -> InferenceModel:
    taps = DrafterConfig.for_target(decoder.config, 16, window=16).taps
    return InferenceModel(decoder, num_positions=num_positions, dtype=torch.bfloat16, taps=taps)


def sample(
    decoder: Decoder, params: SamplingParams, num_responses: int = NUM_RESPONSES
) -> Counter[tuple[int, ...]]:
    """How often each response comes, with two levels of drafts below each token."""
    model = make_model(decoder)
    config = DrafterConfig.for_target(decoder.config, 16, window=16)
    learned = LearnedDrafter(config, num_rows=NUM_ROWS, num_positions=64, num_tree_slots=4)
    drafting = Drafting(num_rows=NUM_ROWS, vocab_limit=VOCAB_LIMIT, max_nodes=6, learned=learned)
    drafter = Eagle3Drafter.from_target(config, decoder, torch.arange(VOCAB))
    drafting.load(drafter, model.embedding)
    max_length = len(PROMPT) + MAX_TOKENS
    assert positions_needed(max_length, drafting) <= model.num_positions
    engine = RolloutEngine(
        model,
        max_rows=NUM_ROWS,
        max_length=max_length,
        vocab_limit=VOCAB_LIMIT,
        drafting=drafting,
        tuner=RuleTuner(lambda num_live: TREE),
    )
    for number in range(num_responses):
        key = DrawKey(8, Stream.TRAIN, 1, "exact", row=number // 4, sample=number % 4)
        engine.submit(Request(key, PROMPT, MAX_TOKENS, (EOS,), params))
    counts: Counter[tuple[int, ...]] = Counter()
    while engine.has_work:
        counts.update(item.completion.token_ids for item in engine.step())
    stats = engine.take_stats()
    assert counts.total() == num_responses
    assert stats.tokens_speculated > 1.2 * stats.rows_speculated, "hardly a draft was accepted"
    return counts


@torch.inference_mode()
def responses(decoder: Decoder, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of every response."""
    model = make_model(decoder)

    def continued(text: tuple[int, ...], chance: float) -> Iterator[tuple[tuple[int, ...], float]]:
        if len(text) == MAX_TOKENS or text[-1:] == (EOS,):
            yield text, chance
            return
        cache = model.make_cache(1, 64)
        logits = decode(model, cache, torch.tensor([PROMPT + text]), [0])[0, -1, :VOCAB_LIMIT]
        scores = naive_scores(logits, PROMPT, text, params, (EOS,))
        p = torch.tensor(scores, dtype=torch.float64).softmax(-1)
        for token in range(VOCAB_LIMIT):
            if p[token] > 0:
                yield from continued((*text, token), chance * float(p[token]))

    return dict(continued((), 1.0))


def p_value(counts: Counter[tuple[int, ...]], chances: dict[tuple[int, ...], float]) -> float:
    """Chi-square over all responses; those that are expected less than ten times are one class."""
    assert set(counts) <= set(chances)
    assert sum(chances.values()) == pytest.approx(1)
    total = counts.total()
    observed, expected, rare = [], [], [0, 0.0]
    for response, chance in chances.items():
        if chance * total >= 10:
            observed.append(counts[response])
            expected.append(chance * total)
        else:
            rare = [rare[0] + counts[response], rare[1] + chance * total]
    assert len(expected) > 30
    if rare[1] > 0:
        observed.append(rare[0])
        expected.append(rare[1])
    return float(chisquare(observed, expected, sum_check=False).pvalue)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_responses_of_the_engine_follow_p(decoder: Decoder, params: SamplingParams) -> None:
    assert p_value(sample(decoder, params), responses(decoder, params)) > ALPHA


def shifted_logits(tree: Any, logits: Tensor, places: Tensor, *rest: Any) -> verify.Verified:
    """Selects at each node by the logits of its parent."""
    return verify.walk(tree, logits, places.gather(1, tree.parents.clamp_min(0)), *rest)


def repeated_keys(
    tree: Any, logits: Tensor, places: Tensor, sequence_keys: Tensor, t0: Tensor, *rest: Any
) -> verify.Verified:
    """Selects every token of a response with the noise of its first."""
    first = torch.full_like(t0, len(PROMPT))
    return verify.walk(tree, logits, places, sequence_keys, first, *rest)


@pytest.mark.parametrize("walk", [shifted_logits, repeated_keys])
def test_a_walk_off_by_one_is_caught(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, walk: Callable[..., verify.Verified]
) -> None:
    monkeypatch.setattr(engine_module, "walk", walk)
    params = PARAMS["temperature 1"]
    counts = sample(decoder, params, num_responses=4_000)
    assert p_value(counts, responses(decoder, params)) < ALPHA
