"""All trainable tensors of a drafter in one flat buffer.

Fused tensors lie side by side, so one buffer can be seen under the checkpoint's names or in the
fused form that computation uses, without copies. The head lies transposed, `[D, Vd]`: so its weight
gradient is a product of two matrices in memory order, three times as fast on a CPU.

Shape letters: P trainable numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ratoon.drafter.model import FUSED, DrafterWeights, Eagle3Drafter

TRAINABLE = tuple(name for names in FUSED.values() for name in names)
_HEAD = "lm_head.weight"


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
            name: part.view(shape[::-1]).t() if name == _HEAD else part.view(shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def fused(self, flat: Tensor) -> DrafterWeights:
        """Views of `flat [P]` in fused form, detached."""
        flat = flat.detach()
        views, start = {}, 0
        for field, names in FUSED.items():
            shapes = [self.shapes[name] for name in names]
            size = sum(shape.numel() for shape in shapes)
            part = flat[start : start + size]
            if names == (_HEAD,):
                views[field] = part.view(shapes[0][::-1]).t()
            else:
                views[field] = part.view(-1, *shapes[0][1:])
            start += size
        return DrafterWeights(**views)


def adopt(drafter: Eagle3Drafter, layout: FlatLayout) -> Tensor:
    """Move the drafter's parameters into one flat buffer `[P]` and make them views of it."""
    named = dict(drafter.named_parameters())
    flat = named[TRAINABLE[0]].detach().new_empty(layout.size)
    for name, view in layout.named(flat).items():
        view.copy_(named[name].detach())
        named[name].data = view
    return flat
