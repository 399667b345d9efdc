"""Causal attention within each of several documents laid end to end, for training.

Forward is the flash kernel, document by document, with keys and values padded to whole blocks: then
each row is summed in the same order as in the rollout engine, and has the same bits. Backward is
written out as batched products: on one AMX core the flash kernel's own bf16 backward takes four
times as long for documents of 100 to 300 tokens.

A document may continue an earlier piece that others continue too (a prompt with several responses).
The piece's keys are then seen by all of them, and its gradients are summed.

Shape letters: T packed tokens, H query heads, G key/value heads, E head width; of one document:
P tokens of the piece it continues, L tokens of its own; of one segment of its queries: Q tokens,
which see the first S tokens of the document.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ratoon.models.kv_cache import round_up_width
from ratoon.models.packing import PackedBatch
from ratoon.models.sequence_attention import sequence_attention

# Public functions reach these kernels only through autograd, which is what is written out here.
_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
_softmax_backward = torch.ops.aten._softmax_backward_data  # noqa: SLF001

# Queries of a long document are taken in segments: less of the causal square is computed in vain.
_SEGMENT = 256

# The flash kernel's vectors hold 16 or 32 entries.
_WIDTH_STEP = 32


@dataclass(frozen=True, slots=True)
class Document:
    """Own tokens `start .. start + length` after `prefix_length` tokens from `prefix_start`.

    `segments` cut the own tokens.
    """

    start: int
    length: int
    prefix_start: int
    prefix_length: int
    segments: tuple[tuple[int, int], ...]

    @property
    def width(self) -> int:
        """All tokens, rounded up to whole blocks."""
        return round_up_width(self.prefix_length + self.length, _WIDTH_STEP)


@dataclass(frozen=True, slots=True)
class DocumentPlan:
    """Index tables of a packed batch; made once and used by all layers.

    Where all documents are `length` tokens long, in whole blocks, no table is needed on a CPU, and
    they are empty.
    """

    documents: tuple[Document, ...]
    num_heads: int
    num_kv_heads: int
    length: int | None
    # Of forward, in the order (document, query head, token of prefix or document): rows of [T * H],
    # and, padded to whole blocks, of [T * G].
    whole_query_rows: Tensor
    padded_key_rows: Tensor
    # Of backward: rows of [T * H] in the order (segment, head, token); of [T * G] in (document,
    # head, token).
    query_rows: Tensor
    key_rows: Tensor
    # From backward's orders, one after the other, back to [T, H + G]; and from the second alone.
    rotary_rows: Tensor
    value_rows: Tensor


def plan_documents(batch: PackedBatch, num_heads: int, num_kv_heads: int) -> DocumentPlan:
    """Lay out a batch's documents. No host-device sync; one copy per table."""
    length = batch.lengths[0]
    if not any(batch.parents) and set(batch.lengths) == {length} and length % _WIDTH_STEP == 0:
        none = torch.empty(0, dtype=torch.long, device=batch.ids.device)
        return DocumentPlan(_documents(batch), num_heads, num_kv_heads, length, *(none,) * 6)
    group = num_heads // num_kv_heads
    heads, kv_heads = torch.arange(num_heads)[:, None], torch.arange(num_kv_heads)[:, None]
    documents = _documents(batch)
    whole, padded, queries, keys = [], [], [], []
    for document in documents:
        prefix_end = document.prefix_start + document.prefix_length
        own = torch.arange(document.start, document.start + document.length)
        tokens = torch.cat([torch.arange(document.prefix_start, prefix_end), own])
        whole.append((tokens * num_heads + heads).flatten())
        # Any finite row may pad: padding lies in the future of all queries.
        tokens = torch.cat([tokens, tokens[-1:].expand(document.width - len(tokens))])
        padded.append((tokens * num_kv_heads + heads // group).flatten())
        queries += [
            (own[low:high] * num_heads + heads).flatten() for low, high in document.segments
        ]
        keys.append((own * num_kv_heads + kv_heads).flatten())
    query_rows, key_rows = torch.cat(queries), torch.cat(keys)
    from_query, from_key = query_rows.argsort(), key_rows.argsort()
    rotary_rows = torch.cat(
        [from_query.view(-1, num_heads), len(from_query) + from_key.view(-1, num_kv_heads)], dim=1
    )
    device = batch.ids.device
    return DocumentPlan(
        documents=documents,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        length=None,
        whole_query_rows=torch.cat(whole).to(device),
        padded_key_rows=torch.cat(padded).to(device),
        query_rows=query_rows.to(device),
        key_rows=key_rows.to(device),
        rotary_rows=rotary_rows.flatten().to(device),
        value_rows=from_key.to(device),
    )


def _documents(batch: PackedBatch) -> tuple[Document, ...]:
    starts = [0, *itertools.accumulate(batch.lengths)]
    documents = []
    for start, length, parent in zip(starts, batch.lengths, batch.parents, strict=False):
        num_segments = -(-length // _SEGMENT)
        step = round_up_width(-(-length // num_segments), _WIDTH_STEP)
        segments = tuple((low, min(low + step, length)) for low in range(0, length, step))
        prefix = (0, 0) if parent is None else (starts[parent], batch.lengths[parent])
        documents.append(Document(start, length, *prefix, segments))
    return tuple(documents)


def document_attention(rotary: Tensor, value: Tensor, plan: DocumentPlan) -> Tensor:
    """Grouped-query causal attention.

    Shapes: `rotary [T, H + G, E]` holds queries and keys, `value [T, G, E]`; returns
    `[T, H * E]`.
    Host-device syncs: none.
    """
    if rotary.device.type == "cpu":
        if plan.length is not None:
            return sequence_attention(rotary, value, plan.num_heads, plan.length)
        attended = _DocumentAttention.apply(rotary, value, plan)  # type: ignore[no-untyped-call]
        return cast(Tensor, attended)
    query, key = rotary.split((plan.num_heads, plan.num_kv_heads), dim=1)
    pieces = []
    for document in plan.documents:
        prefix = slice(document.prefix_start, document.prefix_start + document.prefix_length)
        own = slice(document.start, document.start + document.length)
        q, k, v = (
            torch.cat([x[prefix], x[own]]).transpose(0, 1)[None] for x in (query, key, value)
        )
        attended = F.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            enable_gqa=plan.num_heads != plan.num_kv_heads,
        )
        pieces.append(attended[0].transpose(0, 1)[document.prefix_length :])
    return torch.cat(pieces).flatten(1)


class _DocumentAttention(torch.autograd.Function):
    """Saves queries, keys, values, and the logarithms of the softmax's denominators."""

    @staticmethod
    def forward(ctx: Any, rotary: Tensor, value: Tensor, plan: DocumentPlan) -> Tensor:
        num_heads, head_dim = plan.num_heads, rotary.shape[-1]
        value = value.contiguous()
        query = _heads_first(rotary[:, :num_heads], plan.whole_query_rows)
        key = _heads_first(rotary[:, num_heads:], plan.padded_key_rows)
        padded_value = _heads_first(value, plan.padded_key_rows)
        widths = [num_heads * document.width for document in plan.documents]
        lengths = [num_heads * (doc.prefix_length + doc.length) for doc in plan.documents]
        attended, log_sums = [], []
        for document, q, k, v in zip(
            plan.documents,
            query.split(lengths),
            key.split(widths),
            padded_value.split(widths),
            strict=True,
        ):
            out, log_sum = _flash_attention(
                *(x.view(1, num_heads, -1, head_dim) for x in (q, k, v)), 0.0, True
            )
            # The prefix's own rows are those of the piece that it is.
            attended.append(out[0, :, document.prefix_length :].transpose(0, 1))
            log_sums.append(log_sum[0, :, document.prefix_length :].t())
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
        shifted_query = _shifted(query, shift)

        grad_rotary = rotary.new_empty(num_tokens * num_all, head_dim)
        grad_query, grad_key = grad_rotary.split(
            (num_tokens * num_heads, num_tokens * num_kv_heads)
        )
        grad_value = torch.empty_like(val)
        # Pieces come before what continues them, so they have written what the others add to.
        for document in plan.documents:
            rows = _piece(document.start, document.length, num_heads)
            own = _piece(document.start, document.length, num_kv_heads)
            prefix = _piece(document.prefix_start, document.prefix_length, num_kv_heads)
            found = _document_backward(
                document,
                scale,
                num_heads,
                query[rows],
                shifted_query[rows],
                out_grad[rows],
                grad_query[rows],
                _joined(key, prefix, own, num_kv_heads),
                _joined(val, prefix, own, num_kv_heads),
            )
            for target, both in zip((grad_key, grad_value), found, strict=True):
                before, mine = both.split((document.prefix_length, document.length), dim=1)
                target[own].view(mine.shape).copy_(mine)
                target[prefix].view(before.shape).add_(before)
        return (
            grad_rotary.index_select(0, plan.rotary_rows).view(rotary.shape),
            grad_value.index_select(0, plan.value_rows).view(value.shape),
            None,
        )


def _document_backward(
    document: Document,
    scale: float,
    num_heads: int,
    query: Tensor,
    shifted_query: Tensor,
    out_grad: Tensor,
    grad_query: Tensor,
    key: Tensor,
    value: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of one document's keys and values; those of its queries are written.

    The shifted product is scale * q k - log(sum), so its exponential is the probability.

    Shapes: `query`, `out_grad`, `grad_query [H * L, E]` and `shifted_query [H * L, E + 2]` in the
    order (segment, head, token); `key`, `value [G, P + L, E]`, as are the gradients returned.
    """
    num_kv_heads = key.shape[0]
    ones_key = torch.cat([key, key.new_ones(*key.shape[:2], 2)], dim=-1)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    for low, high in document.segments:
        rows = slice(low * num_heads, high * num_heads)
        q, shifted_q, dout, dq = (
            x[rows].view(num_kv_heads, -1, x.shape[1])
            for x in (query, shifted_query, out_grad, grad_query)
        )
        seen = document.prefix_length + high
        probs = q.new_empty(num_kv_heads, q.shape[1], seen)
        torch.baddbmm(
            probs, shifted_q, ones_key[:, :seen].transpose(1, 2), beta=0, alpha=scale, out=probs
        )
        probs.exp_().view(num_heads, high - low, seen).tril_(document.prefix_length + low)
        grad_probs = torch.bmm(dout, value[:, :seen].transpose(1, 2))
        grad_scores = _softmax_backward(grad_probs, probs, -1, probs.dtype)
        torch.baddbmm(dq, grad_scores, key[:, :seen], beta=0, alpha=scale, out=dq)
        grad_value[:, :seen] += torch.bmm(probs.transpose(1, 2), dout)
        grad_key[:, :seen].add_(torch.bmm(grad_scores.transpose(1, 2), q), alpha=scale)
    return grad_key, grad_value


def _piece(start: int, length: int, num_heads: int) -> slice:
    """Rows of a piece in an order (piece, head, token)."""
    return slice(start * num_heads, (start + length) * num_heads)


def _joined(x: Tensor, prefix: slice, own: slice, num_kv_heads: int) -> Tensor:
    """Two pieces of `x [T * G, E]` as `[G, P + L, E]`."""
    pieces = [x[rows].view(num_kv_heads, -1, x.shape[1]) for rows in (prefix, own)]
    return torch.cat(pieces, dim=1)


def _heads_first(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of `x [T, heads, E]`, seen as `[T * heads, E]`, in another order."""
    return x.reshape(-1, x.shape[-1]).index_select(0, rows)


def _shifted(query: Tensor, shift: Tensor) -> Tensor:
    """`query [R, E]` with two more columns whose sum is `shift [R]` to twice the precision."""
    high = shift.to(query.dtype)
    low = (shift - high).to(query.dtype)
    return torch.cat([query, high[:, None], low[:, None]], dim=-1)
