"""Transforms: what Hugging Face computes, apart from the rule for ties at the nucleus's border."""

from __future__ import annotations

import itertools

import pytest
import torch

from ratoon.errors import ConfigError
from ratoon.records import SamplingParams
from ratoon.sampling.transforms import check_params, transform

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


@pytest.mark.parametrize(
    ("params", "name"),
    [
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
