"""Which parameters took part in a step, from the subnetworks of its micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ratoon.est.adapters import Layout
from ratoon.est.subnetwork import Subnetwork
from ratoon.training.flat_weights import Part, Touched


def touched_parameters(
    layout: Layout, parameters: Mapping[str, Any], subnetworks: Sequence[Subnetwork]
) -> Touched | None:
    """Names of the `parameters` that got a gradient, each with its rows or columns; None for all.

    What any of the subnetworks holds counts. Everything outside layers always takes part.
    """
    if any(subnetwork.is_full for subnetwork in subnetworks):
        return None
    in_layers: set[str] = set()
    found: dict[str, Part | None] = {}
    for layer in range(layout.shape.num_layers):
        names = layout.names(parameters, layer)
        in_layers.update(names)
        parts = [subnetwork.layers[layer] for subnetwork in subnetworks]
        active = [part for part in parts if part is not None]
        prefix = layout.prefix.format(layer)
        for name in names:
            inner = name.removeprefix(prefix)
            if active:
                found[name] = _entries(layout, inner, active)
            elif inner in layout.output_biases and subnetworks[0].adds_skipped_biases:
                found[name] = None
    return dict.fromkeys(name for name in parameters if name not in in_layers) | found


def _entries(layout: Layout, parameter: str, active: Sequence[Any]) -> Part | None:
    slices = [each for each in layout.slices if each.parameter == parameter]
    entries: set[int] = set()
    whole = not slices
    for part in active:
        kept = [(each, layout.units(each.axis, part)) for each in slices]
        whole = whole or all(len(units) == _count(layout, each.axis) for each, units in kept)
        for each, units in kept:
            for unit in units:
                first = each.offset + unit * each.size
                entries.update(range(first, first + each.size))
    if whole:
        return None
    return Part(slices[0].dim, torch.tensor(sorted(entries)))


def _count(layout: Layout, axis: str) -> int:
    shape = layout.shape
    return {
        "heads": shape.num_heads,
        "kv_heads": shape.num_kv_heads,
        "neurons": shape.num_neurons,
    }[axis]
