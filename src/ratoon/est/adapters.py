"""Where the units of a model live in its parameters, said as data.

A layout is all that drawing, growing and counting need to know of a residual model: for each layer,
which slices of which parameters belong to the units of an axis, and which of those are summed into
an output. Anything that can compute a subnetwork is an `Adapter`.

Shape letters: D width, H query heads, G key/value heads, E head width, M MLP neurons.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from ratoon.est.sliced_forward import hidden_states
from ratoon.est.subnetwork import HeadUnit, LayerPart, Shape, Subnetwork
from ratoon.models.decoder import Decoder
from ratoon.models.packing import PackedBatch

Axis = Literal["heads", "kv_heads", "neurons"]


@dataclass(frozen=True, slots=True)
class UnitSlice:
    """Entries of one parameter that belong to the units of an axis.

    Unit u owns `size` entries along `dim` from `offset + u * size` on. `is_output` marks what is
    summed over units, which is where a scale stands for absent ones, and where zeros make a unit
    harmless.

    Example: the key rows of `qkv_proj.weight [(H + 2 G) E, D]` are
    `UnitSlice("qkv_proj.weight", "kv_heads", 0, H * E, E)`.
    """

    parameter: str
    axis: Axis
    dim: int
    offset: int
    size: int
    is_output: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """Names and slices of a residual model's layers.

    Parameters of layer i are called `prefix.format(i)` and then as in `slices`. `output_biases` are
    added to the residual stream, scaled never.
    """

    shape: Shape
    prefix: str
    slices: tuple[UnitSlice, ...]
    output_biases: tuple[str, ...] = ()

    def names(self, tensors: Mapping[str, Any], layer: int) -> list[str]:
        """Those names in `tensors` that belong to a layer."""
        prefix = self.prefix.format(layer)
        return [name for name in tensors if name.startswith(prefix)]

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
        UnitSlice("o_proj.weight", "heads", 1, 0, width, is_output=True),
        UnitSlice("down_proj.weight", "neurons", 1, 0, 1, is_output=True),
    ]
    found = {name for name, _ in decoder.layers[0].named_parameters()}
    return Layout(
        shape,
        "layers.{}.",
        tuple(each for each in slices if each.parameter in found),
        tuple(name for name in ("o_proj.bias", "down_proj.bias") if name in found),
    )
