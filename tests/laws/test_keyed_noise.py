"""Law: the noise of any set of draws looks like independent uniform numbers.

All statistics are counts or means over many draws, turned into a two-sided probability; keys and
therefore outcomes are fixed. `ALPHA` is shared among the statistics of one test (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from ratoon.records import DrawKey, Stream
from ratoon.sampling import keyed_noise

ALPHA = 1e-4
BITS = keyed_noise.UNIFORM_BITS
Noise = Callable[[Tensor, Tensor], Tensor]


def keys_of(num: int, **fixed: int) -> Tensor:
    """Sequence keys of `num` samples of one prompt."""
    values = {"seed": 1, "round": 1, "row": 0} | fixed
    return keyed_noise.sequence_keys(
        DrawKey(stream=Stream.TRAIN, dataset="law", sample=i, **values) for i in range(num)
    )


def rows_at(keys: Tensor, t: int) -> Tensor:
    return keyed_noise.row_keys(keys, torch.full((len(keys),), t))


def smallest_p(counts: Tensor, expected: Tensor | float) -> float:
    """The smallest two-sided Poisson probability among some counts, times their number."""
    observed = counts.double().flatten().numpy()
    mean = np.broadcast_to(np.asarray(expected), observed.shape)
    tails = np.minimum(stats.poisson.cdf(observed, mean), stats.poisson.sf(observed - 1, mean))
    return float(2 * tails.min() * observed.size)


def normal_p(means: Tensor, num: int) -> float:
    """The same for means of `num` independent values of mean 0 and variance 1."""
    largest = float(means.abs().max()) * math.sqrt(num)
    return float(2 * stats.norm.sf(largest) * means.numel())


def permuted_rows(noise: Noise, row_keys: Tensor, ids: Tensor) -> int:
    """Number of rows whose values, in any order, another row has too."""
    rows = noise(row_keys, ids).sort(dim=-1).values
    return len(rows) - len(torch.unique(rows, dim=0))


def gaussian(bits: Tensor) -> Tensor:
    """Standard normal values of uniform bits."""
    return torch.special.ndtri((bits.double() + 0.5) / 2.0**BITS)


def test_both_tails_follow_poisson_down_to_two_to_the_minus_26() -> None:
    vocab, num_rows, deepest, shallowest = 49_152, 8_192, 26, 8
    per_chunk = 8
    tables = keyed_noise.noise_tables(rows_at(keys_of(num_rows), 5), vocab)
    out = torch.empty(per_chunk, vocab // 256, 256, dtype=torch.int32)
    scratch = torch.empty_like(out)
    top = 2**keyed_noise.HIGH_BITS - 1
    border = 2 ** (keyed_noise.HIGH_BITS - shallowest)
    low: list[Tensor] = []
    high: list[Tensor] = []
    for start in range(0, num_rows, per_chunk):
        words = keyed_noise.high_bits(tables.rows(slice(start, start + per_chunk)), out, scratch)
        low.append(words[words < border])
        high.append(top - words[words > top - border])
    num_draws = vocab * num_rows
    depths = torch.arange(shallowest, deepest + 1)
    borders = 2 ** (keyed_noise.HIGH_BITS - depths)
    expected = num_draws * 2.0 ** -depths.double()
    assert float(expected[-1]) >= 5
    for tail in (torch.cat(low), torch.cat(high)):
        counts = (tail[:, None] < borders).sum(0)
        assert smallest_p(counts, expected.numpy()) > ALPHA


def test_every_bit_and_every_pair_of_bits_is_fair() -> None:
    bits = keyed_noise.uniform_bits(rows_at(keys_of(200), 3), vocab_size=4_096).flatten()
    planes = torch.stack([(bits >> i) & 1 for i in range(BITS)]).float() * 2 - 1
    assert normal_p(planes.mean(1), len(bits)) > ALPHA
    products = planes @ planes.T / len(bits)
    pairs = products[torch.triu(torch.ones(BITS, BITS), diagonal=1).bool()]
    assert normal_p(pairs, len(bits)) > ALPHA


@pytest.mark.parametrize("shift", [0, 8, 23, 31, 40, 44])
def test_eight_neighbouring_bits_fill_their_256_cells_evenly(shift: int) -> None:
    bits = keyed_noise.uniform_bits(rows_at(keys_of(64), 9), vocab_size=50_000).flatten()
    cells = torch.bincount((bits >> shift) & 0xFF, minlength=256).numpy()
    assert stats.chisquare(cells).pvalue > ALPHA / 6


def dependence_p(first: Tensor, second: Tensor) -> float:
    """Evidence of dependence between two equally shaped samples of k.

    Correlations of normal scores, of their squares, and counts of jointly small and jointly large
    values: what would distort a race between two tokens.
    """
    num = first.numel()
    x, y = gaussian(first).flatten(), gaussian(second).flatten()
    linear = (x * y).mean()
    squares = ((x.square() - 1) * (y.square() - 1) / 2).mean()
    crossed = ((x.square() - 1) * y / math.sqrt(2)).mean()
    correlations = normal_p(torch.stack((linear, squares, crossed)), num)
    counts, expected = [], []
    for depth in (3, 6, 9):
        border = 1 << (BITS - depth)
        is_low = (first < border, second < border)
        is_high = (first >= 2**BITS - border, second >= 2**BITS - border)
        for a, b in ((is_low[0], is_low[1]), (is_low[0], is_high[1]), (is_high[0], is_high[1])):
            counts.append((a & b).sum())
            expected.append(num * 4.0**-depth)
    joint = smallest_p(torch.stack(counts), np.array(expected))
    return min(1.0, 2 * min(correlations, joint))


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 255, 256, 257, 512, 1_024, 2_048])
def test_neighbouring_ids_are_independent(lag: int) -> None:
    bits = keyed_noise.uniform_bits(rows_at(keys_of(256), 7), vocab_size=4_096)
    assert dependence_p(bits[:, lag:], bits[:, :-lag]) > ALPHA / 10


@pytest.mark.parametrize("step", [1, 2, 3, 256, 65_536])
def test_neighbouring_positions_are_independent(step: int) -> None:
    keys, ids = keys_of(512), torch.arange(2_048)
    first = keyed_noise.uniform_bits(rows_at(keys, 100), ids)
    second = keyed_noise.uniform_bits(rows_at(keys, 100 + step), ids)
    assert dependence_p(first, second) > ALPHA / 10
    # Also across ids: the noise of v at t is not that of v + 1 at t + 1.
    assert dependence_p(first[:, 1:], second[:, :-1]) > ALPHA / 10


@pytest.mark.parametrize(
    "field", ["seed", "round", "row", "attempt", "sample", "stream", "dataset"]
)
def test_responses_that_differ_in_one_field_of_the_key_are_independent(field: str) -> None:
    pairs = []
    for i in range(512):
        key = DrawKey(seed=i, stream=Stream.TRAIN, round=1, dataset="a", row=1, sample=1)
        others = {"stream": Stream.EVAL, "dataset": "b"}
        other = others[field] if field in others else getattr(key, field) + 1
        pairs.append((key, replace(key, **{field: other})))
    ids = torch.arange(2_048)
    first, second = (
        keyed_noise.uniform_bits(rows_at(keyed_noise.sequence_keys(keys), 12), ids)
        for keys in zip(*pairs, strict=True)
    )
    assert dependence_p(first, second) > ALPHA / 10


def test_four_ids_in_a_rectangle_of_blocks_and_columns_are_independent() -> None:
    """The words before mixing obey one equation per rectangle; it must not show after it."""
    bits = keyed_noise.uniform_bits(rows_at(keys_of(2_048), 3), vocab_size=1_024)
    grid = bits.view(-1, 4, 256)
    corners = [grid[:, i, j::2] for i in (0, 1) for j in (0, 1)]
    scores = [gaussian(corner) for corner in corners]
    product = scores[0] * scores[1] * scores[2] * scores[3]
    assert normal_p(product.mean()[None], product.numel()) > ALPHA / 2
    signs = torch.zeros_like(corners[0])
    for corner in corners:
        signs ^= corner
    parities = torch.stack([(signs >> i) & 1 for i in range(BITS)]).double() * 2 - 1
    assert normal_p(parities.flatten(1).mean(1), signs.numel()) > ALPHA / 2


def test_a_flipped_bit_of_the_key_or_the_position_flips_every_noise_bit_half_the_time() -> None:
    keys, ids = keys_of(400), torch.arange(0, 4_096, 173)
    t = torch.arange(len(keys))
    base = keyed_noise.uniform_bits(keyed_noise.row_keys(keys, t), ids)
    shares = []
    for word in (0, 1):
        for bit in range(64):
            flipped = keys.clone()
            flipped[:, word] ^= (1 << bit) - (1 << 64 if bit == 63 else 0)
            shares.append(flip_shares(base, keyed_noise.row_keys(flipped, t), ids))
    for bit in range(20):
        shares.append(flip_shares(base, keyed_noise.row_keys(keys, t ^ (1 << bit)), ids))
    assert normal_p(torch.stack(shares) * 2 - 1, base.numel()) > ALPHA


def flip_shares(base: Tensor, row_keys: Tensor, ids: Tensor) -> Tensor:
    """For each of the 52 bits of k, how often it differs."""
    changed = base ^ keyed_noise.uniform_bits(row_keys, ids)
    return torch.stack([((changed >> i) & 1).double().mean() for i in range(BITS)])


def test_no_two_of_100_000_rows_are_equal_or_permuted() -> None:
    """Neighbouring samples, positions and key words; ids in several blocks and columns."""
    ids = torch.cat((torch.arange(24), torch.arange(1, 25) * 256 + 1))
    row_keys = torch.cat(
        (
            rows_at(keys_of(30_000), 1),
            keyed_noise.row_keys(keys_of(1).expand(30_000, 2), torch.arange(2, 30_002)),
            neighbouring_words(40_000),
        )
    )
    values = torch.cat([keyed_noise.uniform_bits(chunk, ids) for chunk in row_keys.split(4_096)])
    assert len(values) == 100_000
    # Every value differs (0.003 equal pairs are expected): no rows are equal, permuted or overlap.
    assert len(torch.unique(values)) == values.numel()


def neighbouring_words(num: int) -> Tensor:
    """Row keys that differ in a few low bits of either word, as real ones never do.

    The lowest bit of the second word does not count: it makes the multiplier odd.
    """
    index = torch.arange(num)
    return torch.stack((index & 0xFF, (index >> 8) << 1), dim=-1)


def test_a_mix_that_is_not_keyed_makes_permuted_rows_and_is_found() -> None:
    def unkeyed(row_keys: Tensor, ids: Tensor) -> Tensor:
        return keyed_noise._mix64_(row_keys[:, :1] ^ ids)

    ids = torch.arange(64)
    row_keys = neighbouring_words(256)
    assert permuted_rows(unkeyed, row_keys, ids) > 200
    assert permuted_rows(keyed_noise.uniform_bits, row_keys, ids) == 0


def test_dependence_is_found_where_it_is_planted() -> None:
    bits = keyed_noise.uniform_bits(rows_at(keys_of(64), 7), vocab_size=4_096)
    other = keyed_noise.uniform_bits(rows_at(keys_of(64), 8), vocab_size=4_096)
    is_shared = keyed_noise.uniform_bits(rows_at(keys_of(64), 9), vocab_size=4_096) % 100 < 2
    assert dependence_p(bits, torch.where(is_shared, bits, other)) < ALPHA / 10
