"""Slices of samples laid end to end, ready for the unrolled forward.

Pair t of a document joins the target's features of token t with the embedding of token t+1, at
position t, and predicts token t+2. At unroll step i the column of pair t feeds its own last output
with the embedding of token t+1+i, at position t+i, and predicts token t+2+i, whose teacher is the
target's hidden state of token t+1+i.

Shape letters: S pairs that serve as keys (queries and their context), Q query columns, K unroll
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
    """The tensors of one micro-step. The first Q of the S pairs are the queries.

    Shapes: features `[S, 3D]`; next_ids, positions, documents `[S]` int64; step_ids `[K, Q]` are
    the ids embedded at each unroll step; teacher_hidden `[U, D]`; student_rows `[K, U]` index Q
    (0 where there is none); valid `[K, U]` bool; longest is the largest position plus one.
    """

    features: Tensor
    next_ids: Tensor
    positions: Tensor
    documents: Tensor
    step_ids: Tensor
    teacher_hidden: Tensor
    student_rows: Tensor
    valid: Tensor
    longest: int

    @staticmethod
    def build(slices: Sequence[Slice], unroll: int, window: int) -> MicroBatch:
        """Lay slices end to end, then up to `window - 1` pairs of context for each of them.

        A column is trained at step i only if the token it predicts exists in the response; a
        column past its document's end computes on a repeated token and has no weight.
        """
        parts = [_Part(piece, unroll, window) for piece in slices]
        ranges = [(*part.queries, number) for number, part in enumerate(parts)]
        ranges += [(*part.context, number) for number, part in enumerate(parts)]
        students, offset = [], 0
        for part in parts:
            students.append(part.student_rows + offset)
            offset += part.num_queries
        valid = torch.cat([part.valid for part in parts], dim=1)
        samples = [piece.sample for piece in slices]
        device = samples[0].features.device
        counts = torch.tensor([end - start for start, end, _ in ranges])
        documents = torch.tensor([number for _, _, number in ranges])
        return MicroBatch(
            features=torch.cat(
                [samples[i].features[start:end] for start, end, i in ranges]
            ).detach(),
            next_ids=torch.cat([parts[i].ids[start + 1 : end + 1] for start, end, i in ranges]).to(
                device
            ),
            positions=torch.cat([torch.arange(start, end) for start, end, _ in ranges]).to(device),
            documents=documents.repeat_interleave(counts).to(device),
            step_ids=torch.cat([part.step_ids for part in parts], dim=1).to(device),
            teacher_hidden=torch.cat([part.teacher_hidden for part in parts]).detach(),
            student_rows=(torch.cat(students, dim=1) * valid).to(device),
            valid=valid.to(device),
            longest=max(end for _, end, _ in ranges),
        )

    @property
    def num_queries(self) -> int:
        """Columns trained on, Q."""
        return self.step_ids.shape[1]

    def attention_mask(self, window: int) -> Tensor:
        """Which keys each query sees `[Q, S]`: its document, itself and `window - 1` before it."""
        queries = self.num_queries
        distance = self.positions[:queries, None] - self.positions[None]
        same = self.documents[:queries, None] == self.documents[None]
        return same & (distance >= 0) & (distance < window)


class _Part:
    """One slice's contribution; `student_rows` count from its own first column."""

    def __init__(self, piece: Slice, unroll: int, window: int) -> None:
        first, end = piece.first, piece.first + piece.count
        last = len(piece.sample.ids) - 1
        self.num_queries = piece.count
        self.queries = (first, end)
        self.context = (max(0, first - window + 1), first)
        self.ids = piece.sample.ids.cpu()
        steps = torch.arange(unroll)[:, None]
        self.step_ids = self.ids[(torch.arange(first, end) + 1 + steps).clamp(max=last)]
        # Teachers are tokens first+1 to end+unroll-1, as far as a token follows them.
        teachers = torch.arange(first + 1, min(end + unroll, last))
        self.teacher_hidden = piece.sample.hidden[first + 1 : min(end + unroll, last)]
        self.student_rows = teachers - 1 - steps - first
        self.valid = (self.student_rows >= 0) & (self.student_rows < piece.count)
