"""Which part of a model computes: an immutable value, passed to the forward and stored nowhere.

A subnetwork names, for each layer, the query heads, key/value heads and MLP neurons that take part,
and how their outputs are scaled so that they stand for those that do not. Embeddings, head, norms
and the width of the residual stream are never cut.

Source: Evolving Subnetwork Training, https://arxiv.org/abs/2406.06962. Per-sample depth, grouped
heads, blocks of neurons and nested prefixes are ours.

Shape letters: L layers, H query heads, G key/value heads, M MLP neurons, B sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ratoon.errors import ConfigError
from ratoon.models.decoder import DecoderConfig

Scaling = Literal["inv_p", "inv_sqrt_p", "none"]
HeadUnit = Literal["group", "within_group"]

# With so few key/value heads, drawing whole groups leaves too few different subnetworks.
_FEW_GROUPS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """What there is to choose from in one model.

    `neuron_block` neurons are drawn together: memory moves in rows of that many entries.
    `head_unit` says what is drawn of the heads: a key/value head with all query heads of its
    group, or the same number of query heads inside every group, all key/value heads kept. Without
    grouped queries there are groups of one head only.

    Raises: ConfigError if the numbers do not fit each other.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_neurons: int
    neuron_block: int = 1
    head_unit: HeadUnit = "group"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} query heads do not divide into {self.num_kv_heads} groups; give "
                "a multiple"
            )
        if self.num_neurons % self.neuron_block:
            raise ConfigError(
                f"neuron_block = {self.neuron_block} does not divide the {self.num_neurons} "
                "neurons of a layer; give a divisor"
            )
        if self.head_unit == "within_group" and self.num_heads == self.num_kv_heads:
            raise ConfigError(
                "head_unit = within_group needs several query heads per key/value head; this model "
                "has one: give group"
            )

    @staticmethod
    def of(
        config: DecoderConfig, *, neuron_block: int = 1, head_unit: HeadUnit | None = None
    ) -> Shape:
        """The shape of a decoder; by default groups stay whole where there are many of them.

        Raises: ConfigError as above.
        """
        heads, kv_heads = config.num_heads, config.num_kv_heads
        if head_unit is None:
            head_unit = "within_group" if kv_heads <= min(_FEW_GROUPS, heads - 1) else "group"
        return Shape(
            config.num_layers, heads, kv_heads, config.intermediate_size, neuron_block, head_unit
        )

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_head_units(self) -> int:
        """Units a head draw chooses from: groups, or the heads of each group."""
        return self.num_kv_heads if self.head_unit == "group" else self.group_size

    @property
    def num_blocks(self) -> int:
        """Neuron blocks per layer."""
        return self.num_neurons // self.neuron_block


@dataclass(frozen=True, slots=True)
class Rates:
    """Fractions kept of layers, heads and neurons, each in (0, 1].

    A rate is rounded to the nearest number of whole units; scales follow the numbers, not the
    rates, so that means are exact.

    Raises: ConfigError if a rate is outside its range.
    """

    layers: float = 1.0
    heads: float = 1.0
    neurons: float = 1.0

    def __post_init__(self) -> None:
        for name, rate in zip(("layers", "heads", "neurons"), self.values, strict=True):
            if not 0.0 < rate <= 1.0:
                raise ConfigError(
                    f"the rate of {name} is {rate}; rates are fractions in (0, 1], with 1 for all"
                )

    @property
    def values(self) -> tuple[float, float, float]:
        """Layers, heads, neurons."""
        return self.layers, self.heads, self.neurons

    @property
    def is_full(self) -> bool:
        """Whether everything is kept."""
        return self.values == (1.0, 1.0, 1.0)

    def covers(self, other: Rates) -> bool:
        """Whether no rate is below that of `other`."""
        return all(mine >= its for mine, its in zip(self.values, other.values, strict=True))

    def num_layers(self, shape: Shape) -> int:
        """Layers kept. Raises: ConfigError if none."""
        return num_kept(self.layers, shape.num_layers, "layers")

    def num_head_units(self, shape: Shape) -> int:
        """Head units kept (see `Shape`). Raises: ConfigError if none."""
        if shape.head_unit == "within_group":
            name = "query heads of a group"
        else:
            name = "heads" if shape.group_size == 1 else "groups of heads"
        return num_kept(self.heads, shape.num_head_units, name)

    def num_blocks(self, shape: Shape) -> int:
        """Neuron blocks kept per layer. Raises: ConfigError if none."""
        return num_kept(self.neurons, shape.num_blocks, "neuron blocks")


def num_kept(rate: float, count: int, name: str) -> int:
    """The nearest whole number to `rate * count`, halves up.

    Raises: ConfigError if it is 0.
    """
    kept = math.floor(rate * count + 0.5)
    if kept == 0:
        raise ConfigError(
            f"a rate of {rate} leaves none of {count} {name}; give at least {0.5 / count:.3g}, or "
            "smaller units"
        )
    return kept


def output_scale(scaling: Scaling, kept: int, count: int) -> float:
    """Factor on the summed output of `kept` of `count` units.

    `inv_p` keeps the mean over draws, `inv_sqrt_p` the variance of unrelated contributions, `none`
    keeps neither. Source: the paper's normalisation is `inv_p`; the others are ours.
    """
    if scaling == "inv_p":
        return count / kept
    return math.sqrt(count / kept) if scaling == "inv_sqrt_p" else 1.0


@dataclass(frozen=True, slots=True)
class Normalisation:
    """How the outputs of each axis are scaled; see `output_scale`."""

    attention: Scaling = "inv_p"
    mlp: Scaling = "inv_p"
    layers: Scaling = "inv_p"


@dataclass(frozen=True, slots=True)
class LayerPart:
    """What takes part of one layer; None means all. Indices ascend.

    `heads` are query heads, grouped as in the whole layer: the same number belongs to each of
    `kv_heads`. `blocks` are neuron blocks. Only the sequences `sequences` of the batch pass through
    the layer. `attention_scale` and `mlp_scale` stand for absent heads and neurons, `layer_scale`
    for absent layers or sequences: the attention's output is multiplied by
    `attention_scale * layer_scale`, before any bias is added.
    """

    heads: tuple[int, ...] | None = None
    kv_heads: tuple[int, ...] | None = None
    blocks: tuple[int, ...] | None = None
    sequences: tuple[int, ...] | None = None
    attention_scale: float = 1.0
    mlp_scale: float = 1.0
    layer_scale: float = 1.0

    @property
    def is_full(self) -> bool:
        """Whether this is the whole layer, unscaled."""
        return self == _FULL_LAYER


_FULL_LAYER = LayerPart()


@dataclass(frozen=True, slots=True)
class Subnetwork:
    """A part of a model, layer by layer; None is a layer that is skipped.

    Where `adds_skipped_biases`, tokens that skip a layer still get its output biases, so that the
    mean over draws is exact; a layer that does not exist yet adds nothing. `num_sequences` is B
    where a layer names sequences.
    """

    shape: Shape
    layers: tuple[LayerPart | None, ...]
    adds_skipped_biases: bool = True
    num_sequences: int | None = None

    def __post_init__(self) -> None:
        if len(self.layers) != self.shape.num_layers:
            raise ValueError(f"{len(self.layers)} parts for {self.shape.num_layers} layers")

    @staticmethod
    def full(shape: Shape) -> Subnetwork:
        """The whole model."""
        return Subnetwork(shape, (_FULL_LAYER,) * shape.num_layers)

    @property
    def is_full(self) -> bool:
        """Whether this is the whole model, unscaled."""
        return all(part is not None and part.is_full for part in self.layers)

    @property
    def active_layers(self) -> tuple[int, ...]:
        """Layers that at least one sequence passes through."""
        return tuple(index for index, part in enumerate(self.layers) if part is not None)


def query_heads(shape: Shape, units: Sequence[int]) -> tuple[int, ...]:
    """Query heads of whole groups `units`."""
    size = shape.group_size
    return tuple(unit * size + place for unit in units for place in range(size))
