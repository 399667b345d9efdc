"""Counted operations, against published sizes and the paper's own way of counting."""

from __future__ import annotations

import pytest

from ratoon.est.flops import layer_ratio, optimizer_flops, token_flops
from ratoon.est.sampler import NestedSampler, RandomSampler
from ratoon.est.subnetwork import Rates, Shape, Subnetwork
from ratoon.models.decoder import DecoderConfig

TINY_LLAMA = DecoderConfig(
    family="llama", vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_layers=22,
    num_heads=32, num_kv_heads=4, head_dim=64, tie_word_embeddings=False,
)  # fmt: skip


def test_tinyllama_by_hand() -> None:
    shape = Shape.of(TINY_LLAMA)
    full = token_flops(TINY_LLAMA, Subnetwork.full(shape), 2048)
    projections = 22 * 2 * (2 * 2048 * 2048 + 2 * 2048 * 256)
    assert full.projections == projections
    assert full.attention == 22 * 2 * 2048 * 2048
    assert full.mlp == 22 * 3 * 2 * 2048 * 5632
    assert full.head / full.forward == pytest.approx(0.058, abs=5e-4)
    for rates, ratio in ((Rates(0.5, 0.5, 0.5), 0.299), (Rates(1, 0.5, 0.5), 0.539)):
        part = token_flops(TINY_LLAMA, RandomSampler(shape, 0).draw(rates, 0, 0, 1), 2048)
        assert part.training / full.training == pytest.approx(ratio, abs=2e-3)


def test_the_papers_count_is_the_product_of_the_rates() -> None:
    shape = Shape.of(TINY_LLAMA, head_unit="group")
    for sampler in (RandomSampler(shape, 0), NestedSampler(shape)):
        drawn = sampler.draw(Rates(0.5, 0.5, 0.5), 0, 0, 1)
        assert layer_ratio(TINY_LLAMA, drawn, Subnetwork.full(shape)) == pytest.approx(0.25)


def test_heads_within_groups_keep_the_cost_of_keys_and_values() -> None:
    shape = Shape.of(TINY_LLAMA)
    drawn = NestedSampler(shape).draw(Rates(1, 0.5, 1), 0, 0, 1)
    cost = token_flops(TINY_LLAMA, drawn, 2048)
    assert cost.projections == 22 * 2 * (2 * 2048 * 1024 + 2 * 2048 * 256)


def test_sequences_that_skip_a_layer_cost_nothing_there() -> None:
    shape = Shape.of(TINY_LLAMA)
    drawn = RandomSampler(shape, 0, depth="sequences").draw(Rates(0.25, 1, 1), 0, 0, 8)
    full = token_flops(TINY_LLAMA, Subnetwork.full(shape), 2048)
    assert token_flops(TINY_LLAMA, drawn, 2048).layers == pytest.approx(full.layers / 4)


def test_optimizer_steps_are_counted_by_parameter_and_by_matrix() -> None:
    assert optimizer_flops([(10, 20), (7,)], "adamw") == 17 * 207
    assert optimizer_flops([(10, 20)], "muon") == 11 * 200 + 5 * (4 * 100 * 20 + 2 * 1000)
