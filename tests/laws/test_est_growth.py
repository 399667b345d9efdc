"""Growing copies what was trained, or leaves the function as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ratoon.est.adapters import DecoderAdapter
from ratoon.est.growth import grow
from ratoon.est.sampler import NestedSampler
from ratoon.est.schedule import NewLayers
from ratoon.est.subnetwork import LayerPart, Rates, Subnetwork
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.packing import PackedBatch

_SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 6,
    "num_heads": 4,
    "head_dim": 8,
    "max_positions": 32,
}
CONFIGS = {
    "llama": DecoderConfig(family="llama", num_kv_heads=2, **_SIZES),
    "gpt2": DecoderConfig(
        family="gpt2", num_kv_heads=4, norm="layer", positions="learned", activation="gelu_tanh",
        qkv_bias=True, out_bias=True, mlp_bias=True, **_SIZES,
    ),
}  # fmt: skip
CASES = [("llama", "group"), ("llama", "within_group"), ("gpt2", "group")]
BATCH = PackedBatch.of([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5]])
GROWTHS = [
    (Rates(0.5, 1, 1), Rates()),
    (Rates(1, 0.5, 0.5), Rates()),
    (Rates(0.5, 0.5, 0.5), Rates(0.67, 0.5, 0.67)),
    (Rates(0.33, 0.5, 0.33), Rates()),
]


def _model(name: str, unit: Any) -> tuple[DecoderAdapter, list[dict[str, Tensor]]]:
    """A decoder random in all its parts, with two random moments."""
    torch.manual_seed(0)
    decoder = Decoder(CONFIGS[name]).double()
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
    moments = [
        {key: torch.rand_like(parameter) + 1 for key, parameter in decoder.named_parameters()}
        for _ in range(2)
    ]
    return DecoderAdapter(decoder, neuron_block=4, head_unit=unit), moments


def _grow(
    adapter: DecoderAdapter, moments: list[dict[str, Tensor]], rates: tuple[Rates, Rates],
    new_layers: NewLayers,
) -> tuple[Subnetwork, Subnetwork]:  # fmt: skip
    sampler = NestedSampler(adapter.layout.shape)
    before, after = (sampler.draw(each, 0, 0, 2) for each in rates)
    masters = dict(adapter.model.named_parameters())
    grow(masters, moments, adapter.layout, before, after, new_layers)
    return before, after


@pytest.mark.parametrize("rates", GROWTHS)
@pytest.mark.parametrize(("name", "unit"), CASES)
def test_outputs_of_zero_preserve_the_function(
    name: str, unit: str, rates: tuple[Rates, Rates]
) -> None:
    adapter, moments = _model(name, unit)
    before = NestedSampler(adapter.layout.shape).draw(rates[0], 0, 0, 2)
    with torch.no_grad():
        expected = adapter.hidden_states(BATCH, before)
        assert not torch.allclose(
            adapter.hidden_states(BATCH, Subnetwork.full(adapter.layout.shape)), expected, atol=1e-3
        )
        _, after = _grow(adapter, moments, rates, "zero_output")
        found = adapter.hidden_states(BATCH, after)
    # Sums over more terms, some of them zero, may round otherwise; more layers do not.
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    if rates[0].heads == rates[0].neurons == 1.0:
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("name", "unit"), CASES)
def test_new_units_can_learn_at_once(name: str, unit: str) -> None:
    """A unit whose output and input were both zero would stay so for ever."""
    adapter, moments = _model(name, unit)
    _, after = _grow(adapter, moments, GROWTHS[3], "zero_output")
    adapter.hidden_states(BATCH, after).square().sum().backward()
    for index in range(6):
        for key in ("o_proj", "down_proj"):
            gradient = adapter.model.get_parameter(f"layers.{index}.{key}.weight").grad
            assert gradient is not None
            assert gradient.any(dim=0).all()


@pytest.mark.parametrize(("name", "unit"), CASES)
def test_moments_of_new_units_are_zero_and_others_are_kept(name: str, unit: str) -> None:
    adapter, moments = _model(name, unit)
    kept = [{key: tensor.clone() for key, tensor in each.items()} for each in moments]
    masters = {key: p.detach().clone() for key, p in adapter.model.named_parameters()}
    before, _ = _grow(adapter, moments, GROWTHS[3], "zero_output")
    layout = adapter.layout
    for tensors, old in zip(moments, kept, strict=True):
        for layer, part in enumerate(before.layers):
            names = layout.names(tensors, layer)
            if part is None:
                assert not any(tensors[key].any() for key in names)
                continue
            expected = {key: old[key].clone() for key in names}
            for piece in layout.slices:
                target = expected[layout.prefix.format(layer) + piece.parameter]
                new = set(layout.units(piece.axis, LayerPart())).difference(
                    layout.units(piece.axis, part)
                )
                for place in new:
                    target.narrow(piece.dim, piece.offset + place * piece.size, piece.size).zero_()
            for key in names:
                assert torch.equal(tensors[key], expected[key]), key
        for key in ("embed_tokens.weight", "norm.weight"):
            assert torch.equal(tensors[key], old[key])
    for key, parameter in adapter.model.named_parameters():
        if not key.endswith(("o_proj.weight", "down_proj.weight", "o_proj.bias", "down_proj.bias")):
            assert torch.equal(parameter, masters[key]), key


@pytest.mark.parametrize(("name", "unit"), CASES)
def test_stacking_copies_layers_with_their_moments_in_turn(name: str, unit: str) -> None:
    adapter, moments = _model(name, unit)
    masters = dict(adapter.model.named_parameters())
    old = [{key: t.detach().clone() for key, t in each.items()} for each in (masters, *moments)]
    _grow(adapter, moments, (Rates(0.33, 1, 1), Rates(0.83, 1, 1)), "stack")
    for tensors, before in zip((masters, *moments), old, strict=True):
        for key, tensor in tensors.items():
            source = key
            if key.startswith("layers."):
                index = int(key.split(".")[1])
                if 2 <= index < 5:
                    source = key.replace(f"layers.{index}.", f"layers.{index % 2}.")
            assert torch.equal(tensor, before[source]), key


@pytest.mark.parametrize(("name", "unit"), CASES)
def test_stacked_layers_have_the_new_heads_and_neurons_of_their_originals(
    name: str, unit: str
) -> None:
    adapter, moments = _model(name, unit)
    before, _ = _grow(adapter, moments, (Rates(0.5, 0.5, 0.5), Rates()), "stack")
    part = before.layers[0]
    assert part is not None
    for layer in range(6):
        weight = adapter.model.get_parameter(f"layers.{layer}.down_proj.weight")
        assert weight[:, :12].all()
        assert not weight[:, 12:].any()
        assert torch.equal(weight, adapter.model.get_parameter(
            f"layers.{layer % 3}.down_proj.weight"))  # fmt: skip


def test_random_subnetworks_grow_without_a_change() -> None:
    adapter, moments = _model("llama", "group")
    old = {key: p.detach().clone() for key, p in adapter.model.named_parameters()}
    _grow(adapter, moments, GROWTHS[3], "as_they_are")
    assert all(torch.equal(old[key], p) for key, p in adapter.model.named_parameters())


def test_growing_from_other_layers_than_the_first_is_refused() -> None:
    adapter, moments = _model("llama", "group")
    full = Subnetwork.full(adapter.layout.shape)
    last = Subnetwork(full.shape, (None, *full.layers[1:]))
    with pytest.raises(ValueError, match="first layers"):
        grow(dict(adapter.model.named_parameters()), moments, adapter.layout, last, full, "stack")
