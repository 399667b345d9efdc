"""The drafter's loss: how far its next-token distribution is from the target's.

Teacher p = softmax over the draft vocabulary of the target's logits / T; student q = softmax of the
draft logits / T, with T the temperature of the rollouts. Two distances, and their mix:

    kl     = sum p log(p / q)           robust when q is far off
    tv     = 1/2 sum |p - q|            1 - tv is the chance that a draft drawn from q is accepted
    hybrid = kl + tv_weight * tv

The gradient with respect to the logits is written over the logits, chunk by chunk, while the chunk
is in cache; float32 rows of the vocabulary exist for one chunk only.

Shape letters: R rows, K unroll steps, U teacher rows, D width, Vd draft vocabulary.
Source: KL/TV hybrid after LK losses (arXiv 2602.23881); the fusion is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

LossKind = Literal["kl", "tv", "hybrid"]

# Columns of the statistics that `HeadLoss` sums per unroll step.
ROWS, KL, TV, TOP1_ROWS, TOP1_AGREED = range(5)


class LossShape(NamedTuple):
    """Weights of the two distances and the temperature both distributions are taken at."""

    kl_weight: float
    tv_weight: float
    temperature: float

    @staticmethod
    def of(kind: LossKind, tv_weight: float, temperature: float) -> LossShape:
        """The weights of `kind`; `tv_weight` is read for `"hybrid"` alone."""
        kl, tv = {"kl": (1.0, 0.0), "tv": (0.0, 1.0), "hybrid": (1.0, tv_weight)}[kind]
        return LossShape(kl, tv, temperature)


class HeadLoss:
    """The loss of one kind, with working memory that calls share.

    Fresh memory of this size costs more (page faults) than the arithmetic in it, so logits and
    their gradients live in buffers that grow to what was needed and stay.
    """

    def __init__(self, shape: LossShape, chunk_rows: int | None = None) -> None:
        self.shape = shape
        self._chunk_rows = chunk_rows
        self._teacher = _Rows()
        self._gradients = _Rows()

    @torch.no_grad()
    def __call__(
        self,
        student: Tensor,
        head: Tensor,
        teacher_hidden: Tensor,
        teacher_head: Tensor,
        teacher_rows: Tensor,
        weights: Tensor,
        step_rows: Sequence[int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted sum of the loss over rows, and its gradient by the logits.

        Shapes: student `[R, D]` (inputs of the draft head, first those of unroll step 0, then of
        step 1, ...: `step_rows` of each), head `[Vd, D]`, teacher_hidden `[U, Dt]`, teacher_head
        `[Vd, Dt]` (the target's head rows of the draft vocabulary), teacher_rows `[R]` index U,
        weights `[R]`, 0 for rows that do not count. Returns the loss (scalar), statistics `[K, 5]`
        and the gradient `[R, Vd]` in the dtype of `student`, valid until `clear`. The statistics
        cover the rows with weight: their number, the sums of kl and tv, and for the first chunk of
        each step alone (an argmax costs as much as the rest) their number and how many top-1 agree.

        Cost: two products over the draft vocabulary; no host-device sync.
        """
        self._teacher.clear()
        teacher = self._teacher.take(len(teacher_hidden), head)
        torch.mm(teacher_hidden, teacher_head.t(), out=teacher)
        logits = self._gradients.take(len(student), head)
        torch.mm(student, head.t(), out=logits)
        chunk_rows = self._chunk_rows or (16 if student.device.type == "cpu" else 1024)
        wide = torch.promote_types(logits.dtype, torch.float32)
        work = _Work(self.shape, teacher, min(chunk_rows, len(student)), wide)
        weights = weights.to(wide)
        loss = weights.new_zeros(())
        stats, start = [], 0
        for rows in step_rows:
            part = slice(start, start + rows)
            distances, agreed = work.run(logits[part], teacher_rows[part], weights[part])
            kl, tv = distances.unbind(-1)
            counted = (weights[part] > 0).to(wide)
            loss += (weights[part] * (self.shape.kl_weight * kl + self.shape.tv_weight * tv)).sum()
            seen = counted[: len(agreed)]
            columns = (counted, counted * kl, counted * tv, seen, seen * agreed)
            stats.append(torch.stack([column.sum() for column in columns]))
            start += rows
        return loss, torch.stack(stats), logits

    def gradients(self) -> Tensor:
        """The gradients of all calls since `clear`, end to end, `[R, Vd]`."""
        return self._gradients.taken()

    def clear(self) -> None:
        """Forget the gradients; their memory is used again."""
        self._gradients.clear()


class _Rows:
    """Rows `[R, Vd]` handed out one block after another from one buffer that grows."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, 0)
        self._used = 0

    def take(self, rows: int, head: Tensor) -> Tensor:
        """The next `rows` rows, uninitialised, as wide as `head [Vd, D]` is long."""
        end = self._used + rows
        if len(self._buffer) < end:
            grown = head.new_empty(max(end, 2 * len(self._buffer)), len(head))
            if self._used:
                grown[: self._used] = self._buffer[: self._used]
            self._buffer = grown
        self._used = end
        return self._buffer[end - rows : end]

    def taken(self) -> Tensor:
        return self._buffer[: self._used]

    def clear(self) -> None:
        self._used = 0


class _Work:
    """Scratch for one chunk of rows, `[5, chunk, Vd]`, and what all chunks share."""

    def __init__(
        self, shape: LossShape, teacher: Tensor, chunk_rows: int, wide: torch.dtype
    ) -> None:
        self._shape = shape
        self._teacher = teacher
        self._chunk_rows = chunk_rows
        self._scratch = teacher.new_empty((5, chunk_rows, teacher.shape[1]), dtype=wide)

    def run(self, logits: Tensor, teacher_rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Replace `logits [R, Vd]` by their gradient.

        Returns kl and tv of each row `[R, 2]` and whether top-1 agrees for the first chunk.
        """
        shape, chunk_rows = self._shape, self._chunk_rows
        scale = (weights / shape.temperature)[:, None]
        distances = weights.new_zeros(len(logits), 2)
        agreed = weights.new_zeros(0, dtype=torch.bool)
        for start in range(0, len(logits), chunk_rows):
            part = slice(start, start + chunk_rows)
            target, p, z, q, spare = self._scratch[:, : len(logits[part])]
            _load(self._teacher[teacher_rows[part]], shape.temperature, target, p)
            _load(logits[part], shape.temperature, z, q)
            if start == 0:
                agreed = z.argmax(-1) == target.argmax(-1)
            log_normalisers = _log_normaliser(z, q) - _log_normaliser(target, p)
            torch.sub(target, z, out=z)
            distances[part, 0] = torch.mul(p, z, out=z).sum(-1) + log_normalisers
            distances[part, 1] = _gradient_into(z, p, q, spare, shape)
            torch.mul(z, scale[part], out=logits[part])
        return distances, agreed


def _load(logits: Tensor, temperature: float, scores: Tensor, probabilities: Tensor) -> None:
    """Fill `scores` with logits / T and `probabilities` with their softmax."""
    scores.copy_(logits)
    if temperature != 1:
        scores.div_(temperature)
    torch.softmax(scores, -1, out=probabilities)


def _log_normaliser(scores: Tensor, probabilities: Tensor) -> Tensor:
    """Log of the softmax's denominator, from the largest entry: no second exponential."""
    return scores.amax(-1) - probabilities.amax(-1).log()


def _gradient_into(out: Tensor, p: Tensor, q: Tensor, spare: Tensor, shape: LossShape) -> Tensor:
    """Write d(loss)/d(logits / T) to `out`; return tv per row.

    tv is the sum of q - p over the tokens where q > p, so its gradient by the logit of v is
    q(v) * ([q(v) > p(v)] - c) with c the mass of q over those tokens.
    """
    torch.sub(q, p, out=out)
    tv = torch.clamp(out, min=0, out=spare).sum(-1)
    if shape.kl_weight != 1:
        out.mul_(shape.kl_weight)
    if shape.tv_weight != 0:
        torch.gt(q, p, out=spare).mul_(q)
        mass = spare.sum(-1, keepdim=True)
        out.add_(spare, alpha=shape.tv_weight)
        out.addcmul_(q, mass, value=-shape.tv_weight)
    return tv
