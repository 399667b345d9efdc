"""Slices of samples laid end to end, ready for the unrolled forward.

Pair t of a document joins the target's features of token t with the embedding of token t+1, at
position t, and predicts token t+2. At unroll step i the column of pair t feeds its own last output
with the embedding of token t+1+i, at position t+i, and predicts token t+2+i, whose teacher is the
target's hidden state of token t+1+i.

All columns take step 0; beyond it only every `stride`-th column goes on ("deep" columns, others in
the next pass), which makes depth cheap: a drafter never unrolled to a depth guesses badly there.

Shape letters: S pairs that serve as keys (queries, then their context), Q query columns, C deep
columns, K unroll steps, U teacher rows, R = Q + (K-1)*C head rows, D target width.
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

    Shapes: features `[S, 3D]`; next_ids, positions, documents `[S]` int64; deep_columns `[C]`
    index Q; deep_ids `[K-1, C]` are the ids embedded at steps 1 to K-1; teacher_hidden `[U, D]`;
    teacher_rows `[R]` index U and valid `[R]` bool, of the columns of step 0, step 1 and so on.
    `step_rows` are the K numbers of rows, `num_queries` counts the columns trained on (the rest of
    Q is padding), `longest` is the largest position plus one.
    """

    features: Tensor
    next_ids: Tensor
    positions: Tensor
    documents: Tensor
    deep_columns: Tensor
    deep_ids: Tensor
    teacher_hidden: Tensor
    teacher_rows: Tensor
    valid: Tensor
    step_rows: tuple[int, ...]
    stride: int
    num_queries: int
    longest: int

    @staticmethod
    def build(
        slices: Sequence[Slice], unroll: int, window: int, *, stride: int = 1, multiple: int = 1
    ) -> MicroBatch:
        """Lay slices end to end, then up to `window - 1` pairs of context for each of them.

        A column is trained at step i only if the token it predicts exists in the response; a
        column past its document's end computes on a repeated token and has no weight. Queries,
        contexts, deep columns and teacher rows are each padded to a `multiple`: kernels are
        prepared anew for each size of matrix, so few sizes are worth some idle rows.
        """
        parts = [_Part(piece, unroll, window, stride) for piece in slices]
        queries = _Pairs([(part, *part.queries) for part in parts], -1, multiple)
        context = _Pairs([(part, *part.context) for part in parts], -2, 4 * multiple)
        teacher_rows, valid, deep_columns = [], [], []
        columns = teachers = 0
        for part in parts:
            teacher_rows.append([rows + teachers for rows in part.teacher_rows])
            valid.append(part.valid)
            deep_columns.append(part.deep_columns + columns)
            columns += part.num_queries
            teachers += len(part.teacher_hidden)
        steps = [
            _padded(torch.cat([rows[step] for rows in teacher_rows]), multiple)
            for step in range(unroll)
        ]
        is_valid = torch.cat(
            [_padded(torch.cat([v[step] for v in valid]), multiple) for step in range(unroll)]
        )
        deep_ids = torch.cat([part.deep_ids for part in parts], dim=1)
        teacher_hidden = torch.cat([part.teacher_hidden for part in parts])
        device = teacher_hidden.device
        return MicroBatch(
            features=torch.cat([queries.features, context.features]),
            next_ids=torch.cat([queries.next_ids, context.next_ids]).to(device),
            positions=torch.cat([queries.positions, context.positions]).to(device),
            documents=torch.cat([queries.documents, context.documents]).to(device),
            deep_columns=_padded(torch.cat(deep_columns), multiple).to(device),
            deep_ids=_padded(deep_ids.t(), multiple).t().to(device),
            teacher_hidden=_padded(teacher_hidden, multiple),
            teacher_rows=(torch.cat(steps) * is_valid).to(device),
            valid=is_valid.to(device),
            step_rows=tuple(len(rows) for rows in steps),
            stride=stride,
            num_queries=columns,
            longest=max(piece.first + piece.count for piece in slices),
        )

    def row_weights(self, step_weights: Tensor) -> Tensor:
        """Weight of each head row `[R]`: its step's (`[K]`), times `stride` for deep columns.

        So the sum over the columns drawn is an unbiased estimate of the sum over all columns.
        """
        repeats = torch.tensor(self.step_rows, device=step_weights.device)
        weights = step_weights.clone()
        weights[1:] *= self.stride
        total = len(self.valid)
        return weights.repeat_interleave(repeats, output_size=total) * self.valid

    def attention_mask(self, window: int) -> Tensor:
        """Which keys each query sees `[Q, S]`: its document, itself and `window - 1` before it."""
        queries = self.step_rows[0]
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
    """One slice's contribution; rows and columns count from its own first ones."""

    def __init__(self, piece: Slice, unroll: int, window: int, stride: int) -> None:
        first, end = piece.first, piece.first + piece.count
        last = len(piece.sample.ids) - 1
        self.sample = piece.sample
        self.num_queries = piece.count
        self.queries = (first, end)
        self.context = (max(0, first - window + 1), first)
        self.ids = piece.sample.ids.cpu()
        pairs = torch.arange(first, end)
        deep = pairs[(pairs + piece.phase) % stride == 0]
        self.deep_columns = deep - first
        steps = torch.arange(1, unroll)[:, None]
        self.deep_ids = self.ids[(deep + 1 + steps).clamp(max=last)]
        # Teachers are tokens first+1 to end+unroll-1, as far as a token follows them.
        self.teacher_hidden = piece.sample.hidden[first + 1 : min(end + unroll, last)].detach()
        self.teacher_rows = [pairs - first, *(deep - first + steps)]
        self.valid = [rows < len(self.teacher_hidden) for rows in self.teacher_rows]
