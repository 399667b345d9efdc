"""A model that is no Transformer: its laws are those of the decoder.

Mamba's layers compute in float32 by themselves. Channels that do not take part reach others only
through two matrices, so the masked model is the whole one with columns of these at zero.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ratoon.est.adapters import FunctionalAdapter, mamba_adapter
from ratoon.est.growth import grow
from ratoon.est.sampler import NestedSampler, RandomSampler, Sampler
from ratoon.est.subnetwork import LayerPart, Normalisation, Rates, Subnetwork

transformers = pytest.importorskip("transformers")

IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9, 7, 9], [3, 2, 3, 8, 4]])
RATES = Rates(0.5, 1, 0.5)


def _adapter(num_layers: int = 4) -> FunctionalAdapter:
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        vocab_size=30, hidden_size=8, intermediate_size=16, state_size=4, time_step_rank=2,
        num_hidden_layers=num_layers, use_bias=True,
    )  # fmt: skip
    model = transformers.MambaModel(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.3)
    return mamba_adapter(model, channel_block=4)


def _samplers(adapter: FunctionalAdapter) -> list[Sampler]:
    shape = adapter.layout.shape
    return [
        RandomSampler(shape, 0, Normalisation(mlp="inv_p", layers="inv_sqrt_p")),
        RandomSampler(shape, 0, depth="sequences"),
        NestedSampler(shape),
    ]


def _masked(adapter: FunctionalAdapter, subnetwork: Subnetwork) -> Tensor:
    model: Any = adapter.model
    x = model.embeddings(IDS)
    for block, part in zip(model.layers, subnetwork.layers, strict=True):
        bias = block.mixer.out_proj.bias
        skipping = x + bias if subnetwork.adds_skipped_biases else x
        if part is None:
            x = skipping
            continue
        kept = torch.zeros(4)
        kept[list(range(4) if part.blocks is None else part.blocks)] = part.mlp_scale
        kept = kept.repeat_interleave(4)
        parameters = dict(block.named_parameters())
        parameters["mixer.x_proj.weight"] = parameters["mixer.x_proj.weight"] * kept
        parameters["mixer.out_proj.weight"] = (
            parameters["mixer.out_proj.weight"] * kept * part.layer_scale
        )
        passes = torch.ones(4, 1, 1, dtype=torch.bool)
        if part.sequences is not None:
            passes = torch.zeros(4, 1, 1, dtype=torch.bool)
            passes[list(part.sequences)] = True
        x = torch.where(passes, torch.func.functional_call(block, parameters, (x,)), skipping)
    return model.norm_f(x)


def _gradients(adapter: FunctionalAdapter, states: Tensor) -> dict[str, Tensor]:
    named = dict(adapter.model.named_parameters())
    probe = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((states * probe).sum(), list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(named.items(), found, strict=True)
    }


def test_full_rates_are_the_model_to_the_bit() -> None:
    adapter = _adapter()
    expected = adapter.model(IDS, use_cache=False).last_hidden_state
    for sampler in _samplers(adapter):
        assert torch.equal(adapter.hidden_states(IDS, sampler.draw(Rates(), 0, 0, 4)), expected)


@pytest.mark.parametrize("place", range(3))
def test_sliced_is_masked_and_gradients_outside_the_draw_are_exactly_zero(place: int) -> None:
    adapter = _adapter()
    layout = adapter.layout
    for step in range(2):
        drawn = _samplers(adapter)[place].draw(RATES, step, 0, 4)
        sliced, masked = adapter.hidden_states(IDS, drawn), _masked(adapter, drawn)
        torch.testing.assert_close(sliced, masked, rtol=1e-4, atol=1e-5)
        found, expected = _gradients(adapter, sliced), _gradients(adapter, masked)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4, msg=name)
        for index, part in enumerate(drawn.layers):
            prefix = layout.prefix.format(index)
            inside = () if part is None else layout.units("neurons", part)
            outside = set(range(16)).difference(inside)
            for piece, unit in itertools.product(layout.slices, outside):
                gradient = found[prefix + piece.parameter]
                assert not gradient.select(piece.dim, piece.offset + unit).any()


def test_the_mean_over_all_draws_of_a_linear_layer_is_the_whole_layer() -> None:
    adapter = _adapter(num_layers=1)
    model: Any = adapter.model
    linear = FunctionalAdapter(model, adapter.layout, model.embeddings, nn.Identity())
    # Without a state space, channels meet in the output alone.
    nn.init.zeros_(model.layers[0].mixer.x_proj.weight)
    draws = [
        Subnetwork(adapter.layout.shape, (LayerPart(blocks=blocks, mlp_scale=2.0),))
        for blocks in itertools.combinations(range(4), 2)
    ]
    sampler = RandomSampler(adapter.layout.shape, 0)
    assert {sampler.draw(Rates(1, 1, 0.5), step, 0, 4) for step in range(100)} == set(draws)
    with torch.no_grad():
        mean = torch.stack([linear.hidden_states(IDS, drawn) for drawn in draws]).mean(0)
        whole = linear.hidden_states(IDS, Subnetwork.full(adapter.layout.shape))
    torch.testing.assert_close(mean, whole, rtol=1e-5, atol=1e-5)


def test_growth_by_outputs_of_zero_preserves_the_function() -> None:
    adapter = _adapter()
    sampler = NestedSampler(adapter.layout.shape)
    before, after = (sampler.draw(rates, 0, 0, 4) for rates in (RATES, Rates()))
    with torch.no_grad():
        expected = adapter.hidden_states(IDS, before)
        assert not torch.allclose(adapter.hidden_states(IDS, after), expected, atol=1e-2)
        masters = dict(adapter.model.named_parameters())
        grow(masters, [], adapter.layout, before, after, "zero_output")
        found = adapter.hidden_states(IDS, after)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
