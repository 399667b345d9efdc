"""From one stage of a growing model to the next: weights, moments, and counts of updates."""

from __future__ import annotations

from ratoon.est.growth import grow
from ratoon.est.schedule import NewLayers
from ratoon.est.subnetwork import Subnetwork
from ratoon.training.pretrainer import Pretrainer


def grow_into(
    trainer: Pretrainer, before: Subnetwork, after: Subnetwork, new_layers: NewLayers
) -> None:
    """Prepare what `after` computes with beyond `before`; see `est.growth.grow`.

    A copied layer has had as many updates as the one it is a copy of, a silent one none.
    """
    weights, layout = trainer.weights, trainer.layout
    if new_layers == "as_they_are":
        return
    old, new = len(before.active_layers), len(after.active_layers)
    with weights.whole() as tensors:
        masters, *moments = tensors.values()
        grow(masters, moments, layout, before, after, new_layers)
    for layer in range(old, new):
        source, target = layout.prefix.format(layer % old), layout.prefix.format(layer)
        for name in layout.names(masters, layer):
            copied = source + name.removeprefix(target)
            weights.counts[name] = weights.counts[copied] if new_layers == "stack" else 0
