"""The fused head loss against the plain formula, in value and gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ratoon.drafter.losses import (
    KL,
    ROWS,
    TOP1_AGREED,
    TOP1_ROWS,
    TV,
    HeadLoss,
    LossKind,
    LossShape,
)

STEP_ROWS, TEACHERS, WIDTH, VOCABULARY = (11, 5, 5), 13, 8, 29
COUNT = sum(STEP_ROWS)
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs(dtype: torch.dtype = torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    weights = torch.repeat_interleave(torch.tensor([1.0, 1.6, 1.28]), torch.tensor(STEP_ROWS))
    weights[[3, 12, 16, 20]] = 0
    return (
        draw(COUNT, WIDTH),
        draw(VOCABULARY, WIDTH),
        draw(TEACHERS, WIDTH),
        draw(VOCABULARY, WIDTH),
        torch.randint(0, TEACHERS, (COUNT,), generator=generator),
        weights.double(),
    )


def plain_loss(values: Inputs, shape: LossShape) -> tuple[Tensor, Tensor, Tensor]:
    student, head, hidden, teacher_head, rows, weights = values
    p = (hidden[rows] @ teacher_head.T / shape.temperature).softmax(-1)
    q = (student @ head.T / shape.temperature).softmax(-1)
    kl = (p * (p.log() - q.log())).sum(-1)
    tv = (p - q).abs().sum(-1) / 2
    return (weights * (shape.kl_weight * kl + shape.tv_weight * tv)).sum(), kl, tv


def by_step(values: Tensor) -> list[float]:
    return [float(part.detach().sum()) for part in values.split(STEP_ROWS)]


@pytest.mark.parametrize("kind", ["kl", "tv", "hybrid"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_rows", [1, 4, 64])
def test_fused_loss_and_gradient_equal_the_plain_formula(
    kind: LossKind, temperature: float, chunk_rows: int
) -> None:
    values = inputs()
    student, head, hidden, teacher_head, rows, weights = values
    shape = LossShape.of(kind, 0.7, temperature)
    student.requires_grad_()
    head.requires_grad_()
    expected, kl, tv = plain_loss(values, shape)
    expected.backward()
    fused = HeadLoss(shape, chunk_rows)
    detached = tuple(value.detach() for value in values)
    fused(*detached, STEP_ROWS)
    loss, stats, gradient = fused(*detached, STEP_ROWS)
    assert torch.equal(fused.gradients(), gradient.repeat(2, 1))
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient @ head.detach(), student.grad, rtol=1e-9, atol=1e-13)
    head_gradient = gradient.T @ student.detach()
    torch.testing.assert_close(head_gradient, head.grad, rtol=1e-9, atol=1e-13)
    counted = weights > 0
    assert stats[:, ROWS].tolist() == by_step(counted)
    assert stats[:, KL].tolist() == pytest.approx(by_step(counted * kl), rel=1e-9)
    assert stats[:, TV].tolist() == pytest.approx(by_step(counted * tv), rel=1e-9)
    agree = (student @ head.T).argmax(-1) == (hidden @ teacher_head.T).argmax(-1)[rows]
    seen = torch.cat([part[:chunk_rows] for part in counted.split(STEP_ROWS)])
    agreed = torch.cat([part[:chunk_rows] for part in (agree & counted).split(STEP_ROWS)])
    assert int(stats[:, TOP1_ROWS].sum()) == int(seen.sum())
    assert int(stats[:, TOP1_AGREED].sum()) == int(agreed.sum())


def test_bfloat16_gradient_is_as_close_as_its_rounding_allows() -> None:
    exact = inputs()
    rounded = inputs(torch.bfloat16)
    shape = LossShape.of("hybrid", 1.0, 1.0)
    loss, _, gradient = HeadLoss(shape)(*exact, STEP_ROWS)
    loss16, _, gradient16 = HeadLoss(shape)(*rounded, STEP_ROWS)
    assert gradient16.dtype == torch.bfloat16
    torch.testing.assert_close(loss16.double(), loss, rtol=2e-2, atol=0)
    # Where p and q nearly meet, rounding turns the sign that tv's gradient follows.
    assert float((gradient16 - gradient).norm() / gradient.norm()) < 0.05


def test_a_drafter_equal_to_its_teacher_has_no_loss_and_no_gradient() -> None:
    _, head, hidden, _, _, _ = inputs()
    rows, weights = torch.arange(TEACHERS), torch.ones(TEACHERS)
    fused = HeadLoss(LossShape.of("hybrid", 1.0, 1.0), TEACHERS)
    loss, stats, gradient = fused(hidden, head, hidden, head, rows, weights, [TEACHERS])
    assert float(loss) == pytest.approx(0, abs=1e-12)
    assert float(gradient.abs().max()) < 1e-12
    assert stats[0, TOP1_AGREED] == stats[0, TOP1_ROWS] == TEACHERS


def test_distributions_without_common_support_have_tv_one_and_finite_gradient() -> None:
    hidden, head = torch.tensor([[200.0, -200.0]]), torch.eye(2)
    fused = HeadLoss(LossShape.of("hybrid", 1.0, 1.0))
    row, weight = torch.zeros(1, dtype=torch.int64), torch.ones(1)
    loss, stats, gradient = fused(-hidden, head, hidden, head, row, weight, [1])
    assert float(stats[0, TV]) == pytest.approx(1)
    assert float(stats[0, KL]) == pytest.approx(400)
    assert bool(loss.isfinite())
    assert bool(gradient.isfinite().all())


def test_rows_without_weight_give_no_gradient() -> None:
    values = inputs()
    _, _, gradient = HeadLoss(LossShape.of("hybrid", 1.0, 1.0))(*values, STEP_ROWS)
    assert torch.equal(gradient.abs().sum(-1) == 0, values[-1] == 0)
