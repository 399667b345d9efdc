"""Which parameters took part in a step, from the subnetworks of its micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import torch

from ratoon.est.adapters import Layout
from ratoon.est.subnetwork import LayerPart, Subnetwork
from ratoon.training.flat_weights import Part, Touched


def touched_parameters(
    layout: Layout, names: Iterable[str], subnetworks: Sequence[Subnetwork], device: torch.device
) -> Touched | None:
    """Those of the parameters `names` that got a gradient, with their rows or columns; None is all.

    What any of the subnetworks holds counts. Everything outside layers always takes part.
    """
    if any(subnetwork.is_full for subnetwork in subnetworks):
        return None
    return _touched(layout, tuple(names), tuple(dict.fromkeys(subnetworks)), device)


@lru_cache(maxsize=8)
def _touched(
    layout: Layout,
    names: tuple[str, ...],
    subnetworks: tuple[Subnetwork, ...],
    device: torch.device,
) -> Touched:
    in_layers: set[str] = set()
    found: dict[str, Part | None] = {}
    for layer in range(layout.shape.num_layers):
        prefix = layout.prefix.format(layer)
        mine = [name for name in names if name.startswith(prefix)]
        in_layers.update(mine)
        parts = [subnetwork.layers[layer] for subnetwork in subnetworks]
        active = [part for part in parts if part is not None]
        for name in mine:
            inner = name.removeprefix(prefix)
            if active:
                found[name] = _entries(layout, inner, active, device)
            elif inner in layout.output_biases and subnetworks[0].adds_skipped_biases:
                found[name] = None
    return dict.fromkeys(name for name in names if name not in in_layers) | found


def _entries(
    layout: Layout, parameter: str, active: Sequence[LayerPart], device: torch.device
) -> Part | None:
    slices = [piece for piece in layout.slices if piece.parameter == parameter]
    axes = {piece.axis for piece in slices}
    if any(all(_chosen(part)[axis] is None for axis in axes) for part in active):
        return None
    places = [
        piece.offset
        + np.asarray(layout.units(piece.axis, part))[:, None] * piece.size
        + np.arange(piece.size)
        for part in active
        for piece in slices
    ]
    entries = np.unique(np.concatenate([place.ravel() for place in places]))
    breaks = np.flatnonzero(np.diff(entries) > 1) + 1
    runs = tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(entries, breaks))
    return Part(slices[0].dim, torch.from_numpy(entries).to(device), runs)


def _chosen(part: LayerPart) -> dict[str, tuple[int, ...] | None]:
    """What a part names of each axis; None is all of it."""
    return {"heads": part.heads, "kv_heads": part.kv_heads, "neurons": part.blocks}
