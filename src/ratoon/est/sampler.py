"""How the subnetwork of a step is chosen: at random, or as a prefix that grows.

Draws are pure functions of (seed, step, micro-batch): equal on all ranks without a message, and
after a resume. They use raw output of the counter-based generator Philox, ranked: the bits are
fixed by its definition (Salmon et al. 2011), not by a library's version.

Source: fixed-size draws without replacement, a fresh one each step: Evolving Subnetwork Training,
https://arxiv.org/abs/2406.06962. Pinned layers: RaPTr, https://arxiv.org/abs/2402.05913. Per-sample
depth: a sub-batch for each layer, as in DINOv2's stochastic depth. Nested choice: ours.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from ratoon.errors import ConfigError
from ratoon.est.subnetwork import (
    LayerPart,
    Normalisation,
    Rates,
    Shape,
    Subnetwork,
    num_kept,
    output_scale,
    query_heads,
)


class Sampler(Protocol):
    """Chooses subnetworks of a model's shape."""

    @property
    def shape(self) -> Shape:
        """What is chosen from."""

    def draw(self, rates: Rates, step: int, micro_batch: int, num_sequences: int) -> Subnetwork:
        """The subnetwork of a micro-batch of `num_sequences` sequences; the full one at full rates.

        Raises: ConfigError if the rates leave nothing of an axis.
        """

    def check(self, rates: Rates, num_sequences: int) -> None:
        """Raise what any draw with these rates would raise: ConfigError."""


@dataclass(frozen=True, slots=True)
class RandomSampler:
    """Uniform draws without replacement.

    `share_indices` draws heads and neurons once for all layers. `per` says how long a draw lasts.
    `depth` draws layers for the whole batch, or sequences for each layer, so that a layer runs on a
    random fraction of the batch. `pinned_layers` always run and count among those kept; negative
    numbers count from the end.

    Raises: ConfigError if a pinned layer does not exist.
    """

    shape: Shape
    seed: int
    normalisation: Normalisation = field(default_factory=Normalisation)
    share_indices: bool = False
    per: Literal["step", "micro_batch"] = "step"
    depth: Literal["layers", "sequences"] = "layers"
    pinned_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        count = self.shape.num_layers
        for layer in self.pinned_layers:
            if not -count <= layer < count:
                raise ConfigError(
                    f"pinned layer {layer} does not exist; a model of {count} layers has "
                    f"{-count} to {count - 1}"
                )

    def draw(self, rates: Rates, step: int, micro_batch: int, num_sequences: int) -> Subnetwork:
        """See `Sampler.draw`."""
        if rates.is_full:
            return Subnetwork.full(self.shape)
        source = _Source(self.seed, step, 0 if self.per == "step" else micro_batch)
        per_sample = self.depth == "sequences" and rates.layers < 1.0
        if per_sample:
            depth = self._draw_sequences(rates, source, num_sequences)
        else:
            depth = self._draw_layers(rates, source)
        parts = []
        for layer, (runs, sequences, layer_scale) in enumerate(depth):
            place = 0 if self.share_indices else layer
            part = self._draw_width(rates, source, place, sequences, layer_scale)
            parts.append(part if runs else None)
        return Subnetwork(
            self.shape, tuple(parts), num_sequences=num_sequences if per_sample else None
        )

    def check(self, rates: Rates, num_sequences: int) -> None:
        """See `Sampler.check`."""
        count = self.shape.num_layers
        if rates.layers < 1.0 and len(self._pinned()) == count:
            raise ConfigError(
                f"a rate of {rates.layers} of layers has no effect because all {count} layers are "
                "pinned (evolve.random.pinned_layers); pin fewer, or give 1"
            )
        self.draw(rates, 0, 0, num_sequences)

    def _pinned(self) -> set[int]:
        return {layer % self.shape.num_layers for layer in self.pinned_layers}

    def _draw_layers(
        self, rates: Rates, source: _Source
    ) -> list[tuple[bool, tuple[int, ...] | None, float]]:
        """Of each layer: whether it runs, on which sequences, and its scale."""
        pinned = self._pinned()
        free = [layer for layer in range(self.shape.num_layers) if layer not in pinned]
        kept = rates.num_layers(self.shape) - len(pinned)
        if free and kept <= 0:
            raise ConfigError(
                f"a rate of {rates.layers} keeps {kept + len(pinned)} layers, and {len(pinned)} "
                "are pinned: no other layer would ever run; raise the rate or pin fewer"
            )
        chosen = {free[place] for place in source.draw("layers", 0, kept, len(free))}
        scale = output_scale(self.normalisation.layers, kept, len(free)) if free else 1.0
        return [
            (layer in pinned or layer in chosen, None, 1.0 if layer in pinned else scale)
            for layer in range(self.shape.num_layers)
        ]

    def _draw_sequences(
        self, rates: Rates, source: _Source, num_sequences: int
    ) -> list[tuple[bool, tuple[int, ...] | None, float]]:
        kept = num_kept(rates.layers, num_sequences, "sequences of a micro-batch")
        pinned = self._pinned()
        scale = output_scale(self.normalisation.layers, kept, num_sequences)
        return [
            (True, None, 1.0)
            if layer in pinned or kept == num_sequences
            else (True, source.draw("sequences", layer, kept, num_sequences), scale)
            for layer in range(self.shape.num_layers)
        ]

    def _draw_width(
        self,
        rates: Rates,
        source: _Source,
        place: int,
        sequences: tuple[int, ...] | None,
        layer_scale: float,
    ) -> LayerPart:
        shape = self.shape
        num_units, num_blocks = rates.num_head_units(shape), rates.num_blocks(shape)
        heads = kv_heads = blocks = None
        if num_units < shape.num_head_units and shape.head_unit == "group":
            kv_heads = source.draw("heads", place, num_units, shape.num_kv_heads)
            heads = query_heads(shape, kv_heads)
        elif num_units < shape.num_head_units:
            size = shape.group_size
            heads = tuple(
                group * size + head
                for group in range(shape.num_kv_heads)
                for head in source.draw(f"heads of group {group}", place, num_units, size)
            )
        if num_blocks < shape.num_blocks:
            blocks = source.draw("neurons", place, num_blocks, shape.num_blocks)
        scaling = self.normalisation
        return LayerPart(
            heads,
            kv_heads,
            blocks,
            sequences,
            output_scale(scaling.attention, num_units, shape.num_head_units),
            output_scale(scaling.mlp, num_blocks, shape.num_blocks),
            layer_scale,
        )


@dataclass(frozen=True, slots=True)
class NestedSampler:
    """The first layers, heads and neurons, the same at every step.

    What lies beyond does not exist yet: it adds nothing and nothing stands for it, unless scales
    are asked for. See `growth` for what happens when the prefix grows.
    """

    shape: Shape
    normalisation: Normalisation = field(
        default_factory=lambda: Normalisation("none", "none", "none")
    )

    def draw(self, rates: Rates, step: int, micro_batch: int, num_sequences: int) -> Subnetwork:
        """See `Sampler.draw`; step, micro-batch and number of sequences change nothing."""
        if rates.is_full:
            return Subnetwork.full(self.shape)
        shape, scaling = self.shape, self.normalisation
        num_layers, num_units = rates.num_layers(shape), rates.num_head_units(shape)
        num_blocks = rates.num_blocks(shape)
        heads = kv_heads = blocks = None
        if num_units < shape.num_head_units and shape.head_unit == "group":
            kv_heads = tuple(range(num_units))
            heads = query_heads(shape, kv_heads)
        elif num_units < shape.num_head_units:
            firsts = range(0, shape.num_heads, shape.group_size)
            heads = tuple(first + head for first in firsts for head in range(num_units))
        if num_blocks < shape.num_blocks:
            blocks = tuple(range(num_blocks))
        part = LayerPart(
            heads,
            kv_heads,
            blocks,
            None,
            output_scale(scaling.attention, num_units, shape.num_head_units),
            output_scale(scaling.mlp, num_blocks, shape.num_blocks),
            output_scale(scaling.layers, num_layers, shape.num_layers),
        )
        beyond = (None,) * (shape.num_layers - num_layers)
        return Subnetwork(shape, (part,) * num_layers + beyond, adds_skipped_biases=False)

    def check(self, rates: Rates, num_sequences: int) -> None:
        """See `Sampler.check`."""
        self.draw(rates, 0, 0, num_sequences)


class _Source:
    """Random subsets of one draw, each a function of its name and place alone."""

    def __init__(self, seed: int, step: int, micro_batch: int) -> None:
        self._key = f"est|{seed}|{step}|{micro_batch}"

    def draw(self, name: str, place: int, kept: int, count: int) -> tuple[int, ...]:
        """`kept` of `count` indices, ascending; each subset is as likely as any other."""
        digest = hashlib.blake2b(f"{self._key}|{name}|{place}".encode(), digest_size=16).digest()
        raw = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)
        order = np.argsort(raw, kind="stable")[:kept]
        return tuple(int(index) for index in np.sort(order))
