"""The KV cache: views, entry-wise copies, rows."""

from __future__ import annotations

import pytest
import torch

from ratoon.models.kv_cache import KVCache, attention_width, round_up_width

LAYERS, SLOTS, HEADS, HEAD_DIM = 2, 3, 2, 4


def make_cache(num_positions: int = 70) -> KVCache:
    """Filled with numbers that are all different."""
    cache = KVCache(
        num_layers=LAYERS,
        num_slots=SLOTS,
        num_positions=num_positions,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache.data.copy_(torch.arange(cache.data.numel()).view(cache.data.shape))
    return cache


@pytest.mark.parametrize(("length", "width"), [(1, 64), (64, 64), (65, 128), (2048, 2048)])
def test_widths_are_whole_blocks(length: int, width: int) -> None:
    assert round_up_width(length) == width


def test_float32_widths_are_cut_where_shorter_ones_are() -> None:
    lengths = (1, 192, 193, 384, 385, 512, 513, 705, 1024)
    widths = [attention_width(length, torch.float32) for length in lengths]
    assert widths == [192, 192, 384, 384, 512, 512, 704, 896, 1024]
    assert [attention_width(length, torch.bfloat16) for length in (1, 65)] == [64, 128]


def test_an_empty_cache_is_finite_and_holds_whole_blocks() -> None:
    cache = KVCache(
        num_layers=1,
        num_slots=1,
        num_positions=70,
        num_kv_heads=1,
        head_dim=2,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    assert cache.num_positions == 128
    assert bool((cache.data == 0).all())


def test_views_show_what_is_written_by_entry() -> None:
    cache = make_cache()
    other, layer = cache.layers(1, 2, 64)
    entry = 2 * cache.num_positions + 5
    layer.key_entries[entry] = -1.0
    layer.value_entries[entry] = -2.0
    assert layer.keys.shape == layer.values.shape == (2, HEADS, 64, HEAD_DIM)
    assert bool((layer.keys[1, :, 5] == -1).all())
    assert bool((layer.values[1, :, 5] == -2).all())
    assert int((layer.keys < 0).sum()) == HEADS * HEAD_DIM
    assert bool((other.keys >= 0).all())
    assert int((cache.data < 0).sum()) == 2 * HEADS * HEAD_DIM


def test_entries_are_copied_in_all_layers_and_read_before_they_are_overwritten() -> None:
    cache = make_cache()
    before = cache.data.clone()
    # A chain of moves: 7 -> 6, 6 -> 5, and one across slots.
    start = cache.num_positions
    cache.copy_entries(torch.tensor([7, 6, start + 9]), torch.tensor([6, 5, 1]))
    expected = before.clone()
    expected[:, :, 0, 6] = before[:, :, 0, 7]
    expected[:, :, 0, 5] = before[:, :, 0, 6]
    expected[:, :, 0, 1] = before[:, :, 1, 9]
    assert torch.equal(cache.data, expected)


def test_copying_nothing_changes_nothing() -> None:
    cache = make_cache()
    before = cache.data.clone()
    none = torch.zeros(0, dtype=torch.int64)
    cache.copy_entries(none, none)
    assert torch.equal(cache.data, before)


def test_a_row_moves_with_its_length() -> None:
    cache = make_cache()
    before = cache.data.clone()
    cache.copy_row(2, 0, 17)
    assert torch.equal(cache.data[:, :, 0, :17], before[:, :, 2, :17])
    assert torch.equal(cache.data[:, :, 0, 17:], before[:, :, 0, 17:])
    assert torch.equal(cache.data[:, :, 1:], before[:, :, 1:])


def test_what_is_read_from_one_row_can_be_written_to_another() -> None:
    cache = make_cache()
    entries = cache.read_row(1, 20)
    assert entries.shape == (2, LAYERS, 20, HEADS, HEAD_DIM)
    cache.data[:, :, 1].zero_()
    cache.write_row(2, entries)
    assert torch.equal(cache.read_row(2, 20), entries)
    assert bool((entries > 0).any())
