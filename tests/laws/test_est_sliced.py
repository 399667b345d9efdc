"""A sliced forward is the masked one; its mean over all draws is the whole model's.

Masks exist here only: `_masked` computes every head and neuron of every layer in plain torch, and
multiplies what does not take part by zero.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ratoon.est import sliced_forward
from ratoon.est.adapters import DecoderAdapter
from ratoon.est.sampler import NestedSampler, RandomSampler, Sampler
from ratoon.est.sliced_forward import hidden_states
from ratoon.est.subnetwork import LayerPart, Normalisation, Rates, Shape, Subnetwork
from ratoon.models.decoder import Decoder, DecoderConfig, apply_rope
from ratoon.models.packing import PackedBatch

_SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_positions": 32,
}
CONFIGS = {
    "llama": DecoderConfig(family="llama", **_SIZES),
    "qwen3": DecoderConfig(family="qwen3", qk_norm=True, **_SIZES),
    "qwen2": DecoderConfig(family="qwen2", qkv_bias=True, **_SIZES),
    "gpt2": DecoderConfig(
        family="gpt2", norm="layer", positions="learned", activation="gelu_tanh", qkv_bias=True,
        out_bias=True, mlp_bias=True, **(_SIZES | {"num_kv_heads": 4}),
    ),
    # No family has all of these at once; the laws hold all the same.
    "grouped_with_biases": DecoderConfig(
        family="llama", qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True, **_SIZES
    ),
}  # fmt: skip
BATCH = PackedBatch.of([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5], [8, 9, 7, 9, 3], [2, 3]])
RATES = Rates(0.5, 0.5, 0.5)
SCALINGS = Normalisation("inv_p", "inv_sqrt_p", "inv_p")


def _decoder(name: str, dtype: torch.dtype = torch.float64) -> Decoder:
    """Random in all its parts, biases and norms included."""
    torch.manual_seed(0)
    decoder = Decoder(CONFIGS[name]).to(dtype)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
    return decoder


def _shape(name: str, head_unit: str | None = None) -> Shape:
    return Shape.of(CONFIGS[name], neuron_block=4, head_unit=head_unit)  # type: ignore[arg-type]


def _samplers(name: str) -> Iterator[Sampler]:
    config = CONFIGS[name]
    for unit in ("group", "within_group") if config.num_kv_heads < config.num_heads else ("group",):
        shape = _shape(name, unit)
        yield RandomSampler(shape, 1, SCALINGS)
        yield RandomSampler(shape, 1, SCALINGS, share_indices=True, pinned_layers=(-1,))
        yield RandomSampler(shape, 1, SCALINGS, depth="sequences", pinned_layers=(0,))
        yield NestedSampler(shape)


CASES = [(name, place) for name in CONFIGS for place, _ in enumerate(_samplers(name))]


def _masked(decoder: Decoder, batch: PackedBatch, subnetwork: Subnetwork) -> Tensor:
    x = decoder.embed(batch)
    owner = torch.repeat_interleave(torch.arange(len(batch.lengths)), torch.tensor(batch.lengths))
    sees = (owner[:, None] == owner) & (batch.positions[:, None] >= batch.positions)
    for layer, part in zip(decoder.layers, subnetwork.layers, strict=True):
        weights = layer.weights()
        skipping = x
        for bias in (weights.out_bias, weights.down_bias):
            if bias is not None and subnetwork.adds_skipped_biases:
                skipping = skipping + bias
        if part is None:
            x = skipping
            continue
        passes = torch.ones(len(batch.lengths))
        if part.sequences is not None:
            passes = torch.zeros(len(batch.lengths)).index_fill(0, torch.tensor(part.sequences), 1)
        through = _masked_layer(decoder, layer, x, sees, batch, subnetwork, part)
        x = torch.where(passes[owner, None] > 0, through, skipping)
    return decoder.norm(x)


def _masked_layer(
    decoder: Decoder, layer: Any, x: Tensor, sees: Tensor, batch: PackedBatch,
    subnetwork: Subnetwork, part: LayerPart,
) -> Tensor:  # fmt: skip
    config, weights, shape = decoder.config, layer.weights(), subnetwork.shape

    def mask(kept: tuple[int, ...] | None, count: int) -> Tensor:
        if kept is None:
            return torch.ones(count, dtype=x.dtype)
        return torch.zeros(count, dtype=x.dtype).index_fill(0, torch.tensor(kept), 1)

    def linear(y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return y @ weight.t() + (0 if bias is None else bias)

    qkv = linear(layer.input_norm(x), weights.qkv, weights.qkv_bias)
    q, k, v = qkv.unflatten(-1, (-1, config.head_dim)).split(
        (config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1
    )
    if weights.q_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    rope = decoder.rope(batch, x.dtype)
    if rope is not None:
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
    k, v = (y.repeat_interleave(shape.group_size, dim=1) for y in (k, v))
    scores = torch.einsum("the,she->hts", q, k) / config.head_dim**0.5
    probs = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    heads = torch.einsum("hts,she->the", probs, v) * mask(part.heads, shape.num_heads)[:, None]
    scale = part.attention_scale * part.layer_scale
    x = x + scale * (heads.flatten(1) @ weights.out.t())
    x = x + (0 if weights.out_bias is None else weights.out_bias)

    up = linear(layer.post_norm(x), weights.up, weights.up_bias)
    if config.activation == "swiglu":
        gate, value = up.chunk(2, dim=-1)
        hidden = torch.nn.functional.silu(gate) * value
    else:
        hidden = torch.nn.functional.gelu(up, approximate="tanh")
    kept = mask(part.blocks, shape.num_blocks).repeat_interleave(shape.neuron_block)
    scale = part.mlp_scale * part.layer_scale
    x = x + scale * ((hidden * kept) @ weights.down.t())
    return x + (0 if weights.down_bias is None else weights.down_bias)


Compute = Callable[[Decoder], Tensor]


def _gradients(decoder: Decoder, compute: Compute) -> tuple[Tensor, dict[str, Tensor]]:
    """States, and gradients of a fixed random functional of them; zeros where there is none."""
    states = compute(decoder)
    probe = torch.randn(
        states.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    named = dict(decoder.named_parameters())
    found = torch.autograd.grad(
        (states * probe.to(states.dtype)).sum(), list(named.values()), allow_unused=True
    )
    return states.detach(), {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(named.items(), found, strict=True)
    }


def _assert_same(
    one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]
) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=1e-10, atol=1e-10)
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize(("name", "place"), CASES)
def test_a_sliced_forward_is_the_masked_one_with_its_gradients(name: str, place: int) -> None:
    decoder, sampler = _decoder(name), list(_samplers(name))[place]
    for step in range(2):
        drawn = sampler.draw(RATES, step, 0, len(BATCH.lengths))
        assert not drawn.is_full
        masked = _gradients(decoder, lambda model, drawn=drawn: _masked(model, BATCH, drawn))
        for recompute in (False, True):
            sliced = _gradients(
                decoder,
                lambda model, drawn=drawn, recompute=recompute: hidden_states(
                    model, BATCH, drawn, recompute=recompute
                ),
            )
            _assert_same(sliced, masked)


@pytest.mark.parametrize("narrow", [1, sliced_forward._NARROW_UNIT])
@pytest.mark.parametrize("name", CONFIGS)
def test_sums_in_main_grad_are_the_gradients(
    name: str, narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Columns are added in two ways, by their number of entries; here by both.
    monkeypatch.setattr(sliced_forward, "_NARROW_UNIT", narrow)
    for sampler in _samplers(name):
        decoder = _decoder(name)
        drawn = sampler.draw(RATES, 0, 0, len(BATCH.lengths))
        _, expected = _gradients(decoder, lambda model, drawn=drawn: _masked(model, BATCH, drawn))
        for parameter in decoder.parameters():
            parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
        for _ in range(2):
            _, beside = _gradients(
                decoder, lambda model, drawn=drawn: hidden_states(model, BATCH, drawn)
            )
            assert all(not gradient.any() for gradient in beside.values())
        for key, parameter in decoder.named_parameters():
            torch.testing.assert_close(
                parameter.main_grad, 2 * expected[key], rtol=1e-9, atol=1e-9, msg=key
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_full_rates_are_the_dense_model_to_the_bit(name: str, dtype: torch.dtype) -> None:
    decoder = _decoder(name, dtype)
    dense = _gradients(decoder, lambda model: model(BATCH)[0])
    shape = _shape(name)
    # All indices spelt out: what is gathered is everything.
    spelt_out = LayerPart(
        tuple(range(shape.num_heads)),
        tuple(range(shape.num_kv_heads)),
        tuple(range(shape.num_blocks)),
    )
    gathered = Subnetwork(shape, (spelt_out,) * shape.num_layers)
    assert not gathered.is_full
    full = [sampler.draw(Rates(), 0, 0, 4) for sampler in _samplers(name)]
    for drawn, recompute in itertools.product([*full, gathered], (False, True)):
        states, gradients = _gradients(
            decoder,
            lambda model, drawn=drawn, recompute=recompute: hidden_states(
                model, BATCH, drawn, recompute=recompute
            ),
        )
        assert torch.equal(states, dense[0])
        for key, gradient in gradients.items():
            assert torch.equal(gradient, dense[1][key]), key


@pytest.mark.parametrize(("name", "place"), CASES)
def test_gradients_outside_the_draw_are_exactly_zero(name: str, place: int) -> None:
    decoder, sampler = _decoder(name), list(_samplers(name))[place]
    layout = DecoderAdapter(decoder, neuron_block=4, head_unit=sampler.shape.head_unit).layout
    drawn = sampler.draw(RATES, 3, 0, len(BATCH.lengths))
    _, gradients = _gradients(decoder, lambda model: hidden_states(model, BATCH, drawn))
    for index, part in enumerate(drawn.layers):
        prefix = layout.prefix.format(index)
        if part is None:
            biases = set(layout.output_biases) if drawn.adds_skipped_biases else set()
            for key in layout.names(gradients, index):
                assert bool(gradients[key].any()) == (key.removeprefix(prefix) in biases), key
            continue
        for piece in layout.slices:
            gradient = gradients[prefix + piece.parameter]
            inside = layout.units(piece.axis, part)
            for unit in range({"neurons": 24}.get(piece.axis, CONFIGS[name].num_heads)):
                if piece.axis == "kv_heads" and unit >= CONFIGS[name].num_kv_heads:
                    break
                rows = gradient.narrow(piece.dim, piece.offset + unit * piece.size, piece.size)
                # A bias of keys shifts all scores of a query alike: no gradient but rounding.
                is_flat = piece.parameter == "qkv_proj.bias" and not decoder.config.qk_norm
                if unit not in inside:
                    assert not rows.any(), (piece, unit)
                elif not is_flat:
                    assert rows.any(), (piece, unit)


def _linear(name: str, branch: str) -> Decoder:
    """A decoder of one layer in which one branch alone depends on its input; no final norm."""
    decoder = _decoder(name)
    decoder.layers = decoder.layers[:1]
    decoder.norm = torch.nn.Identity()  # type: ignore[assignment]
    weights = decoder.layers[0].weights()
    silent = weights.down if branch == "attention" else weights.out
    torch.nn.init.zeros_(silent)
    return decoder


def _all_draws(sampler: RandomSampler, rates: Rates, count: int) -> list[Subnetwork]:
    """Every subnetwork that the sampler draws; there must be `count`."""
    seen = {sampler.draw(rates, step, 0, len(BATCH.lengths)) for step in range(40 * count)}
    assert len(seen) == count
    return sorted(seen, key=str)


def _mean_error(decoder: Decoder, draws: list[Subnetwork]) -> float:
    with torch.no_grad():
        mean = torch.stack([hidden_states(decoder, BATCH, drawn) for drawn in draws]).mean(0)
        return float((mean - decoder(BATCH)[0]).abs().max())


# Of one layer: branch, rates, unit of heads, and the number of all draws.
AVERAGES = [
    ("gpt2", "attention", Rates(1, 0.5, 1), "group", 6),
    ("grouped_with_biases", "attention", Rates(1, 0.5, 1), "group", 2),
    # Two groups, each with its own head of two.
    ("grouped_with_biases", "attention", Rates(1, 0.5, 1), "within_group", 4),
    ("gpt2", "mlp", Rates(1, 1, 0.5), "group", 20),
    ("grouped_with_biases", "mlp", Rates(1, 1, 0.33), "group", 15),
    ("llama", "mlp", Rates(1, 1, 0.67), "group", 15),
]


@pytest.mark.parametrize(("name", "branch", "rates", "unit", "count"), AVERAGES)
def test_the_mean_over_all_draws_of_a_layer_is_the_whole_layer(
    name: str, branch: str, rates: Rates, unit: str, count: int
) -> None:
    decoder = _linear(name, branch)
    shape = dataclasses.replace(_shape(name, unit), num_layers=1)
    draws = _all_draws(RandomSampler(shape, 0), rates, count)
    assert _mean_error(decoder, draws) < 1e-12
    # Each draw by itself is not the whole, or the mean would say nothing.
    assert all(_mean_error(decoder, [drawn]) > 1e-3 for drawn in draws)
    unscaled = _all_draws(RandomSampler(shape, 0, Normalisation("none", "none")), rates, count)
    assert _mean_error(decoder, unscaled) > 1e-3


def test_the_mean_over_all_draws_of_layers_is_the_whole_model() -> None:
    decoder = _decoder("gpt2")
    decoder.norm = torch.nn.Identity()  # type: ignore[assignment]
    for layer in decoder.layers:
        # Layers that read their norms' biases alone are linear in which of them run.
        for norm in (layer.input_norm, layer.post_norm):
            torch.nn.init.zeros_(norm.weight)
            torch.nn.init.normal_(norm.bias)
    shape = _shape("gpt2")
    draws = _all_draws(RandomSampler(shape, 0), Rates(0.5, 1, 1), 6)
    assert _mean_error(decoder, draws) < 1e-12
    pinned = _all_draws(RandomSampler(shape, 0, pinned_layers=(0,)), Rates(0.5, 1, 1), 3)
    assert _mean_error(decoder, pinned) < 1e-12
    forgetful = [dataclasses.replace(drawn, adds_skipped_biases=False) for drawn in draws]
    assert _mean_error(decoder, forgetful) > 1e-3


@pytest.mark.parametrize("name", ["gpt2", "grouped_with_biases"])
def test_the_mean_over_all_draws_of_sequences_is_the_whole_model(name: str) -> None:
    decoder = _linear(name, "attention")
    shape = dataclasses.replace(_shape(name), num_layers=1)
    draws = _all_draws(RandomSampler(shape, 0, depth="sequences"), Rates(0.5, 1, 1), 6)
    assert _mean_error(decoder, draws) < 1e-12


def test_a_scaled_output_bias_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = sliced_forward._Selection.__call__

    def scaled(self: Any, weights: Any) -> Any:
        return original(self, weights)._replace(
            out_bias=weights.out_bias * self.attention_scale,
            down_bias=weights.down_bias * self.mlp_scale,
        )

    monkeypatch.setattr(sliced_forward._Selection, "__call__", scaled)
    for name, branch, rates, unit, count in AVERAGES[:-1]:
        shape = dataclasses.replace(_shape(name, unit), num_layers=1)
        draws = _all_draws(RandomSampler(shape, 0), rates, count)
        assert _mean_error(_linear(name, branch), draws) > 1e-3


def test_a_batch_that_does_not_fit_the_draw_is_refused() -> None:
    drawn = RandomSampler(_shape("llama"), 0, depth="sequences").draw(Rates(0.5, 1, 1), 0, 0, 6)
    with pytest.raises(ValueError, match="6 sequences"):
        hidden_states(_decoder("llama"), BATCH, drawn)
