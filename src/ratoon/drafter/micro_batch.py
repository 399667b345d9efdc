"""Slices of samples laid end to end, ready for the unrolled forward.

Pair t of a document joins the target's features of token t with the embedding of token t+1, at
position t, and predicts token t+2. At unroll step i the column of pair t feeds its own last output
with the embedding of token t+1+i, at position t+i, and predicts token t+2+i, whose teacher is the
target's hidden state of token t+1+i.

Shape letters: S pairs that serve as keys (queries, then their context), Q query columns, K unroll
steps, U teacher rows, D target width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.drafter.data_buffer import Slice


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The tensors of one micro-step. The first Q of the S pairs are the query columns.

    Shapes: features `[S, 3D]`; next_ids, positions, documents `[S]` int64; step_ids `[K, Q]` are
    the ids embedded at each unroll step; teacher_hidden `[U, D]`; student_rows `[K, U]` index Q
    (0 where there is none); valid `[K, U]` bool. `num_queries` counts the columns trained on, the
    rest of Q is padding; `longest` is the largest position plus one.
    """

    features: Tensor
    next_ids: Tensor
    positions: Tensor
    documents: Tensor
    step_ids: Tensor
    teacher_hidden: Tensor
    student_rows: Tensor
    valid: Tensor
    num_queries: int
    longest: int

    @staticmethod
    def build(
        slices: Sequence[Slice], unroll: int, window: int, *, multiple: int = 1
    ) -> MicroBatch:
        """Lay slices end to end, then up to `window - 1` pairs of context for each of them.

        A column is trained at step i only if the token it predicts exists in the response; a
        column past its document's end computes on a repeated token and has no weight. Queries,
        contexts and teacher rows are each padded to a `multiple`: kernels are prepared anew for
        each size of matrix, so few sizes are worth some idle rows.
        """
        parts = [_Part(piece, unroll, window) for piece in slices]
        queries = _Pairs([(part, *part.queries) for part in parts], -1, multiple)
        context = _Pairs([(part, *part.context) for part in parts], -2, multiple)
        students, offset = [], 0
        for part in parts:
            students.append(part.student_rows + offset)
            offset += part.num_queries
        valid = _padded(torch.cat([part.valid for part in parts], dim=1).t(), multiple).t()
        student_rows = _padded(torch.cat(students, dim=1).t(), multiple).t()
        step_ids = _padded(torch.cat([part.step_ids for part in parts], dim=1).t(), multiple).t()
        teacher_hidden = torch.cat([part.teacher_hidden for part in parts])
        device = teacher_hidden.device
        return MicroBatch(
            features=torch.cat([queries.features, context.features]),
            next_ids=torch.cat([queries.next_ids, context.next_ids]).to(device),
            positions=torch.cat([queries.positions, context.positions]).to(device),
            documents=torch.cat([queries.documents, context.documents]).to(device),
            step_ids=step_ids.to(device),
            teacher_hidden=_padded(teacher_hidden, multiple),
            student_rows=(student_rows * valid).to(device),
            valid=valid.to(device),
            num_queries=offset,
            longest=max(piece.first + piece.count for piece in slices),
        )

    def attention_mask(self, window: int) -> Tensor:
        """Which keys each query sees `[Q, S]`: its document, itself and `window - 1` before it."""
        queries = self.step_ids.shape[1]
        distance = self.positions[:queries, None] - self.positions[None]
        same = self.documents[:queries, None] == self.documents[None]
        return same & (distance >= 0) & (distance < window)


class _Pairs:
    """Ranges of pairs end to end, padded with pairs of a document of their own."""

    def __init__(
        self, ranges: Sequence[tuple[_Part, int, int]], padding: int, multiple: int
    ) -> None:
        features = torch.cat([part.sample.features[start:end] for part, start, end in ranges])
        counts = torch.tensor([end - start for _, start, end in ranges])
        documents = torch.arange(len(ranges)).repeat_interleave(counts)
        positions = torch.cat([torch.arange(start, end) for _, start, end in ranges])
        next_ids = torch.cat([part.ids[start + 1 : end + 1] for part, start, end in ranges])
        self.features = _padded(features.detach(), multiple)
        self.documents = _padded(documents, multiple, padding)
        self.positions = _padded(positions, multiple)
        self.next_ids = _padded(next_ids, multiple)


def _padded(rows: Tensor, multiple: int, value: int = 0) -> Tensor:
    """`rows [R, ..]` with further rows of `value`, up to the next multiple."""
    missing = -len(rows) % multiple
    if not missing:
        return rows
    return torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), value)])


class _Part:
    """One slice's contribution; `student_rows` count from its own first column."""

    def __init__(self, piece: Slice, unroll: int, window: int) -> None:
        first, end = piece.first, piece.first + piece.count
        last = len(piece.sample.ids) - 1
        self.sample = piece.sample
        self.num_queries = piece.count
        self.queries = (first, end)
        self.context = (max(0, first - window + 1), first)
        self.ids = piece.sample.ids.cpu()
        steps = torch.arange(unroll)[:, None]
        self.step_ids = self.ids[(torch.arange(first, end) + 1 + steps).clamp(max=last)]
        # Teachers are tokens first+1 to end+unroll-1, as far as a token follows them.
        teachers = torch.arange(first + 1, min(end + unroll, last))
        self.teacher_hidden = piece.sample.hidden[first + 1 : min(end + unroll, last)].detach()
        self.student_rows = teachers - 1 - steps - first
        self.valid = (self.student_rows >= 0) & (self.student_rows < piece.count)
