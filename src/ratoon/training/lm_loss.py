"""Next-token loss of whole sequences, with its gradient made on the way.

Every token is learned with one weight, so the gradient's scale is known before backward, and
forward can finish with each block of logits while it is in cache: nothing as wide as the
vocabulary is kept for backward but, on the way, one bf16 block for the head's gradient.

Shape letters: T tokens, D width, V vocabulary, R rows of a block.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ratoon.models.fused import deliver_grad, sum_dtype, transposed

# Elements of one block of logits whose softmax stays in a core's cache.
_SOFTMAX_ELEMENTS = 1 << 18
# Rows of one product with the head and of its gradient, so that logits take little memory.
_PRODUCT_ROWS = 1024


def next_token_loss(hidden: Tensor, head_weight: Tensor, targets: Tensor, weight: float) -> Tensor:
    """`weight` times the summed negative log-likelihood, in nats; a float32 scalar.

    Shapes: `hidden [T, D]`, `head_weight [V, D]`, `targets [T]` int64.
    The head's gradient goes to its `main_grad` where that is set, in forward already: so a loss
    that is made with gradients on must be backpropagated once.
    Host-device syncs: none.
    """
    return cast(
        Tensor,
        _NextTokenLoss.apply(hidden, head_weight, targets, weight),  # type: ignore[no-untyped-call]
    )


@torch.no_grad()
def token_losses(hidden: Tensor, head_weight: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of each target `[T]`, in nats and float32."""
    pieces = []
    logits, wide = _buffers(hidden, head_weight)
    for states, ids in zip(hidden.split(_PRODUCT_ROWS), targets.split(_PRODUCT_ROWS), strict=True):
        found = torch.mm(states, head_weight.t(), out=logits[: len(states)])
        for block, block_ids in zip(found.split(len(wide)), ids.split(len(wide)), strict=True):
            rows = wide[: len(block)].copy_(block)
            pieces.append(F.cross_entropy(rows, block_ids, reduction="none"))
    return torch.cat(pieces)


class _NextTokenLoss(torch.autograd.Function):
    """d loss / d logits = weight (softmax - onehot)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, scale: float) -> Tensor:
        dtype = sum_dtype(hidden.dtype)
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        grad_hidden = grad_weight = None
        if any(ctx.needs_input_grad[:2]):
            grad_hidden = torch.empty_like(hidden)
            if getattr(weight, "main_grad", None) is None:
                grad_weight = torch.zeros_like(weight, dtype=dtype)
        logits, wide = _buffers(hidden, weight)
        for start in range(0, len(hidden), _PRODUCT_ROWS):
            rows = slice(start, start + _PRODUCT_ROWS)
            states, ids = hidden[rows], targets[rows]
            found = torch.mm(states, weight.t(), out=logits[: len(states)])
            for block, block_ids in zip(found.split(len(wide)), ids.split(len(wide)), strict=True):
                total += _block(block, wide[: len(block)], block_ids, scale)
            if grad_hidden is not None:
                torch.mm(found, weight, out=grad_hidden[rows])
                product = transposed(transposed(states) @ found)
                if grad_weight is None:
                    deliver_grad(weight, product)
                else:
                    grad_weight.add_(product)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        return total * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_weight is not None:
            grad_weight = (grad_weight * grad).to(ctx.dtype)
        return grad_hidden, grad_weight, None, None


def _buffers(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of one product, and one block of them in the type of sums."""
    vocab_size = weight.shape[0]
    rows = min(_PRODUCT_ROWS, len(hidden))
    wide_rows = rows
    if hidden.device.type == "cpu":
        wide_rows = min(rows, max(1, _SOFTMAX_ELEMENTS // vocab_size))
    return (
        hidden.new_empty(rows, vocab_size),
        hidden.new_empty(wide_rows, vocab_size, dtype=sum_dtype(hidden.dtype)),
    )


def _block(logits: Tensor, wide: Tensor, ids: Tensor, scale: float) -> Tensor:
    """Summed loss of a block `[R, V]`, which then holds its gradient."""
    wide.copy_(logits)
    chosen = wide.gather(1, ids[:, None])
    highest = wide.amax(dim=-1, keepdim=True)
    sums = wide.sub_(highest).exp_().sum(dim=-1, keepdim=True)
    chosen.sub_(highest).sub_(sums.log())
    logits.copy_(wide.mul_(scale / sums))
    # p(id) - 1 in float32 before rounding, or it is lost for tokens near certainty.
    logits.scatter_(1, ids[:, None], chosen.expm1().mul_(scale).to(logits.dtype))
    return -chosen.sum()
