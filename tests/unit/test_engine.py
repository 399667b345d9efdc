"""The engine from outside: what it refuses, what it computes once, what it counts."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ratoon.drafter.learned import LearnedDrafter
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.drafter.suffix import SuffixDrafter
from ratoon.errors import CapabilityError, ConfigError, NumericsError
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.tiny import random_decoder
from ratoon.records import Completion, DrawKey, Request, SamplingParams, Stream
from ratoon.rollout.native.drafting import Drafting
from ratoon.rollout.native.engine import Finished, RolloutEngine, positions_needed
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.numerics import decode
from ratoon.speculation.strategy import PLAIN, Strategy
from ratoon.speculation.tuner import RuleTuner

CONFIG = DecoderConfig(
    family="llama",
    vocab_size=50,
    hidden_size=64,
    intermediate_size=64,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    max_positions=256,
)
MAX_LENGTH = 80
TREE = Strategy(depth=3, branching=2, beam=2, budget=7, min_chance=1e-6)
DRAFTER = DrafterConfig.for_target(CONFIG, 64, window=32)


def make_decoder(seed: int = 0) -> Decoder:
    return random_decoder(CONFIG, seed)


def make_model(seed: int = 0) -> InferenceModel:
    return InferenceModel(
        make_decoder(seed), num_positions=128, dtype=torch.bfloat16, taps=DRAFTER.taps
    )


def make_engine(**options: Any) -> RolloutEngine:
    settings = {"max_rows": 4, "max_length": MAX_LENGTH, "vocab_limit": 48, **options}
    return RolloutEngine(settings.pop("model", None) or make_model(), **settings)


def make_drafting(max_rows: int = 4) -> Drafting:
    drafting = Drafting(
        num_rows=max_rows,
        vocab_limit=48,
        max_nodes=8,
        suffix=SuffixDrafter(max_rows, capacity=4096),
        learned=LearnedDrafter(
            DRAFTER, num_rows=max_rows, num_positions=MAX_LENGTH + 16, num_tree_slots=6
        ),
    )
    model = make_model()
    drafter = Eagle3Drafter.from_target(DRAFTER, make_decoder(), torch.arange(CONFIG.vocab_size))
    drafting.load(drafter, model.embedding)
    return drafting


def request(
    prompt: tuple[int, ...] = (1, 2, 3),
    max_tokens: int = 6,
    *,
    row: int = 0,
    sample: int = 0,
    eos_ids: tuple[int, ...] = (),
    **params: Any,
) -> Request:
    key = DrawKey(3, Stream.TRAIN, 1, "engine", row, sample)
    return Request(key, prompt, max_tokens, eos_ids, SamplingParams(**params))


def run(engine: RolloutEngine, *requests: Request) -> list[Finished]:
    for item in requests:
        engine.submit(item)
    finished = []
    while engine.has_work:
        finished += engine.step()
    return finished


def answers(finished: list[Finished]) -> dict[DrawKey, Completion]:
    return {item.completion.key: item.completion for item in finished}


def count_forwards(engine: RolloutEngine) -> list[int]:
    """The number of new tokens of each forward pass from here on."""
    counts: list[int] = []
    forward = engine.model.forward

    def counted(tokens: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        counts.append(tokens.numel())
        return forward(tokens, *rest, **named)

    engine.model.forward = counted  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize(
    "bad", [request(()), request(max_tokens=0), request((1,) * 70, 11)], ids=["empty", "0", "long"]
)
def test_requests_that_do_not_fit_are_refused(bad: Request) -> None:
    engine = make_engine()
    with pytest.raises(ConfigError, match="does not fit") as caught:
        engine.submit(bad)
    assert str(MAX_LENGTH) in str(caught.value)
    assert not engine.has_work


def test_a_request_may_fill_the_whole_length() -> None:
    (finished,) = run(make_engine(), request((1,) * 70, 10))
    assert len(finished.completion.token_ids) == 10


def test_more_positions_than_the_model_has_are_refused() -> None:
    with pytest.raises(CapabilityError, match=r"max_length is 300.*256"):
        make_engine(max_length=300)


def test_one_set_of_sampling_parameters_at_a_time() -> None:
    engine = make_engine()
    engine.submit(request())
    with pytest.raises(ConfigError, match=r"temperature=0\.5.*temperature=1\.0"):
        engine.submit(request(sample=1, temperature=0.5))
    while engine.has_work:
        engine.step()
    (finished,) = run(engine, request(sample=1, temperature=0.5))
    (fresh,) = run(make_engine(), request(sample=1, temperature=0.5))
    assert finished.completion == fresh.completion


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (replace(request(), stop_strings=("a",)), "`decode`"),
        (replace(request(), stop_strings=("",)), "stop string ''"),
        (request(suppress_tokens=(48,)), "suppress_tokens names id 48"),
        (request(repetition_penalty=-1.0), "repetition_penalty"),
    ],
    ids=["no text", "empty", "suppressed", "penalty"],
)
def test_requests_that_make_no_sense_are_refused(bad: Request, words: str) -> None:
    engine = make_engine()
    with pytest.raises(ConfigError, match=words):
        engine.submit(bad)
    assert not engine.has_work
    assert len(run(engine, request())) == 1


def test_stepping_without_work_does_nothing() -> None:
    engine = make_engine()
    assert engine.step() == []
    assert not engine.has_work


def test_a_response_ends_with_an_end_of_sequence_id_or_at_its_limit() -> None:
    free = run(make_engine(), request(max_tokens=20))[0].completion
    assert free.finish == "length"
    assert len(free.token_ids) == len(free.logprobs) == 20
    end = free.token_ids[7]
    first = free.token_ids.index(end)
    stopped = run(make_engine(), request(max_tokens=20, eos_ids=(49, end)))[0].completion
    assert stopped.finish == "stop"
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.logprobs == free.logprobs[: first + 1]
    # At the limit and an end at once: it stopped.
    both = run(make_engine(), request(max_tokens=first + 1, eos_ids=(end,)))[0].completion
    assert both.finish == "stop"


@torch.inference_mode()
def test_log_probabilities_are_those_of_the_whole_text() -> None:
    model = make_model()
    completion = run(make_engine(model=model), request(max_tokens=12))[0].completion
    text = completion.prompt_ids + completion.token_ids
    logits = decode(model, model.make_cache(1, 64), torch.tensor([text[:-1]]), [0])[0]
    expected = torch.log_softmax(logits[:, :48].float(), -1)
    places = range(len(completion.prompt_ids) - 1, len(text) - 1)
    found = torch.tensor(completion.logprobs)
    wanted = torch.stack([expected[place, text[place + 1]] for place in places])
    torch.testing.assert_close(found, wanted)


def test_ids_beyond_the_vocabulary_limit_are_never_drawn() -> None:
    finished = run(make_engine(vocab_limit=5), *(request(sample=s) for s in range(20)))
    drawn = {token for item in finished for token in item.completion.token_ids}
    assert drawn <= set(range(5))
    assert len(drawn) > 1


def test_the_same_prompt_in_two_rows_gets_two_responses() -> None:
    same = [request(max_tokens=12, row=0), request(max_tokens=12, row=1)]
    same.append(request(max_tokens=12, sample=1))
    tokens = {item.completion.token_ids for item in run(make_engine(), *same)}
    assert len(tokens) == 3


def test_a_groups_prompt_is_computed_once() -> None:
    engine = make_engine(prefill_chunk=8)
    counts = count_forwards(engine)
    prompt = tuple(range(1, 31))
    group = [request(prompt, 1, sample=sample) for sample in range(4)]
    for item in group:
        engine.submit(item)
    while engine.num_waiting:
        engine.step()
    assert counts == [8, 8, 8, 5]
    assert engine.num_live == 4
    # After the last member nothing is kept.
    while engine.has_work:
        engine.step()
    counts.clear()
    engine.submit(group[0])
    while engine.num_waiting:
        engine.step()
    assert counts == [8, 8, 8, 5]


def test_short_prompts_are_computed_together() -> None:
    prompts = [tuple(range(1, length + 1)) for length in (5, 9, 2, 1, 9, 30, 4, 6)]
    prompts[4] = prompts[1]
    requests = [request(prompt, 4, row=row) for row, prompt in enumerate(prompts)]
    alone = [run(make_engine(max_rows=1), item)[0].completion for item in requests]
    engine = make_engine(max_rows=8, prefill_chunk=36)
    counts = count_forwards(engine)
    for item in requests:
        engine.submit(item)
    while engine.num_waiting:
        engine.step()
    # 4 prompts of up to 8 tokens, the fifth being one of them; the long one; the last two.
    assert counts == [4 * 8, 29, 2 * 5]
    found = []
    while engine.has_work:
        found += engine.step()
    assert [answers(found)[item.key] for item in requests] == alone


def test_prompts_are_computed_together_only_for_rows_that_are_free() -> None:
    engine = make_engine(max_rows=2, prefill_chunk=64)
    counts = count_forwards(engine)
    for row in range(4):
        engine.submit(request((1, 2, 3, row), 3, row=row))
    engine.step()
    assert counts == [2 * 3]


def test_members_that_come_later_use_the_prompt_of_those_that_wait() -> None:
    engine = make_engine(max_rows=1, prefill_chunk=64)
    counts = count_forwards(engine)
    group = [request(tuple(range(1, 31)), 3, sample=sample) for sample in range(3)]
    alone = [run(make_engine(), item)[0].completion for item in group]
    finished = answers(run(engine, *group))
    assert [finished[item.key] for item in group] == alone
    assert counts.count(29) == 1


def test_a_prompt_of_one_token_needs_no_prefill() -> None:
    engine = make_engine()
    counts = count_forwards(engine)
    run(engine, request((7,), 3))
    assert counts == [1, 1, 1]


def test_weights_change_only_between_rollouts() -> None:
    engine = make_engine()
    engine.submit(request())
    with pytest.raises(RuntimeError, match="between rollouts"):
        engine.use_model(make_model(1), 5)
    engine.step()
    with pytest.raises(RuntimeError, match="between rollouts"):
        engine.use_model(make_model(1), 5)


def test_after_a_change_of_weights_an_engine_is_as_good_as_new() -> None:
    group = [request((1, 2, 3, 4), 15, sample=sample) for sample in range(6)]
    engine = make_engine(drafting=make_drafting(), tuner=RuleTuner(lambda num_live: TREE))
    before = answers(run(engine, *group))
    model = make_model(1)
    engine.use_model(model, 5)
    after = answers(run(engine, *group))
    fresh = answers(run(make_engine(model=model), *group))
    assert {completion.policy_version for completion in before.values()} == {0}
    assert {completion.policy_version for completion in after.values()} == {5}
    for key, completion in after.items():
        assert replace(completion, policy_version=0) == fresh[key]
        assert completion.token_ids != before[key].token_ids


def test_states_are_returned_when_collected() -> None:
    (without,) = run(make_engine(), request())
    assert without.features is None
    assert without.hidden is None
    (item,) = run(make_engine(collect=True), request())
    assert item.features is not None
    assert item.hidden is not None
    assert item.features.shape == (3 + 6 - 1, 3 * CONFIG.hidden_size)
    assert item.hidden.shape == (3 + 6 - 1, CONFIG.hidden_size)


def test_steps_and_tokens_are_counted() -> None:
    engine = make_engine(drafting=make_drafting(), tuner=RuleTuner(lambda num_live: PLAIN))
    run(engine, *(request((1, 2), 5, sample=sample) for sample in range(3)))
    stats = engine.take_stats()
    assert (stats.plain_steps, stats.speculative_steps) == (5, 0)
    assert (stats.tokens, stats.rows_decoded) == (15, 15)
    assert stats.live_batch == [3] * 5
    assert (stats.tokens_speculated, stats.rows_speculated, stats.nodes_drafted) == (0, 0, 0)
    engine.use_tuner(RuleTuner(lambda num_live: TREE))
    run(engine, *(request((1, 2), 5, sample=sample) for sample in range(3)))
    stats = engine.take_stats()
    assert stats.plain_steps == 0
    assert stats.tokens == stats.tokens_speculated == 15
    assert stats.rows_speculated == sum(stats.live_batch)
    assert 0 < stats.nodes_drafted <= 7 * stats.rows_speculated
    assert engine.take_stats().tokens == 0


def text_of(ids: Sequence[int]) -> str:
    return "".join(chr(97 + token % 26) for token in ids)


def memory() -> tuple[int, int]:
    """Bytes of all tensors, and number of objects, that Python knows."""
    gc.collect()
    objects = gc.get_objects()
    tensors = {id(x): x.untyped_storage().nbytes() for x in objects if type(x) is Tensor}
    return sum(tensors.values()), len(objects)


def test_nothing_is_left_of_a_rollout() -> None:
    engine = make_engine(
        drafting=make_drafting(), tuner=RuleTuner(lambda num_live: TREE), decode=text_of
    )
    group = [
        replace(request((1, 2, 3, row), 12, row=row, sample=sample), stop_strings=("ab", "q"))
        for row in range(3)
        for sample in range(3)
    ]
    first = answers(run(engine, *group))
    rows, queue, ends = engine.rows, engine._queue, engine._ends
    assert (rows.num_live, len(queue), engine._requests) == (0, 0, [])
    assert (queue._siblings, queue._computed, ends._watches) == ({}, {}, {})
    # And what lies in cache and rows is not read again.
    for values in (rows.cache.data, rows.features, rows.hidden, rows.logprobs):
        values.fill_(7.0)
    for places in (rows.tokens, rows.lengths, rows.carried, rows.prompt_lengths):
        places.fill_(3)
    assert answers(run(engine, *group)) == first


def test_memory_is_flat_over_many_short_requests() -> None:
    engine = make_engine(
        max_rows=128,
        drafting=Drafting(
            num_rows=128, vocab_limit=48, max_nodes=8, suffix=SuffixDrafter(128, capacity=4096)
        ),
        tuner=RuleTuner(lambda num_live: TREE if num_live < 64 else PLAIN),
    )

    def serve(first: int, count: int) -> tuple[int, int]:
        run(engine, *(request((1 + row % 40,), 1, row=row) for row in range(first, first + count)))
        engine.take_stats()
        return memory()

    # The suffix index has forgotten its first prompts by then.
    tensors, objects = serve(0, 2_500)
    later_tensors, later_objects = serve(2_500, 2_500)
    assert later_tensors == tensors
    # Fewer than one for each request: other tests' objects come and go in this process, too.
    assert later_objects < objects + 1_000


def test_changing_to_speculation_needs_no_further_pass_over_the_context() -> None:
    engine = make_engine(drafting=make_drafting(), tuner=RuleTuner(lambda num_live: PLAIN))
    engine.submit(request((1, 2, 3), 40))
    for _ in range(20):
        engine.step()
    counts = count_forwards(engine)
    engine.use_tuner(RuleTuner(lambda num_live: TREE))
    engine.step()
    assert len(counts) == 1
    assert counts[0] <= 1 + TREE.budget


def test_a_replay_from_the_recorded_state_takes_the_same_steps() -> None:
    """And one from the state afterwards does not: the index has seen the answers."""
    group = [request((1, 2, 3, 4), 30, sample=sample) for sample in range(4)]
    drafting = make_drafting()
    engine = make_engine(drafting=drafting, tuner=RuleTuner(lambda num_live: TREE))
    run(engine, request((1, 2, 3, 4), 30, sample=9))
    engine.take_stats()
    recorded = drafting.state_dict()
    first = answers(run(engine, *group))
    stats = engine.take_stats()
    drafting.load_state_dict(recorded)
    assert answers(run(engine, *group)) == first
    assert engine.take_stats() == stats
    assert answers(run(engine, *group)) == first
    leaked = engine.take_stats()
    assert leaked.speculative_steps < 0.7 * stats.speculative_steps


def test_weights_that_are_not_numbers_end_the_rollout() -> None:
    decoder = make_decoder()
    with torch.no_grad():
        decoder.norm.weight.fill_(float("nan"))
    model = InferenceModel(decoder, num_positions=128, dtype=torch.bfloat16)
    engine = make_engine(model=model)
    engine.submit(request())
    engine.step()
    with pytest.raises(NumericsError, match="nan"):
        engine.step()


def test_the_cache_holds_the_longest_sequence_with_two_trees_behind_it() -> None:
    drafting = make_drafting()
    engine = make_engine(drafting=drafting, tuner=RuleTuner(lambda num_live: TREE), max_length=64)
    assert positions_needed(64, drafting) == 64 + 2 * 8
    assert engine.rows.cache.num_positions == 128
    assert len(run(engine, request((1,) * 60, 4))[0].completion.token_ids) == 4


def test_loading_a_drafter_where_there_is_none_is_refused() -> None:
    drafting = Drafting(num_rows=2, vocab_limit=48, max_nodes=8, suffix=SuffixDrafter(2))
    drafter = Eagle3Drafter.from_target(DRAFTER, make_decoder(), torch.arange(CONFIG.vocab_size))
    with pytest.raises(RuntimeError, match="no learned drafter"):
        drafting.load(drafter, make_model().embedding)
