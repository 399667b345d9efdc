"""Building blocks of the drafter's training forward whose backward is cheaper than autograd's.

Weight gradients are not formed in the backward pass: each `TrainedLinear` keeps the pairs (output
gradient, input) of every call since the last optimizer step and multiplies them once. That is one
product and one write per weight for all unroll steps and micro-steps, summed in float32 inside the
product.

Shape letters: T rows, D width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor


class TrainedLinear:
    """A bias-free linear map `[.., in] -> [.., out]` with a deferred weight gradient.

    `weight` is read at each call, so it may change in place between optimizer steps.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach().requires_grad_()
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the map to `x [T, in]`."""
        return cast(Tensor, _Linear.apply(x, self.weight, self))  # type: ignore[no-untyped-call]

    def keep(self, gradient: Tensor, x: Tensor) -> None:
        """Remember one call's output gradient `[T, out]` and input `[T, in]`."""
        self._pairs.append((gradient, x))

    def write_gradient(self, out: Tensor) -> None:
        """Fill `out [out, in]` with the sum over all calls kept, and forget them."""
        gradients, inputs = zip(*self._pairs, strict=True)
        # A transposed view as left operand would halve the product's speed on a CPU.
        torch.mm(torch.cat(gradients).t().contiguous(), torch.cat(inputs), out=out)
        self._pairs.clear()

    def discard(self) -> None:
        """Forget all calls kept."""
        self._pairs.clear()


class _Linear(torch.autograd.Function):
    """`x @ weight.T`; backward hands the weight's share to its `TrainedLinear`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, owner: TrainedLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.owner = owner
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        ctx.owner.keep(gradient, x)
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`F.rms_norm` over the last axis of `x [T, D]`, with a backward of few passes."""
    return cast(Tensor, _RMSNorm.apply(x, weight, eps))  # type: ignore[no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    """With n = x * r, r = 1 / rms(x): dx = r * (g w - n * mean(g w n))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_()[:, None]
        normed = (wide * scale).to(x.dtype)
        ctx.save_for_backward(normed, scale, weight)
        return cast(Tensor, normed * weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        normed, scale, weight = ctx.saved_tensors
        products = gradient * normed
        weight_gradient = products.sum(0)
        if not ctx.needs_input_grad[0]:
            return None, weight_gradient, None
        mean = (products @ weight).div_(normed.shape[-1])[:, None]
        inner = torch.addcmul(gradient * weight, normed, mean, value=-1)
        return inner.mul_(scale.to(inner.dtype)), weight_gradient, None
