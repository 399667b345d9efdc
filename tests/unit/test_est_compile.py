"""Layers compiled one by one: draws change indices, and indices are data."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ratoon.est.sampler import RandomSampler
from ratoon.est.sliced_forward import hidden_states
from ratoon.est.subnetwork import Rates, Shape, Subnetwork
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.packing import PackedBatch

CONFIG = DecoderConfig(
    family="gpt2", vocab_size=20, hidden_size=16, intermediate_size=64, num_layers=4, num_heads=4,
    num_kv_heads=4, head_dim=4, max_positions=8, norm="layer", positions="learned",
    activation="gelu_tanh", qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip
BATCH = PackedBatch.of([[1, 2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 5, 6, 7, 8, 9]])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def _computed(decoder: Decoder, subnetwork: Subnetwork) -> tuple[Tensor, list[Tensor]]:
    """States, and gradients as `main_grad` sums them."""
    for parameter in decoder.parameters():
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    states = hidden_states(decoder, BATCH, subnetwork)
    states.square().sum().backward()
    return states.detach(), [parameter.main_grad for parameter in decoder.parameters()]


def test_compiled_layers_need_one_graph_a_stage_whatever_is_drawn() -> None:
    torch.manual_seed(0)
    decoder = Decoder(CONFIG)
    sampler = RandomSampler(Shape.of(CONFIG, neuron_block=16), 0)
    stages = (Rates(0.5, 0.5, 0.5), Rates(1, 0.5, 0.5), Rates())
    draws = [sampler.draw(rates, step, 0, 2) for rates in stages for step in range(2)]
    expected = [_computed(decoder, drawn) for drawn in draws]
    for layer in decoder.layers:
        layer.compile(backend="aot_eager")
    for drawn, (states, gradients) in zip(draws, expected, strict=True):
        found = _computed(decoder, drawn)
        torch.testing.assert_close(found[0], states)
        for one, other in zip(found[1], gradients, strict=True):
            torch.testing.assert_close(one, other)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    # Scales differ between the first two stages; the third takes weights as they are.
    assert counters["stats"]["unique_graphs"] == len(stages)
