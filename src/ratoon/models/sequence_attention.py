"""Causal attention of sequences of one length, as pretraining packs them.

The same mathematics as `document_attention`, with nothing to look up: sequences are an axis of
tensors, so forward is one call of the flash kernel, with the bits that it has for each sequence
alone. Backward is written out as batched products over a few sequences at a time, whose
probabilities stay in a core's cache.

Shape letters: B sequences, T tokens of one, H query heads, G key/value heads, E head width; of one
segment of queries: Q tokens, which see the first S tokens.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Public functions reach these kernels only through autograd, which is what is written out here.
_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
_softmax_backward = torch.ops.aten._softmax_backward_data  # noqa: SLF001

# Queries are taken in segments: less of the causal square is computed in vain.
_SEGMENT = 128
# Probabilities that are treated at a time: 512 KB of bf16.
_ELEMENTS = 1 << 18


def sequence_attention(rotary: Tensor, value: Tensor, num_heads: int, length: int) -> Tensor:
    """Grouped-query causal attention on a CPU.

    Shapes: `rotary [B * T, H + G, E]` holds queries and keys, `value [B * T, G, E]`; `length` is T.
    Returns `[B * T, H * E]`.
    """
    attended = _SequenceAttention.apply(  # type: ignore[no-untyped-call]
        rotary, value, num_heads, length
    )
    return cast(Tensor, attended)


class _SequenceAttention(torch.autograd.Function):
    """Saves queries, keys, values, and the logarithms of the softmax's denominators."""

    @staticmethod
    def forward(ctx: Any, rotary: Tensor, value: Tensor, num_heads: int, length: int) -> Tensor:
        query, key, val = _split(rotary, value, num_heads, length)
        group = num_heads // key.shape[1]
        if group > 1:
            key, val = (x.repeat_interleave(group, dim=1) for x in (key, val))
        out, log_sums = _flash_attention(query, key, val, 0.0, True)
        ctx.num_heads, ctx.length = num_heads, length
        ctx.save_for_backward(rotary, value, log_sums)
        return cast(Tensor, out).transpose(1, 2).reshape(len(rotary), -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rotary, value, log_sums = ctx.saved_tensors
        num_heads, length = ctx.num_heads, ctx.length
        query, key, val = _split(rotary, value, num_heads, length)
        scale = query.shape[-1] ** -0.5
        out_grad = grad.view(-1, length, num_heads, query.shape[-1]).transpose(1, 2)
        grad_rotary, grad_value = torch.empty_like(rotary), torch.empty_like(value)
        grads = _split(grad_rotary, grad_value, num_heads, length)
        step = max(1, _ELEMENTS // (num_heads * min(length, _SEGMENT) * length))
        for first in range(0, len(query), step):
            some = slice(first, first + step)
            shifted = _shifted(query[some], log_sums.view(query.shape[:3])[some] / -scale)
            found = _backward(query[some], shifted, key[some], val[some], out_grad[some], scale)
            for target, piece in zip(grads, found, strict=True):
                target[some] = piece
        return grad_rotary, grad_value, None, None


def _split(
    rotary: Tensor, value: Tensor, num_heads: int, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Views of queries `[B, H, T, E]`, keys and values `[B, G, T, E]`."""
    both = rotary.unflatten(0, (-1, length)).transpose(1, 2)
    query, key = both.split((num_heads, both.shape[1] - num_heads), dim=1)
    return query, key, value.unflatten(0, (-1, length)).transpose(1, 2)


def _backward(
    query: Tensor, shifted: Tensor, key: Tensor, value: Tensor, out_grad: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of some sequences' queries, keys and values, in their shapes.

    The shifted product is scale * q k - log(sum), so its exponential is the probability.
    Shapes: `shifted [B, H, T, E + 2]`, else as `_split` gives them.
    """
    count, num_kv_heads, length, width = key.shape
    ones_key = torch.cat([key, key.new_ones(*key.shape[:3], 2)], dim=-1).flatten(0, 1)
    keys, values = key.reshape(-1, length, width), value.reshape(-1, length, width)
    grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    grad_key, grad_value = torch.zeros_like(keys), torch.zeros_like(values)
    for low in range(0, length, _SEGMENT):
        high = min(low + _SEGMENT, length)
        # All query heads of a group are rows of one product: [B * G, (H / G) * Q, ...].
        q, shifted_q, dout = (
            x[:, :, low:high].reshape(count * num_kv_heads, -1, x.shape[-1])
            for x in (query, shifted, out_grad)
        )
        probs = q.new_empty(*q.shape[:2], high)
        torch.baddbmm(
            probs, shifted_q, ones_key[:, :high].transpose(1, 2), beta=0, alpha=scale, out=probs
        )
        probs.exp_().view(-1, high - low, high).tril_(low)
        grad_scores = torch.bmm(dout, values[:, :high].transpose(1, 2))
        grad_scores = _softmax_backward(grad_scores, probs, -1, probs.dtype)
        target = torch.bmm(grad_scores, keys[:, :high])
        grad_query[:, :, low:high] = target.view(count, -1, high - low, width)
        grad_value[:, :high] += torch.bmm(probs.transpose(1, 2), dout)
        grad_key[:, :high] += torch.bmm(grad_scores.transpose(1, 2), q)
    shape = (count, num_kv_heads, length, width)
    return grad_query.mul_(scale), grad_key.mul_(scale).view(shape), grad_value.view(shape)


def _shifted(query: Tensor, shift: Tensor) -> Tensor:
    """`query [..., E]` with two more columns whose sum is `shift` to twice the precision."""
    high = shift.to(query.dtype)
    low = (shift - high).to(query.dtype)
    return torch.cat([query, high[..., None], low[..., None]], dim=-1)
