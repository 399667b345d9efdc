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
        chunk_rows = self._chunk_rows or (8 if student.device.type == "cpu" else 1024)
        wide = torch.promote_types(logits.dtype, torch.float32)
        work = _Work(self.shape, teacher, min(chunk_rows, len(student)), wide)
        weights = weights.to(wide)
        loss = weights.new_zeros(())
        stats, start = [], 0
        for rows in step_rows:
            part = slice(start, start + rows)
            distances, agreed = work.run(logits[part], teacher_rows[part], weights[part])
            kl, tv = distances
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
    """Scratch for one chunk of rows, `[chunk, Vd]` each, and what all chunks share."""

    def __init__(
        self, shape: LossShape, teacher: Tensor, chunk_rows: int, wide: torch.dtype
    ) -> None:
        self._shape = shape
        self._teacher = teacher
        self._chunk_rows = chunk_rows
        self._narrow = teacher.new_empty((chunk_rows, teacher.shape[1]))
        self._wide = teacher.new_empty((4, chunk_rows, teacher.shape[1]), dtype=wide)

    def run(self, logits: Tensor, teacher_rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Replace `logits [R, Vd]` by their gradient.

        Returns kl and tv of each row `[2, R]` and whether top-1 agrees for the first chunk.
        """
        first = slice(self._chunk_rows)
        agreed = logits[first].argmax(-1) == self._teacher[teacher_rows[first]].argmax(-1)
        distances = weights.new_empty(2, len(logits))
        scale = (weights / -self._shape.temperature)[:, None]
        rows = (logits, teacher_rows, scale, *distances)
        for chunk in zip(*(values.split(self._chunk_rows) for values in rows), strict=True):
            self._chunk(*chunk)
        return distances, agreed

    def _chunk(
        self, logits: Tensor, teacher_rows: Tensor, scale: Tensor, kl: Tensor, tv: Tensor
    ) -> None:
        """Fill `kl` and `tv`; write `-scale` times the loss's gradient over the logits.

        tv is the sum of q - p over the tokens where q > p, so its gradient by the logit of v is
        q(v) * ([q(v) > p(v)] - c) with c the mass of q over those tokens.
        """
        shape, count = self._shape, len(logits)
        narrow = self._narrow[:count]
        target, p, z, q = self._wide[:, :count]
        torch.index_select(self._teacher, 0, teacher_rows, out=narrow)
        p_sum = _softmax(narrow, shape.temperature, target, p)
        q_sum = _softmax(logits, shape.temperature, z, q)
        torch.linalg.vecdot(p, target.sub_(z), out=kl)
        kl.add_((q_sum / p_sum).log_())
        is_above = torch.gt(q, p, out=z)
        mass = torch.linalg.vecdot(q, is_above)
        torch.sub(mass, torch.linalg.vecdot(p, is_above), out=tv)
        least = mass.mul_(-shape.tv_weight).add_(shape.kl_weight)[:, None]
        factor = torch.add(least, is_above, alpha=shape.tv_weight, out=target)
        if shape.kl_weight != 1:
            p.mul_(shape.kl_weight)
        torch.mul(torch.addcmul(p, q, factor, value=-1, out=z), scale, out=logits)


def _softmax(logits: Tensor, temperature: float, scores: Tensor, probabilities: Tensor) -> Tensor:
    """Fill `scores` with logits / T less their maximum and `probabilities` with their softmax.

    Returns its denominators `[R]`. In fewer passes than `torch.softmax`, which would not tell them.
    """
    scores.copy_(logits)
    scores.sub_(scores.amax(-1, keepdim=True))
    if temperature != 1:
        scores.div_(temperature)
    total = torch.exp(scores, out=probabilities).sum(-1)
    probabilities.mul_(total.reciprocal()[:, None])
    return total
