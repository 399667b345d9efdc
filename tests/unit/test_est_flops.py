"""Counted operations, against published sizes and the paper's own way of counting."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ratoon.est.flops import layer_ratio, measured_flops, optimizer_flops, token_flops
from ratoon.est.sampler import NestedSampler, RandomSampler
from ratoon.est.sliced_forward import hidden_states
from ratoon.est.subnetwork import Rates, Shape, Subnetwork
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.packing import PackedBatch

TINY_LLAMA = DecoderConfig(
    family="llama", vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_layers=22,
    num_heads=32, num_kv_heads=4, head_dim=64, tie_word_embeddings=False,
)  # fmt: skip
GPT2 = DecoderConfig(
    family="gpt2", vocab_size=50_257, hidden_size=768, intermediate_size=3072, num_layers=12,
    num_heads=12, num_kv_heads=12, head_dim=64, max_positions=1024, norm="layer",
    positions="learned", activation="gelu_tanh", qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip
STAGES = (Rates(0.5, 0.5, 0.5), Rates(1, 0.5, 0.5), Rates())


def test_the_head_of_gpt2_takes_most_of_what_the_paper_counts_as_saved() -> None:
    shape = Shape.of(GPT2)
    draws = [RandomSampler(shape, 0).draw(rates, 0, 0, 1) for rates in STAGES]
    costs = [token_flops(GPT2, drawn, 1024).training for drawn in draws]
    assert [cost / costs[2] for cost in costs] == pytest.approx([0.468, 0.645, 1.0], abs=5e-4)
    lasts = (2 / 15, 1 / 3, 8 / 15)
    saved = 1 - sum(last * cost for last, cost in zip(lasts, costs, strict=True)) / costs[2]
    assert saved == pytest.approx(0.189, abs=5e-4)


@pytest.mark.parametrize("config", [GPT2, TINY_LLAMA], ids=["gpt2", "tinyllama"])
@pytest.mark.parametrize("depth", ["layers", "sequences", "nested"])
def test_the_count_is_what_torch_counts_while_computing(config: DecoderConfig, depth: str) -> None:
    tokens, sequences = 256, 4
    config = dataclasses.replace(config, num_layers=4)
    with torch.device("meta"):
        decoder = Decoder(config).to(torch.bfloat16)
    batch = PackedBatch.of([[0] * tokens] * sequences).to(torch.device("meta"))
    shape = Shape.of(config, neuron_block=64)
    sampler = NestedSampler(shape) if depth == "nested" else RandomSampler(shape, 0, depth=depth)
    for rates in STAGES:
        drawn = sampler.draw(rates, 0, 0, sequences)

        def compute(drawn: Subnetwork = drawn) -> None:
            states = hidden_states(decoder, batch, drawn)
            torch.nn.functional.linear(states, decoder.head_weight).sum().backward()

        expected = token_flops(config, drawn, tokens).training * tokens * sequences
        assert measured_flops(compute) == pytest.approx(expected, rel=0.01)


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
