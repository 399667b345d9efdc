"""Causal attention within each of several documents laid end to end, for training.

Forward is the flash kernel, document by document, with keys and values padded to whole blocks: then
each row is summed in the same order as in the rollout engine, and has the same bits. Backward is
written out as batched products: on one AMX core the flash kernel's own bf16 backward takes four
times as long for documents of 100 to 300 tokens.

Shape letters: T packed tokens, H query heads, G key/value heads, E head width; of one document:
L tokens, of one segment of its queries: Q tokens, which see the first S tokens of the document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ratoon.models.kv_cache import round_up_width

# Public functions reach these kernels only through autograd, which is what is written out here.
_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
_softmax_backward = torch.ops.aten._softmax_backward_data  # noqa: SLF001

# Queries of a long document are taken in segments: less of the causal square is computed in vain.
_SEGMENT = 256

# The flash kernel's vectors hold 16 or 32 entries.
_WIDTH_STEP = 32


@dataclass(frozen=True, slots=True)
class Document:
    """Where one document lies: tokens `start .. start + length`, and its query segments."""

    start: int
    length: int
    segments: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class DocumentPlan:
    """Index tables of a packed batch; made once and used by all layers."""

    documents: tuple[Document, ...]
    num_heads: int
    num_kv_heads: int
    # Rows of [T * H] in the order (segment, head, token); of [T * G] in (document, head, token).
    query_rows: Tensor
    key_rows: Tensor
    # Rows of [T * G] in the order (document, query head, token padded to whole blocks).
    padded_key_rows: Tensor
    # From the two orders above, one after the other, back to [T, H + G]; and from the second alone.
    rotary_rows: Tensor
    value_rows: Tensor


def plan_documents(
    lengths: Sequence[int], num_heads: int, num_kv_heads: int, device: torch.device
) -> DocumentPlan:
    """Lay out documents of these lengths. No host-device sync; one copy per table."""
    group = num_heads // num_kv_heads
    heads, kv_heads = torch.arange(num_heads)[:, None], torch.arange(num_kv_heads)[:, None]
    documents, queries, keys, padded = [], [], [], []
    start = 0
    for length in lengths:
        num_segments = -(-length // _SEGMENT)
        step = round_up_width(-(-length // num_segments), _WIDTH_STEP)
        segments = tuple((low, min(low + step, length)) for low in range(0, length, step))
        tokens = torch.arange(start, start + length)
        queries += [(tokens[low:high] * num_heads + heads).flatten() for low, high in segments]
        keys.append((tokens * num_kv_heads + kv_heads).flatten())
        width = torch.arange(round_up_width(length, _WIDTH_STEP)).clamp_(max=length - 1)
        padded.append(((start + width) * num_kv_heads + heads // group).flatten())
        documents.append(Document(start, length, segments))
        start += length
    query_rows, key_rows = torch.cat(queries), torch.cat(keys)
    from_query, from_key = query_rows.argsort(), key_rows.argsort()
    rotary_rows = torch.cat(
        [from_query.view(start, -1), start * num_heads + from_key.view(start, -1)], dim=1
    )
    return DocumentPlan(
        documents=tuple(documents),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        query_rows=query_rows.to(device),
        key_rows=key_rows.to(device),
        padded_key_rows=torch.cat(padded).to(device),
        rotary_rows=rotary_rows.flatten().to(device),
        value_rows=from_key.to(device),
    )


def document_attention(rotary: Tensor, value: Tensor, plan: DocumentPlan) -> Tensor:
    """Grouped-query causal attention.

    Shapes: `rotary [T, H + G, E]` holds queries and keys, `value [T, G, E]`; returns
    `[T, H * E]`.
    Host-device syncs: none.
    """
    if rotary.device.type == "cpu":
        attended = _DocumentAttention.apply(rotary, value, plan)  # type: ignore[no-untyped-call]
        return cast(Tensor, attended)
    query, key = rotary.split((plan.num_heads, plan.num_kv_heads), dim=1)
    lengths = [document.length for document in plan.documents]
    attended = [
        F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            is_causal=True,
            enable_gqa=plan.num_heads != plan.num_kv_heads,
        )[0].transpose(0, 1)
        for q, k, v in zip(
            query.split(lengths), key.split(lengths), value.split(lengths), strict=True
        )
    ]
    return torch.cat(attended).flatten(1)


class _DocumentAttention(torch.autograd.Function):
    """Saves queries, keys, values, output and the logarithm of the softmax's denominator."""

    @staticmethod
    def forward(ctx: Any, rotary: Tensor, value: Tensor, plan: DocumentPlan) -> Tensor:
        num_heads, head_dim = plan.num_heads, rotary.shape[-1]
        key = _heads_first(rotary[:, num_heads:], plan.padded_key_rows)
        padded_value = _heads_first(value, plan.padded_key_rows)
        attended, log_sums = [], []
        begin = 0
        for document in plan.documents:
            tokens = slice(document.start, document.start + document.length)
            width = round_up_width(document.length, _WIDTH_STEP)
            end = begin + num_heads * width
            # Padding is never seen: it lies in the future of all queries.
            out, log_sum = _flash_attention(
                rotary[tokens, :num_heads].transpose(0, 1)[None],
                key[begin:end].view(1, num_heads, width, head_dim),
                padded_value[begin:end].view(1, num_heads, width, head_dim),
                0.0,
                True,
            )
            attended.append(out[0].transpose(0, 1))
            log_sums.append(log_sum[0].t())
            begin = end
        ctx.plan = plan
        ctx.save_for_backward(rotary, value, torch.cat(log_sums))
        return torch.cat(attended).flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rotary, value, log_sums = ctx.saved_tensors
        plan: DocumentPlan = ctx.plan
        num_tokens, num_all, head_dim = rotary.shape
        num_heads, num_kv_heads = plan.num_heads, plan.num_kv_heads
        scale = head_dim**-0.5
        query = _heads_first(rotary[:, :num_heads], plan.query_rows)
        key = _heads_first(rotary[:, num_heads:], plan.key_rows)
        val = _heads_first(value, plan.key_rows)
        out_grad = _heads_first(grad.view(num_tokens, num_heads, head_dim), plan.query_rows)
        shift = log_sums.view(-1).index_select(0, plan.query_rows).div_(-scale)
        shifted_query, ones_key = _shifted(query, shift), _with_ones(key)

        grad_rotary = rotary.new_empty(num_tokens * num_all, head_dim)
        grad_query, grad_key = grad_rotary.split(
            (num_tokens * num_heads, num_tokens * num_kv_heads)
        )
        grad_value = torch.empty_like(val)
        for document in plan.documents:
            keys = slice(
                document.start * num_kv_heads,
                (document.start + document.length) * num_kv_heads,
            )
            # The last segment sees all keys, so it writes what the others add to.
            for low, high in reversed(document.segments):
                queries = slice(
                    (document.start + low) * num_heads, (document.start + high) * num_heads
                )
                _segment_backward(
                    scale,
                    (low, high),
                    num_heads,
                    *(
                        x[queries].view(num_kv_heads, -1, x.shape[1])
                        for x in (query, shifted_query, out_grad, grad_query)
                    ),
                    *(
                        x[keys].view(num_kv_heads, -1, x.shape[1])
                        for x in (key, ones_key, val, grad_key, grad_value)
                    ),
                )
        return (
            grad_rotary.index_select(0, plan.rotary_rows).view(rotary.shape),
            grad_value.index_select(0, plan.value_rows).view(value.shape),
            None,
        )


def _segment_backward(
    scale: float,
    bounds: tuple[int, int],
    num_heads: int,
    query: Tensor,
    shifted_query: Tensor,
    out_grad: Tensor,
    grad_query: Tensor,
    key: Tensor,
    ones_key: Tensor,
    value: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
) -> None:
    """Gradients through one segment of queries.

    The shifted product is scale * q k - log(sum), so its exponential is the probability.

    Shapes: `query`, `out_grad`, `grad_query [G, H/G * Q, E]`, `shifted_query [.., E + 2]`; `key`,
    `value` and their gradients `[G, L, E]`, `ones_key [G, L, E + 2]`. Gradients are written.
    """
    low, high = bounds
    num_kv_heads, num_rows, _ = query.shape
    probs = query.new_empty(num_kv_heads, num_rows, high)
    torch.baddbmm(
        probs, shifted_query, ones_key[:, :high].transpose(1, 2), beta=0, alpha=scale, out=probs
    )
    probs.exp_().view(num_heads, high - low, high).tril_(low)
    grad_probs = torch.bmm(out_grad, value[:, :high].transpose(1, 2))
    grad_scores = _softmax_backward(grad_probs, probs, -1, probs.dtype)
    torch.baddbmm(grad_query, grad_scores, key[:, :high], beta=0, alpha=scale, out=grad_query)
    if high == key.shape[1]:
        torch.bmm(probs.transpose(1, 2), out_grad, out=grad_value)
        torch.baddbmm(
            grad_key, grad_scores.transpose(1, 2), query, beta=0, alpha=scale, out=grad_key
        )
    else:
        grad_value[:, :high].add_(torch.bmm(probs.transpose(1, 2), out_grad))
        grad_key[:, :high].add_(torch.bmm(grad_scores.transpose(1, 2), query), alpha=scale)


def _heads_first(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of `x [T, heads, E]`, seen as `[T * heads, E]`, in another order."""
    return x.reshape(-1, x.shape[-1]).index_select(0, rows)


def _shifted(query: Tensor, shift: Tensor) -> Tensor:
    """`query [R, E]` with two more columns whose sum is `shift [R]` to twice the precision."""
    high = shift.to(query.dtype)
    low = (shift - high).to(query.dtype)
    return torch.cat([query, high[:, None], low[:, None]], dim=-1)


def _with_ones(key: Tensor) -> Tensor:
    """`key [R, E]` with two more columns of ones."""
    return torch.cat([key, key.new_ones(key.shape[0], 2)], dim=-1)
