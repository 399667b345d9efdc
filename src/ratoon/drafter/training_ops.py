"""Building blocks of the drafter's training forward whose backward is cheaper than autograd's.

Weight gradients are not formed in the backward pass: each `TrainedLinear` keeps the pairs (output
gradient, input) of every call since the last optimizer step and multiplies them once. That is one
product and one write per weight for all unroll steps and micro-steps, summed in float32 inside the
product.

Shape letters: T rows, N outputs; Q queries, S keys, H query heads, G key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ratoon.models.fused import transposed

# Public functions reach this kernel only through autograd, which is what is written out here.
_softmax_backward = torch.ops.aten._softmax_backward_data  # noqa: SLF001


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
        torch.mm(columns(gradients), rows(inputs), out=out)
        self._pairs.clear()

    def discard(self) -> None:
        """Forget all calls kept."""
        self._pairs.clear()


def rows(parts: Sequence[Tensor]) -> Tensor:
    """The rows of `parts [T_i, N]` end to end, `[T, N]`; no copy of a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def columns(parts: Sequence[Tensor]) -> Tensor:
    """The rows of `parts [T_i, N]` as columns, `[N, T]` in memory order.

    A transposed view as left operand would halve a product's speed on a CPU.
    """
    return transposed(rows(parts))


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


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Grouped-query attention of `query [Q, H, E]` over `key, value [S, G, E]` to `[Q, H*E]`.

    `bias [Q, S]` is added to the scores: -inf where a query does not see a key. The heads that
    share a key are folded into the query axis, so keys are not repeated.
    """
    queries, heads, width = query.shape
    groups = key.shape[1]
    share = heads // groups
    folded = query.reshape(queries, groups, share, width).permute(1, 2, 0, 3)
    out = _Attention.apply(  # type: ignore[no-untyped-call]
        folded.reshape(groups, share * queries, width),
        key.transpose(0, 1).contiguous(),
        value.transpose(0, 1).contiguous(),
        bias.repeat(share, 1),
    )
    unfolded = out.view(groups, share, queries, width).permute(2, 0, 1, 3)
    return cast(Tensor, unfolded.reshape(queries, heads * width))


class _Attention(torch.autograd.Function):
    """Attention of `[G, Q, E]` with whole rows of scores, which are few enough here.

    On a CPU three times as fast as torch's fused kernel, whose backward multiplies small blocks. In
    bfloat16 a score is rounded once more than there.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        ctx.scale = query.shape[-1] ** -0.5
        scores = torch.baddbmm(bias, query, key.transpose(1, 2), alpha=ctx.scale)
        weights = torch.softmax(scores, -1)
        ctx.save_for_backward(query, key, value, weights)
        return torch.bmm(weights, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, weights = ctx.saved_tensors
        products = torch.bmm(gradient, value.transpose(1, 2))
        scores = _softmax_backward(products, weights, -1, weights.dtype)
        return (
            torch.bmm(scores, key).mul_(ctx.scale),
            torch.bmm(scores.transpose(1, 2), query).mul_(ctx.scale),
            torch.bmm(weights.transpose(1, 2), gradient),
            None,
        )
