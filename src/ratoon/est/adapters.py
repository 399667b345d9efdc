"""Where the units of a model live in its parameters, said as data.

A layout is all that drawing, growing and counting need to know of a residual model: for each layer,
which slices of which parameters belong to the units of an axis, and which of those are summed into
an output. Anything that can compute a subnetwork is an `Adapter`.

Shape letters: D width, H query heads, G key/value heads, E head width, M MLP neurons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
import torch.func
from torch import Tensor, nn

from ratoon.est.sliced_forward import hidden_states
from ratoon.est.subnetwork import HeadUnit, LayerPart, Shape, Subnetwork
from ratoon.models.decoder import Decoder
from ratoon.models.packing import PackedBatch

Axis = Literal["heads", "kv_heads", "neurons"]
Role = Literal["input", "sum", "output"]


@dataclass(frozen=True, slots=True)
class UnitSlice:
    """Entries of one parameter that belong to the units of an axis.

    Unit u owns `size` entries along `dim` from `offset + u * size` on. What is summed over units is
    where a scale stands for absent ones, and where zeros make a unit harmless: a `sum` stays within
    the layer, an `output` goes to the residual stream.

    Example: the key rows of `qkv_proj.weight [(H + 2 G) E, D]` are
    `UnitSlice("qkv_proj.weight", "kv_heads", 0, H * E, E)`.
    """

    parameter: str
    axis: Axis
    dim: int
    offset: int
    size: int
    role: Role = "input"


@dataclass(frozen=True, slots=True)
class Layout:
    """Names and slices of a residual model's layers.

    Parameters of layer i are called `prefix.format(i)` and then as in `slices`, of which those of
    one parameter lie along one dimension and cover it. `output_biases` are added to the residual
    stream, scaled never.
    """

    shape: Shape
    prefix: str
    slices: tuple[UnitSlice, ...]
    output_biases: tuple[str, ...] = ()

    def names(self, tensors: Mapping[str, Any], layer: int) -> list[str]:
        """Those names in `tensors` that belong to a layer."""
        prefix = self.prefix.format(layer)
        return [name for name in tensors if name.startswith(prefix)]

    def scale(self, piece: UnitSlice, part: LayerPart) -> float:
        """What the slice is multiplied by, to stand for units and layers that are absent."""
        if piece.role == "input":
            return 1.0
        width = part.mlp_scale if piece.axis == "neurons" else part.attention_scale
        return width * part.layer_scale if piece.role == "output" else width

    def units(self, axis: Axis, part: LayerPart) -> tuple[int, ...]:
        """Units of an axis that take part."""
        shape = self.shape
        if axis == "heads":
            return tuple(range(shape.num_heads)) if part.heads is None else part.heads
        if axis == "kv_heads":
            return tuple(range(shape.num_kv_heads)) if part.kv_heads is None else part.kv_heads
        blocks = range(shape.num_blocks) if part.blocks is None else part.blocks
        size = shape.neuron_block
        return tuple(block * size + place for block in blocks for place in range(size))


class Adapter(Protocol):
    """A model that can compute a part of itself."""

    @property
    def layout(self) -> Layout:
        """Where its units live."""

    @property
    def model(self) -> nn.Module:
        """The module whose parameters the layout names."""

    def hidden_states(self, batch: Any, subnetwork: Subnetwork) -> Tensor:
        """What the output head reads, computed with a part of the layers; a full one is exact."""


class DecoderAdapter:
    """The decoder of this package: GPT-2, Llama, Qwen and their kin."""

    def __init__(
        self, decoder: Decoder, *, neuron_block: int = 1, head_unit: HeadUnit | None = None
    ) -> None:
        self.model = decoder
        shape = Shape.of(decoder.config, neuron_block=neuron_block, head_unit=head_unit)
        self.layout = decoder_layout(decoder, shape)

    def hidden_states(self, batch: PackedBatch, subnetwork: Subnetwork) -> Tensor:
        """Final-norm states `[T, D]`."""
        return hidden_states(self.model, batch, subnetwork)


def decoder_layout(decoder: Decoder, shape: Shape) -> Layout:
    """Slices of a `Block`'s parameters, those that its family has."""
    width = decoder.config.head_dim
    first_key = shape.num_heads * width
    first_value = first_key + shape.num_kv_heads * width
    up = "gate_up_proj" if decoder.config.activation == "swiglu" else "up_proj"
    gated = decoder.config.activation == "swiglu"
    slices = []
    for kind in ("weight", "bias"):
        slices += [
            UnitSlice(f"qkv_proj.{kind}", "heads", 0, 0, width),
            UnitSlice(f"qkv_proj.{kind}", "kv_heads", 0, first_key, width),
            UnitSlice(f"qkv_proj.{kind}", "kv_heads", 0, first_value, width),
            UnitSlice(f"{up}.{kind}", "neurons", 0, 0, 1),
        ]
        if gated:
            slices.append(UnitSlice(f"{up}.{kind}", "neurons", 0, shape.num_neurons, 1))
    slices += [
        UnitSlice("o_proj.weight", "heads", 1, 0, width, "output"),
        UnitSlice("down_proj.weight", "neurons", 1, 0, 1, "output"),
    ]
    found = {name for name, _ in decoder.layers[0].named_parameters()}
    return Layout(
        shape,
        "layers.{}.",
        tuple(each for each in slices if each.parameter in found),
        tuple(name for name in ("o_proj.bias", "down_proj.bias") if name in found),
    )


class FunctionalAdapter:
    """Any residual model whose layers map `x [B, T, D]`, called with gathered parameters.

    For families that have no forward of their own here. Gradients arrive through autograd. `first`
    makes the first layer's input of a batch, `last` is applied to the last one's output. Layers
    must take the number of their units from their parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        first: Callable[[Any], Tensor],
        last: Callable[[Tensor], Tensor],
    ) -> None:
        self.model = model
        self.layout = layout
        self._first, self._last = first, last

    def hidden_states(self, batch: Any, subnetwork: Subnetwork) -> Tensor:
        """States `[B, T, D]`; sequences are rows of the batch."""
        x = self._first(batch)
        for index, part in enumerate(subnetwork.layers):
            block = self.model.get_submodule(self.layout.prefix.format(index).rstrip("."))
            parameters = dict(block.named_parameters())
            skipping = x
            if subnetwork.adds_skipped_biases:
                for name in self.layout.output_biases:
                    skipping = skipping + parameters[name]
            if part is None:
                x = skipping
            elif part.sequences is None:
                x = self._layer(block, parameters, part, x)
            else:
                rows = torch.tensor(part.sequences, device=x.device)
                through = self._layer(block, parameters, part, x.index_select(0, rows))
                x = skipping.index_copy(0, rows, through)
        return self._last(x)

    def _layer(
        self, block: nn.Module, parameters: dict[str, nn.Parameter], part: LayerPart, x: Tensor
    ) -> Tensor:
        if part.is_full or part == LayerPart(sequences=part.sequences):
            return cast(Tensor, block(x))
        taken = {name: self._taken(name, parameter, part) for name, parameter in parameters.items()}
        return cast(Tensor, torch.func.functional_call(block, taken, (x,)))

    def _taken(self, name: str, parameter: Tensor, part: LayerPart) -> Tensor:
        pieces = [piece for piece in self.layout.slices if piece.parameter == name]
        if not pieces:
            return parameter
        entries = [
            piece.offset + unit * piece.size + entry
            for piece in sorted(pieces, key=lambda piece: piece.offset)
            for unit in self.layout.units(piece.axis, part)
            for entry in range(piece.size)
        ]
        index = torch.tensor(entries, device=parameter.device)
        scale = self.layout.scale(pieces[0], part)
        taken = parameter.index_select(pieces[0].dim, index)
        return taken if scale == 1.0 else taken * scale


def mamba_adapter(model: nn.Module, *, channel_block: int = 1) -> FunctionalAdapter:
    """Mamba of Hugging Face transformers (`MambaModel`): layers and inner channels.

    Channels take the place of neurons, and there are no heads. Step size, B and C of the state
    space are sums over channels, and are scaled like outputs. Batches are ids `[B, T]`.

    Source: Gu & Dao 2023, https://arxiv.org/abs/2312.00752.
    """
    mamba = cast(Any, model)
    config = mamba.config
    channels = config.intermediate_size
    slices = [
        UnitSlice("mixer.in_proj.weight", "neurons", 0, 0, 1),
        UnitSlice("mixer.in_proj.weight", "neurons", 0, channels, 1),
        UnitSlice("mixer.in_proj.bias", "neurons", 0, 0, 1),
        UnitSlice("mixer.in_proj.bias", "neurons", 0, channels, 1),
        UnitSlice("mixer.conv1d.weight", "neurons", 0, 0, 1),
        UnitSlice("mixer.conv1d.bias", "neurons", 0, 0, 1),
        UnitSlice("mixer.x_proj.weight", "neurons", 1, 0, 1, "sum"),
        UnitSlice("mixer.dt_proj.weight", "neurons", 0, 0, 1),
        UnitSlice("mixer.dt_proj.bias", "neurons", 0, 0, 1),
        UnitSlice("mixer.A_log", "neurons", 0, 0, 1),
        UnitSlice("mixer.D", "neurons", 0, 0, 1),
        UnitSlice("mixer.out_proj.weight", "neurons", 1, 0, 1, "output"),
    ]
    found = {name for name, _ in mamba.layers[0].named_parameters()}
    layout = Layout(
        Shape(config.num_hidden_layers, 1, 1, channels, channel_block),
        "layers.{}.",
        tuple(piece for piece in slices if piece.parameter in found),
        tuple(name for name in ("mixer.out_proj.bias",) if name in found),
    )
    return FunctionalAdapter(model, layout, mamba.embeddings, mamba.norm_f)
