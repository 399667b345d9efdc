"""All trainable tensors of a drafter in one flat buffer.

Fused tensors lie side by side, so one buffer can be seen under the checkpoint's names or in the
fused form that computation uses, without copies.

Shape letters: P trainable numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ratoon.drafter.model import FUSED, DrafterWeights, Eagle3Drafter

TRAINABLE = tuple(name for names in FUSED.values() for name in names)


class FlatLayout:
    """Where each trainable tensor lies in a flat buffer `[P]`."""

    def __init__(self, drafter: Eagle3Drafter) -> None:
        named = dict(drafter.named_parameters())
        self.shapes = {name: named[name].shape for name in TRAINABLE}
        self.size = sum(shape.numel() for shape in self.shapes.values())

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of `flat [P]` under the checkpoint's names."""
        parts = torch.split(flat, [shape.numel() for shape in self.shapes.values()])
        return {
            name: part.view(shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def fused(self, flat: Tensor) -> DrafterWeights:
        """Views of `flat [P]` in fused form; each is a leaf of its own for autograd."""
        flat = flat.detach()
        views, start = {}, 0
        for field, names in FUSED.items():
            shapes = [self.shapes[name] for name in names]
            size = sum(shape.numel() for shape in shapes)
            views[field] = flat[start : start + size].view(-1, *shapes[0][1:])
            start += size
        return DrafterWeights(**views)


def adopt(drafter: Eagle3Drafter, layout: FlatLayout) -> nn.Parameter:
    """Move the drafter's parameters into one flat parameter `[P]` and make them views of it."""
    named = dict(drafter.named_parameters())
    flat = torch.cat([named[name].detach().flatten() for name in TRAINABLE])
    for name, view in layout.named(flat).items():
        named[name].data = view
    return nn.Parameter(flat)
