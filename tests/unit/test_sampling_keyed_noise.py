"""Keyed noise: the same bits however it is asked for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ratoon.records import DrawKey, Stream
from ratoon.sampling import keyed_noise

KEY = DrawKey(seed=7, stream=Stream.TRAIN, round=3, dataset="arith", row=41, sample=0)
PINNED_KEY = (754_782_593_536_303_277, 4_304_386_024_040_261_093)
PINNED_ROW_KEY = [4_184_354_561_312_811_474, -4_090_907_016_303_562_839]
PINNED_BITS = [
    357_178_732_907_048,
    1_008_469_809_144_470,
    883_977_331_474_137,
    3_924_482_316_529_308,
    4_395_509_335_382_462,
]


@pytest.fixture
def row_keys() -> torch.Tensor:
    keys = keyed_noise.sequence_keys(replace(KEY, sample=i) for i in range(9))
    return keyed_noise.row_keys(keys, torch.arange(9) * 3)


def test_noise_never_changes_between_versions() -> None:
    """Recorded runs replay only if these values stay."""
    assert keyed_noise.sequence_key(KEY) == PINNED_KEY
    keys = keyed_noise.sequence_keys([KEY])
    row_keys = keyed_noise.row_keys(keys, torch.tensor([12]))
    assert row_keys.tolist() == [PINNED_ROW_KEY]
    ids = torch.tensor([0, 1, 255, 256, 49_151])
    assert keyed_noise.uniform_bits(row_keys, ids).tolist() == [PINNED_BITS]


def test_every_field_of_the_key_takes_part() -> None:
    others = [
        replace(KEY, seed=8),
        replace(KEY, stream=Stream.EVAL),
        replace(KEY, round=4),
        replace(KEY, dataset="arith2"),
        replace(KEY, row=42),
        replace(KEY, sample=1),
        replace(KEY, attempt=1),
        # The same digits, cut elsewhere.
        replace(KEY, round=34, row=1),
        replace(KEY, dataset="0|arith", sample=0, attempt=0),
    ]
    keys = {keyed_noise.sequence_key(key) for key in (KEY, *others)}
    assert len(keys) == 1 + len(others)


def test_a_subset_of_ids_has_the_noise_of_the_full_row(row_keys: torch.Tensor) -> None:
    full = keyed_noise.uniform_bits(row_keys, vocab_size=2_000)
    ids = torch.tensor([0, 3, 255, 256, 1_999, 3])
    assert torch.equal(keyed_noise.uniform_bits(row_keys, ids), full[:, ids])
    per_row = torch.randint(0, 2_000, (9, 70), generator=torch.Generator().manual_seed(0))
    assert torch.equal(keyed_noise.uniform_bits(row_keys, per_row), full.gather(1, per_row))


def test_a_larger_vocabulary_changes_no_noise(row_keys: torch.Tensor) -> None:
    small = keyed_noise.uniform_bits(row_keys, vocab_size=300)
    large = keyed_noise.uniform_bits(row_keys, vocab_size=70_000)
    assert torch.equal(large[:, :300], small)


def test_a_row_has_the_same_noise_in_any_batch(row_keys: torch.Tensor) -> None:
    together = keyed_noise.exponential(row_keys, vocab_size=5_001)
    for i in range(9):
        alone = keyed_noise.exponential(row_keys[i : i + 1], vocab_size=5_001)
        assert torch.equal(alone[0], together[i])


def test_exponential_is_that_of_the_52_bits(row_keys: torch.Tensor) -> None:
    bits = keyed_noise.uniform_bits(row_keys, vocab_size=1_000)
    noise = keyed_noise.exponential(row_keys, vocab_size=1_000)
    for k, e in zip(bits[0, :50].tolist(), noise[0, :50].tolist(), strict=True):
        assert e == pytest.approx(-math.log1p(-(k + 0.5) / 2**52), rel=1e-15)
    assert noise.dtype == torch.float64


def test_float32_noise_is_the_same_noise_rounded(row_keys: torch.Tensor) -> None:
    ids = torch.arange(0, 40_000, 7)
    exact = keyed_noise.exponential(row_keys, ids, vocab_size=40_000)
    rounded = keyed_noise.exponential(row_keys, ids, vocab_size=40_000, dtype=torch.float32)
    assert torch.equal(rounded, exact.float())


def test_the_estimate_agrees_with_the_exact_noise(row_keys: torch.Tensor) -> None:
    ids = torch.arange(0, 40_000, 7)
    tables = keyed_noise.noise_tables(row_keys, 40_000)
    exact = keyed_noise.exponential_at(tables, ids)
    estimate = keyed_noise.exponential_estimate(tables, ids)
    assert estimate.dtype == torch.float32
    w, w_estimate = -torch.expm1(-exact), -torch.expm1(-estimate.double())
    assert ((w_estimate - w).abs() <= 2.0**-32 + 2.0**-22 * w).all()
    assert estimate.isfinite().all()
    assert (estimate > 0).all()


def test_high_bits_are_the_upper_part_of_k(row_keys: torch.Tensor) -> None:
    tables = keyed_noise.noise_tables(row_keys, 1_024)
    out = torch.empty(9, 4, 256, dtype=torch.int32)
    high = keyed_noise.high_bits(tables, out, torch.empty_like(out)).flatten(1)
    bits = keyed_noise.uniform_bits(row_keys, vocab_size=1_024)
    assert torch.equal(high.long(), bits >> keyed_noise.LOW_BITS)


def test_positions_of_a_response_share_no_word_of_their_keys() -> None:
    keys = keyed_noise.sequence_keys([KEY]).expand(20_000, 2)
    row_keys = keyed_noise.row_keys(keys, torch.arange(20_000))
    assert len(torch.unique(row_keys)) == 40_000


def test_the_noise_of_no_ids_and_of_no_rows_is_empty(row_keys: torch.Tensor) -> None:
    no_ids = torch.empty(0, dtype=torch.int64)
    assert keyed_noise.exponential(row_keys, no_ids).shape == (9, 0)
    assert keyed_noise.exponential(row_keys[:0], vocab_size=5).shape == (0, 5)
    assert keyed_noise.sequence_keys([]).shape == (0, 2)


def test_noise_needs_ids_or_a_vocabulary(row_keys: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="ids or vocab_size"):
        keyed_noise.exponential(row_keys)
