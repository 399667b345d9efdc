"""Law: keyed selection draws exact samples of p, response by response and round by round.

The target is a table of logits over a small vocabulary in which the next token depends on the
last one, so that noise shared between positions would distort the joint distribution.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from ratoon.records import DrawKey, SamplingParams, Stream
from ratoon.sampling import keyed_noise
from ratoon.sampling.select import Selector

VOCAB = 6
NUM_SAMPLES = 200_000
ALPHA = 1e-4
FIRST_T = 17
# One row of logits for each previous token; the last row starts a sequence.
TABLE = torch.randn(VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
KEY = DrawKey(seed=11, stream=Stream.TRAIN, round=1, dataset="table", row=4, sample=0)

CASES = [
    (3, SamplingParams()),
    (2, SamplingParams(temperature=0.7)),
    (2, SamplingParams(temperature=1.4, top_k=3)),
    (2, SamplingParams(top_p=0.7)),
    (2, SamplingParams(temperature=1.2, min_p=0.2)),
    (2, SamplingParams(temperature=0.9, top_k=4, top_p=0.85, min_p=0.05)),
]


def draw(
    keys: Tensor, params: SamplingParams, length: int, is_noise_reused: bool = False
) -> Tensor:
    """Sequences of the table's language, [N, length], one for each key."""
    selector = Selector(VOCAB)
    parts = []
    for chunk in keys.split(256):
        last = torch.full((len(chunk),), VOCAB)
        tokens = []
        for i in range(length):
            t = torch.full_like(last, FIRST_T if is_noise_reused else FIRST_T + i)
            last, _ = selector.select(TABLE[last], keyed_noise.row_keys(chunk, t), params)
            tokens.append(last)
        parts.append(torch.stack(tokens, dim=-1))
    return torch.cat(parts)


def reference_p(logits: Tensor, params: SamplingParams) -> list[float]:
    """p by the definitions, token by token, in Python's floats."""
    scaled = [float(x) / params.temperature for x in logits]
    kept = sorted(range(VOCAB), key=lambda v: -scaled[v])[: params.top_k or VOCAB]
    if params.top_p < 1.0:
        weights = np.exp([scaled[v] for v in kept])
        before = np.concatenate(([0.0], np.cumsum(weights / weights.sum())[:-1]))
        kept = [v for v, mass in zip(kept, before, strict=True) if mass < params.top_p]
    weights = np.exp([scaled[v] - scaled[kept[0]] for v in kept])
    kept = [v for v, weight in zip(kept, weights, strict=True) if weight >= params.min_p]
    total = sum(np.exp(scaled[v]) for v in kept)
    return [float(np.exp(scaled[v]) / total) if v in kept else 0.0 for v in range(VOCAB)]


def sequence_chances(params: SamplingParams, length: int) -> np.ndarray:
    """The chance of every sequence, in lexicographic order."""
    rows = [reference_p(TABLE[previous], params) for previous in range(VOCAB + 1)]
    chances = []
    for sequence in itertools.product(range(VOCAB), repeat=length):
        steps = zip((VOCAB, *sequence), sequence, strict=False)
        chances.append(float(np.prod([rows[previous][token] for previous, token in steps])))
    return np.array(chances)


def counts_of(sequences: Tensor) -> np.ndarray:
    length = sequences.shape[1]
    cells = (sequences * VOCAB ** torch.arange(length - 1, -1, -1)).sum(-1)
    return torch.bincount(cells, minlength=VOCAB**length).numpy()


def fit_p(counts: np.ndarray, chances: np.ndarray) -> float:
    """The chi-square probability of counts; cells that expect under 10 are pooled."""
    if counts[chances == 0].any():
        return 0.0
    expected = chances * counts.sum()
    is_small = expected < 10
    observed = np.append(counts[~is_small], counts[is_small].sum())
    expected = np.append(expected[~is_small], expected[is_small].sum())
    is_used = expected > 0
    return float(stats.chisquare(observed[is_used], expected[is_used], sum_check=False).pvalue)


def total_variation(counts: np.ndarray, chances: np.ndarray) -> float:
    return float(np.abs(counts / counts.sum() - chances).sum() / 2)


def keys_over(field: str, num: int, first: int = 0) -> Tensor:
    return keyed_noise.sequence_keys(replace(KEY, **{field: first + i}) for i in range(num))


@pytest.fixture(scope="module")
def keys() -> Tensor:
    """Groups of 8 samples of 25 prompts in 1,000 rounds."""
    return keyed_noise.sequence_keys(
        replace(KEY, round=number, row=row, sample=sample)
        for number in range(1_000)
        for row in range(25)
        for sample in range(8)
    )


@pytest.mark.parametrize(("length", "params"), CASES)
def test_sequences_follow_p(keys: Tensor, length: int, params: SamplingParams) -> None:
    counts = counts_of(draw(keys, params, length))
    chances = sequence_chances(params, length)
    assert counts.sum() == NUM_SAMPLES
    assert fit_p(counts, chances) > ALPHA / len(CASES)
    # The mean absolute deviation of a binomial share, summed over cells, plus a fifth.
    typical = np.sqrt(2 * chances * (1 - chances) / (np.pi * NUM_SAMPLES)).sum() / 2
    assert total_variation(counts, chances) < 1.2 * typical + 1e-3


def test_one_prompt_over_2_000_rounds_follows_p() -> None:
    """The trap of a second epoch: a policy that never changes must still explore."""
    sequences = draw(keys_over("round", 2_000, first=1), SamplingParams(), 2)
    assert fit_p(counts_of(sequences), sequence_chances(SamplingParams(), 2)) > ALPHA


def test_the_same_prompt_in_two_rounds_gives_different_responses() -> None:
    first, second = draw(keys_over("round", 2, first=1), SamplingParams(), 40)
    assert not torch.equal(first, second)


def test_duplicate_prompts_in_two_rows_give_different_responses() -> None:
    first, second = draw(keys_over("row", 2), SamplingParams(), 40)
    assert not torch.equal(first, second)


def test_siblings_are_independent() -> None:
    """Pairs of samples of one group; without independence advantages would be biased."""
    num_groups = 20_000
    tokens = draw(
        keyed_noise.sequence_keys(
            replace(KEY, row=row, sample=sample) for row in range(num_groups) for sample in (0, 1)
        ),
        SamplingParams(),
        1,
    ).view(num_groups, 2)
    chances = np.array(reference_p(TABLE[VOCAB], SamplingParams()))
    assert fit_p(counts_of(tokens), np.outer(chances, chances).ravel()) > ALPHA


def test_a_key_without_the_round_is_found() -> None:
    same = keyed_noise.sequence_keys([replace(KEY, round=1)]).expand(2_000, 2)
    counts = counts_of(draw(same, SamplingParams(), 2))
    assert fit_p(counts, sequence_chances(SamplingParams(), 2)) < ALPHA


def test_a_key_without_the_sample_is_found() -> None:
    groups = keys_over("row", 2_500).repeat_interleave(8, dim=0)
    counts = counts_of(draw(groups, SamplingParams(), 2))
    assert fit_p(counts, sequence_chances(SamplingParams(), 2)) < ALPHA


def test_noise_reused_across_positions_is_found() -> None:
    sequences = draw(keys_over("sample", 20_000), SamplingParams(), 2, is_noise_reused=True)
    first_tokens = counts_of(sequences[:, :1])
    assert fit_p(first_tokens, sequence_chances(SamplingParams(), 1)) > ALPHA
    assert fit_p(counts_of(sequences), sequence_chances(SamplingParams(), 2)) < ALPHA


def test_the_key_of_another_prompt_is_found() -> None:
    """Every second prompt is drawn with its neighbour's key: pairs of prompts then agree."""
    keys = keys_over("row", 20_000)
    keys[1::2] = keys[::2]
    tokens = draw(keys, SamplingParams(), 1).view(-1, 2)
    chances = np.array(reference_p(TABLE[VOCAB], SamplingParams()))
    assert fit_p(counts_of(tokens), np.outer(chances, chances).ravel()) < ALPHA


def test_tokens_too_rare_for_24_bit_noise_are_drawn_as_often_as_they_should_be() -> None:
    vocab, num_rows, rare_mass = 49_152, 6_000, 2e-3
    rare = rare_mass / (vocab - 1)
    assert rare < 2.0**-24
    logits = torch.full((64, vocab), float(np.log(rare)))
    logits[:, 0] = float(np.log1p(-rare_mass))
    selector = Selector(vocab)
    keys = keys_over("sample", num_rows)
    num_rare = 0
    for chunk in keys.split(64):
        row_keys = keyed_noise.row_keys(chunk, torch.zeros(len(chunk), dtype=torch.int64))
        ids, _ = selector.select(logits[: len(chunk)], row_keys, SamplingParams())
        num_rare += int((ids > 0).sum())
    expected = num_rows * rare_mass
    tails = stats.poisson.cdf(num_rare, expected), stats.poisson.sf(num_rare - 1, expected)
    assert 2 * min(tails) > ALPHA
