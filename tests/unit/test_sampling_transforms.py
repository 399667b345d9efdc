"""Transforms: what Hugging Face computes, apart from the rule for ties at the nucleus's border."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from ratoon.errors import ConfigError
from ratoon.records import SamplingParams
from ratoon.sampling.prefixes import Prefixes
from ratoon.sampling.transforms import change_logits, check_ids, check_params, transform

GRID = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in itertools.product(
        (0.5, 1.0, 1.7), (0, 1, 7, 5_000), (0.05, 0.8, 0.995, 1.0), (0.0, 0.03, 1.0)
    )
]


def distinct_logits(num_rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """Logits in which no two of a row are equal."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(num_rows)])
    scale = torch.tensor([0.5, 4.0, 15.0]).repeat(num_rows)[:num_rows, None]
    return torch.special.ndtri((ranks + 0.5) / vocab) * scale


@pytest.mark.parametrize("params", GRID)
def test_scores_equal_those_of_hugging_face(params: SamplingParams) -> None:
    from transformers.generation import logits_process as hf

    logits = distinct_logits(6, 1_000)
    expected = hf.TemperatureLogitsWarper(params.temperature)(None, logits)
    if params.top_k:
        expected = hf.TopKLogitsWarper(params.top_k)(None, expected)
    if params.top_p < 1.0:
        expected = hf.TopPLogitsWarper(params.top_p)(None, expected)
    if params.min_p:
        expected = hf.MinPLogitsWarper(params.min_p)(None, expected)
    assert torch.equal(transform(logits, params), expected)


def test_the_nucleus_includes_the_token_that_crosses_the_mass() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    kept = transform(logits, SamplingParams(top_p=0.51)).isfinite()
    assert kept.tolist() == [[True, True, False, False]]


def test_the_nucleus_ends_where_the_mass_is_reached_exactly() -> None:
    logits = torch.tensor([[0.0, 0.0, -1.0, -torch.inf]], dtype=torch.float64)
    mass_of_first_two = 2 / (2 + float(torch.tensor(-1.0, dtype=torch.float64).exp()))
    kept = transform(logits, SamplingParams(top_p=mass_of_first_two - 1e-9)).isfinite()
    assert kept.tolist() == [[True, True, False, False]]
    kept = transform(logits, SamplingParams(top_p=mass_of_first_two + 1e-9)).isfinite()
    assert kept.tolist() == [[True, True, True, False]]


def test_tokens_that_tie_at_the_border_are_kept_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.6)):
        kept = transform(logits, params).isfinite()
        assert kept.tolist() == [[False, True, True, True, True, False]]


def test_top_p_counts_mass_among_the_survivors_of_top_k() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Among the first two the likelier has 4/7: enough for 0.55, though its own chance is 0.4.
    kept = transform(logits, SamplingParams(top_k=2, top_p=0.55)).isfinite()
    assert kept.tolist() == [[True, False, False, False]]


def test_a_nucleus_larger_than_the_sorted_prefix_is_found() -> None:
    logits = distinct_logits(3, 20_000) * 0.1
    probabilities = torch.softmax(logits.double(), -1)
    order = probabilities.sort(dim=-1, descending=True)
    for top_p in (0.001, 0.02, 0.3, 0.9999):
        before = order.values.cumsum(-1) - order.values
        kept = transform(logits, SamplingParams(top_p=top_p)).isfinite().gather(1, order.indices)
        # The normaliser is a float32, so a token within 1e-6 of the border may fall on either side.
        is_clear = (before - top_p).abs() > 1e-6
        assert torch.equal(kept[is_clear], (before < top_p)[is_clear])
        assert is_clear.double().mean() > 0.999


def test_ids_beyond_the_vocabulary_limit_are_excluded_before_all_else() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 9.0]])
    scores = transform(logits, SamplingParams(top_k=2), vocab_limit=3)
    assert scores.tolist() == [[-torch.inf, 2.0, 3.0, -torch.inf]]


def test_logits_are_left_alone_and_keep_no_less_than_float32() -> None:
    logits = torch.randn(2, 9).bfloat16()
    before = logits.clone()
    assert transform(logits, SamplingParams(temperature=0.3, top_k=2)).dtype == torch.float32
    assert torch.equal(logits, before)
    assert transform(logits.double(), SamplingParams(temperature=0.3)).dtype == torch.float64


@pytest.mark.parametrize("params", GRID[::7])
def test_a_row_has_the_same_bits_in_any_batch(params: SamplingParams) -> None:
    logits = distinct_logits(9, 3_000).bfloat16()
    together = transform(logits, params)
    for i in range(len(logits)):
        assert torch.equal(transform(logits[i : i + 1], params)[0], together[i])


def some_prefixes(num_rows: int, vocab: int) -> Prefixes:
    """Prompts of 20 ids and responses of different lengths; ids behind them are there, too."""
    generator = torch.Generator().manual_seed(1)
    return Prefixes(
        tokens=torch.randint(vocab, (num_rows, 60), generator=generator),
        lengths=20 + 7 * torch.arange(num_rows),
        prompt_lengths=torch.full((num_rows,), 20),
        end_ids=torch.tensor([[3, 9], [4, -1]]).repeat(num_rows, 1)[:num_rows],
    )


def test_changed_logits_equal_those_of_hugging_face() -> None:
    from transformers.generation import logits_process as hf

    logits, prefixes = distinct_logits(4, 300), some_prefixes(4, 300)
    params = SamplingParams(
        temperature=0.7,
        top_k=50,
        top_p=0.9,
        repetition_penalty=1.3,
        logit_bias=((7, 2.5), (11, -4.0)),
        suppress_tokens=(5, 200),
        min_new_tokens=8,
        logits_processor=hf.NoRepeatNGramLogitsProcessor(2),
    )
    scores = transform(logits, params, prefixes=prefixes)
    for row, length in enumerate(prefixes.lengths.tolist()):
        ids, expected = prefixes.tokens[row : row + 1, :length], logits[row : row + 1]
        ends = [token for token in prefixes.end_ids[row].tolist() if token >= 0]
        for processor in (
            hf.SequenceBiasLogitsProcessor([[[7], 2.5], [[11], -4.0]]),
            hf.RepetitionPenaltyLogitsProcessor(1.3),
            hf.MinNewTokensLengthLogitsProcessor(20, 8, ends),
            hf.SuppressTokensLogitsProcessor([5, 200]),
            hf.NoRepeatNGramLogitsProcessor(2),
            hf.TemperatureLogitsWarper(0.7),
            hf.TopKLogitsWarper(50),
            hf.TopPLogitsWarper(0.9),
        ):
            expected = processor(ids, expected)
        assert torch.equal(scores[row], expected[0])


def test_presence_and_frequency_count_the_response_and_not_the_prompt() -> None:
    prefixes = Prefixes(
        tokens=torch.tensor([[0, 0, 1, 1, 2, 3]]),
        lengths=torch.tensor([5]),
        prompt_lengths=torch.tensor([2]),
        end_ids=torch.empty(1, 0, dtype=torch.int64),
    )
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    changed = change_logits(torch.zeros(1, 4), params, prefixes=prefixes)
    assert changed.tolist() == [[0.0, -1.0, -0.75, 0.0]]


def test_a_logits_processor_sees_one_prefix_at_a_time_and_its_changed_logits() -> None:
    seen = []

    def force(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append((ids.tolist(), float(scores[0, 2])))
        forced = torch.full_like(scores, -torch.inf)
        forced[0, ids.shape[1] % 2] = 1.0
        forced[0, -1] = 5.0
        return forced

    prefixes = some_prefixes(3, 6)
    params = SamplingParams(logits_processor=force, logit_bias=((2, 3.0),))
    changed = change_logits(torch.zeros(3, 6), params, vocab_limit=5, prefixes=prefixes)
    rows = zip(prefixes.tokens.tolist(), (20, 27, 34), strict=True)
    assert seen == [([ids[:length]], 3.0) for ids, length in rows]
    # What it does to ids beyond the limit has no effect.
    assert changed.isfinite().nonzero().tolist() == [[0, 0], [1, 1], [2, 0]]


def test_a_logits_processor_must_return_what_it_was_given() -> None:
    params = SamplingParams(logits_processor=lambda ids, scores: scores[0])
    with pytest.raises(ConfigError, match=r"returned \(6,\); it must .* \(1, 6\)"):
        change_logits(torch.zeros(1, 6), params, prefixes=some_prefixes(1, 6))
    params = SamplingParams(logits_processor=lambda ids, scores: None)
    with pytest.raises(ConfigError, match="returned NoneType"):
        change_logits(torch.zeros(1, 6), params, prefixes=some_prefixes(1, 6))


def test_penalties_without_the_tokens_before_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens before"):
        transform(torch.zeros(1, 6), SamplingParams(presence_penalty=1.0))


PENALTIES = SamplingParams(
    temperature=0.8, repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.7
)


@pytest.mark.parametrize("params", [PENALTIES, replace(PENALTIES, top_p=0.9, min_new_tokens=9)])
def test_a_row_with_a_prefix_has_the_same_bits_in_any_batch(params: SamplingParams) -> None:
    logits, prefixes = distinct_logits(9, 1_003).bfloat16(), some_prefixes(9, 1_003)
    prefixes.lengths.clamp_max_(60)
    together = transform(logits, params, prefixes=prefixes)
    for row in range(len(logits)):
        alone = prefixes.at(torch.tensor([row]))
        assert torch.equal(
            transform(logits[row : row + 1], params, prefixes=alone)[0], together[row]
        )


@pytest.mark.parametrize("params", [SamplingParams(top_k=3), SamplingParams(top_p=0.6)])
def test_ties_at_the_border_are_settled_alike_in_a_batch_of_1_and_of_16(
    params: SamplingParams,
) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randint(4, (16, 500), generator=generator).bfloat16() / 2
    together = transform(logits, params)
    for row in range(16):
        assert torch.equal(transform(logits[row : row + 1], params)[0], together[row])
        border = logits[row][together[row].isfinite()].min()
        assert bool((logits[row] >= border).eq(together[row].isfinite()).all())


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(suppress_tokens=(90,)), "suppress_tokens names id 90; .* 0 to 89"),
        (SamplingParams(logit_bias=((-1, 2.0),)), "logit_bias names id -1"),
        (SamplingParams(logit_bias=((4, 2.0), (4, 1.0))), "twice"),
        (SamplingParams(logit_bias=((4, float("inf")),)), "id 4 is inf; .* suppress_tokens"),
    ],
)
def test_ids_that_a_model_does_not_draw_are_refused(params: SamplingParams, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_ids(params, 90)


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (SamplingParams(presence_penalty=float("nan")), "presence_penalty"),
        (SamplingParams(frequency_penalty=float("inf")), "frequency_penalty"),
        (SamplingParams(min_new_tokens=-1), "min_new_tokens"),
        (SamplingParams(temperature=-0.1), "temperature"),
        (SamplingParams(temperature=float("nan")), "temperature"),
        (SamplingParams(temperature=float("inf")), "temperature"),
        (SamplingParams(top_k=-1), "top_k"),
        (SamplingParams(top_p=0.0), "top_p"),
        (SamplingParams(top_p=1.1), "top_p"),
        (SamplingParams(min_p=-0.1), "min_p"),
        (SamplingParams(min_p=1.5), "min_p"),
    ],
)
def test_parameters_that_describe_no_distribution_are_refused(
    params: SamplingParams, name: str
) -> None:
    with pytest.raises(ConfigError, match=name):
        check_params(params)


def test_temperature_zero_has_no_scores() -> None:
    with pytest.raises(ConfigError, match="temperature is 0"):
        transform(torch.zeros(1, 3), SamplingParams(temperature=0.0))
