"""The drafter's loss: how far its next-token distribution is from the target's.

Teacher p = softmax over the draft vocabulary of the target's logits / T; student q = softmax of the
draft logits / T, with T the temperature of the rollouts. Two distances, and their mix:

    kl     = sum p log(p / q)           robust when q is far off
    tv     = 1/2 sum |p - q|            1 - tv is the chance that a draft drawn from q is accepted
    hybrid = kl + tv_weight * tv

The gradient with respect to the logits is written over the logits, chunk by chunk, while the chunk
is in cache; float32 rows of the vocabulary exist for one chunk only.

Shape letters: K unroll steps, U teacher rows, D width, Vd draft vocabulary.
Source: KL/TV hybrid after LK losses (arXiv 2602.23881); the fusion is ours.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

LossKind = Literal["kl", "tv", "hybrid"]

# Columns of the statistics that `head_loss` sums per unroll step.
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


def head_loss(
    student: Tensor,
    head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    weights: Tensor,
    shape: LossShape,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum of the loss over unroll steps and rows, and its gradient by the logits.

    Shapes: student `[K, U, D]` (inputs of the draft head), head `[Vd, D]`, teacher_hidden
    `[U, Dt]`, teacher_head `[Vd, Dt]` (the target's head rows of the draft vocabulary), weights
    `[K, U]`, 0 for rows without a student. Returns the loss (scalar), statistics `[K, 5]` and the
    gradient `[K, U, Vd]` in the dtype of `student`. The statistics cover the rows with weight:
    their number, the sums of kl and tv, and for the first chunk of rows alone (an argmax costs as
    much as the rest) their number and how many top-1 agree.

    Cost: logits `[(K+1)*U, Vd]` in the dtype of `student`; no host-device sync.
    """
    if chunk_rows is None:
        chunk_rows = 16 if student.device.type == "cpu" else 1024
    with torch.no_grad():
        teacher = F.linear(teacher_hidden, teacher_head)
        logits = F.linear(student.flatten(0, 1), head).view(*student.shape[:2], -1)
        loss, stats = _loss_into_gradient(logits, teacher, weights, shape, chunk_rows)
    return loss, stats, logits


def _loss_into_gradient(
    logits: Tensor, teacher: Tensor, weights: Tensor, shape: LossShape, chunk_rows: int
) -> tuple[Tensor, Tensor]:
    """Replace `logits [K, U, Vd]` by their gradient; return the loss and the statistics."""
    steps, rows, vocabulary = logits.shape
    wide = torch.promote_types(logits.dtype, torch.float32)
    distances = torch.zeros(steps, rows, 2, dtype=wide, device=logits.device)
    agreed = torch.zeros(steps, rows, dtype=torch.bool, device=logits.device)
    # One scratch for all chunks: fresh memory costs more (page faults) than the arithmetic.
    scratch = torch.empty(5, min(chunk_rows, rows), vocabulary, dtype=wide, device=logits.device)
    scale = (weights / shape.temperature).to(wide)[..., None]
    for start in range(0, rows, chunk_rows):
        part = slice(start, start + chunk_rows)
        target, p, z, q, sign = scratch[:, : min(chunk_rows, rows - start)]
        _load(teacher[part], shape.temperature, target, p)
        target_lse = _log_normaliser(target, p)
        best = target.argmax(-1) if start == 0 else None
        for step in range(steps):
            _load(logits[step, part], shape.temperature, z, q)
            if best is not None:
                agreed[step, part] = z.argmax(-1) == best
            lse = _log_normaliser(z, q) - target_lse
            torch.sub(target, z, out=z)
            distances[step, part, 0] = _row_dots(p, z) + lse
            distances[step, part, 1] = _gradient_into(z, p, q, sign, shape)
            torch.mul(z, scale[step, part], out=logits[step, part])
    counted = (weights > 0).to(wide)
    kl, tv = distances.unbind(-1)
    loss = (weights.to(wide) * (shape.kl_weight * kl + shape.tv_weight * tv)).sum()
    seen = counted.clone()
    seen[:, chunk_rows:] = 0
    columns = (counted, counted * kl, counted * tv, seen, seen * agreed)
    return loss, torch.stack([column.sum(-1) for column in columns], dim=-1)


def _load(logits: Tensor, temperature: float, scores: Tensor, probabilities: Tensor) -> None:
    """Fill `scores` with logits / T and `probabilities` with their softmax."""
    scores.copy_(logits)
    if temperature != 1:
        scores.div_(temperature)
    torch.softmax(scores, -1, out=probabilities)


def _row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Dot products `[rows]` of the rows of two matrices."""
    return cast(Tensor, torch.linalg.vecdot(a, b))


def _log_normaliser(scores: Tensor, probabilities: Tensor) -> Tensor:
    """Log of the softmax's denominator, from the largest entry: no second exponential."""
    return scores.amax(-1) - probabilities.amax(-1).log()


def _gradient_into(out: Tensor, p: Tensor, q: Tensor, sign: Tensor, shape: LossShape) -> Tensor:
    """Write d(loss)/d(logits / T) to `out`, using `sign` as scratch; return tv per row."""
    torch.sub(q, p, out=out)
    torch.sign(out, out=sign)
    tv = _row_dots(out, sign) / 2
    if shape.kl_weight != 1:
        out.mul_(shape.kl_weight)
    if shape.tv_weight != 0:
        sign.sub_(_row_dots(q, sign)[:, None])
        out.addcmul_(q, sign, value=shape.tv_weight / 2)
    return tv
