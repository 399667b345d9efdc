"""What becomes of parameters and optimizer moments when a nested subnetwork grows.

New heads and neurons begin with outputs of zero, so that the function does not change. New layers
begin so, too, or as copies of the layers that were trained, moments included. Random subnetworks
have trained all units already, and nothing happens to them.

Everything works on mappings from names to tensors, in place: masters, and each moment alike.

Source: stacking trained layers: Gong et al. 2019, http://proceedings.mlr.press/v97/gong19a.html,
and Du et al. 2024, https://arxiv.org/abs/2405.15319; with their moments: Shen et al. 2022,
https://arxiv.org/abs/2203.06211. Outputs of zero: net2net's idea (Chen et al. 2016,
https://arxiv.org/abs/1511.05641), in the form that every unit of a residual model allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ratoon.est.adapters import Layout
from ratoon.est.schedule import NewLayers
from ratoon.est.subnetwork import LayerPart, Subnetwork

Tensors = Mapping[str, Tensor]


def grow(
    masters: Tensors,
    moments: Sequence[Tensors],
    layout: Layout,
    before: Subnetwork,
    after: Subnetwork,
    new_layers: NewLayers,
) -> None:
    """Prepare what `after` computes with beyond `before`; both are prefixes, the second the larger.

    Layers that were trained first get their new heads and neurons, then new layers follow: as
    copies of the trained ones in turn (`stack`), with outputs of zero (`zero_output`), or
    `as_they_are`; then heads and neurons stay as they are, too.

    Raises: ValueError if the layers of `before` are not the first of the model.
    """
    if new_layers == "as_they_are":
        return
    old, new = (len(each.active_layers) for each in (before, after))
    if before.active_layers != tuple(range(old)) or after.active_layers != tuple(range(new)):
        raise ValueError("growth is from the first layers to more of them; these are others")
    for layer in range(old):
        smaller, larger = before.layers[layer], after.layers[layer]
        assert smaller is not None
        assert larger is not None
        widen_layer(masters, moments, layout, layer, smaller, larger)
    if new_layers == "stack":
        for tensors in (masters, *moments):
            stack_layers(tensors, layout, old, new)
    else:
        for layer in range(old, new):
            silence_layer(masters, moments, layout, layer)


@torch.no_grad()
def stack_layers(tensors: Tensors, layout: Layout, old: int, new: int) -> None:
    """Layers `old .. new` become copies of the first `old`, in their order, again and again."""
    for layer in range(old, new):
        source, target = layout.prefix.format(layer % old), layout.prefix.format(layer)
        for name in layout.names(tensors, layer):
            tensors[name].copy_(tensors[source + name.removeprefix(target)])


@torch.no_grad()
def silence_layer(masters: Tensors, moments: Sequence[Tensors], layout: Layout, layer: int) -> None:
    """The layer adds nothing to the residual stream, and its moments are those of a beginning."""
    prefix = layout.prefix.format(layer)
    outputs = {piece.parameter for piece in layout.slices if piece.role == "output"}
    for name in outputs | set(layout.output_biases):
        masters[prefix + name].zero_()
    for tensors in moments:
        for name in layout.names(tensors, layer):
            tensors[name].zero_()


@torch.no_grad()
def widen_layer(
    masters: Tensors,
    moments: Sequence[Tensors],
    layout: Layout,
    layer: int,
    before: LayerPart,
    after: LayerPart,
) -> None:
    """Heads and neurons of `after` that are not in `before` add nothing; their moments are zero."""
    prefix = layout.prefix.format(layer)
    for piece in layout.slices:
        had = set(layout.units(piece.axis, before))
        for unit in layout.units(piece.axis, after):
            if unit in had:
                continue
            name, start = prefix + piece.parameter, piece.offset + unit * piece.size
            for tensors in (*((masters,) if piece.role != "input" else ()), *moments):
                if name in tensors:
                    tensors[name].narrow(piece.dim, start, piece.size).zero_()
