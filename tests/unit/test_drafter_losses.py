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

STEPS, ROWS_, WIDTH, VOCABULARY = 3, 11, 8, 29


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    weights = 0.8 ** torch.arange(STEPS, dtype=torch.float64)[:, None].repeat(1, ROWS_)
    weights[1, 3] = weights[2, :2] = 0
    return (
        draw(STEPS, ROWS_, WIDTH),
        draw(VOCABULARY, WIDTH),
        draw(ROWS_, WIDTH),
        draw(VOCABULARY, WIDTH),
        weights,
    )


def plain_loss(
    student: Tensor, head: Tensor, hidden: Tensor, rows: Tensor, weights: Tensor, shape: LossShape
) -> tuple[Tensor, Tensor, Tensor]:
    p = (hidden @ rows.T / shape.temperature).softmax(-1)
    q = (student @ head.T / shape.temperature).softmax(-1)
    kl = (p * (p.log() - q.log())).sum(-1)
    tv = (p - q).abs().sum(-1) / 2
    return (weights * (shape.kl_weight * kl + shape.tv_weight * tv)).sum(), kl, tv


@pytest.mark.parametrize("kind", ["kl", "tv", "hybrid"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_rows", [1, 4, 64])
def test_fused_loss_and_gradient_equal_the_plain_formula(
    kind: LossKind, temperature: float, chunk_rows: int
) -> None:
    student, head, hidden, rows, weights = inputs()
    shape = LossShape.of(kind, 0.7, temperature)
    student.requires_grad_()
    head.requires_grad_()
    expected, kl, tv = plain_loss(student, head, hidden, rows, weights, shape)
    expected.backward()
    fused = HeadLoss(shape, chunk_rows)
    fused(student.detach(), head.detach(), hidden, rows, weights)
    loss, stats, gradient = fused(student.detach(), head.detach(), hidden, rows, weights)
    assert torch.equal(fused.gradients(), gradient.flatten(0, 1).repeat(2, 1))
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient @ head.detach(), student.grad, rtol=1e-9, atol=1e-13)
    head_gradient = gradient.flatten(0, 1).T @ student.detach().flatten(0, 1)
    torch.testing.assert_close(head_gradient, head.grad, rtol=1e-9, atol=1e-13)
    counted = weights > 0
    torch.testing.assert_close(stats[:, ROWS], counted.sum(-1).double())
    torch.testing.assert_close(stats[:, KL], (counted * kl).sum(-1).detach())
    torch.testing.assert_close(stats[:, TV], (counted * tv).sum(-1).detach())
    agree = (student @ head.T).argmax(-1) == (hidden @ rows.T).argmax(-1)
    seen = counted.clone()
    seen[:, chunk_rows:] = False
    assert stats[:, TOP1_ROWS].tolist() == seen.sum(-1).tolist()
    assert stats[:, TOP1_AGREED].tolist() == (agree & seen).sum(-1).tolist()


def test_bfloat16_gradient_is_as_close_as_its_rounding_allows() -> None:
    exact = inputs()
    rounded = inputs(torch.bfloat16)
    shape = LossShape.of("hybrid", 1.0, 1.0)
    loss, _, gradient = HeadLoss(shape)(*exact)
    loss16, _, gradient16 = HeadLoss(shape)(*rounded)
    assert gradient16.dtype == torch.bfloat16
    torch.testing.assert_close(loss16.double(), loss, rtol=2e-2, atol=0)
    # Where p and q nearly meet, rounding turns the sign that tv's gradient follows.
    assert float((gradient16 - gradient).norm() / gradient.norm()) < 0.05


def test_a_drafter_equal_to_its_teacher_has_no_loss_and_no_gradient() -> None:
    _, head, hidden, _, _ = inputs()
    student, weights = hidden[None], torch.ones(1, ROWS_, dtype=torch.float64)
    shape = LossShape.of("hybrid", 1.0, 1.0)
    loss, stats, gradient = HeadLoss(shape, ROWS_)(student, head, hidden, head, weights)
    assert float(loss) == pytest.approx(0, abs=1e-12)
    assert float(gradient.abs().max()) < 1e-12
    assert stats[0, TOP1_AGREED] == stats[0, TOP1_ROWS] == ROWS_


def test_distributions_without_common_support_have_tv_one_and_finite_gradient() -> None:
    hidden = torch.tensor([[200.0, -200.0]])
    head = torch.eye(2)
    shape = LossShape.of("hybrid", 1.0, 1.0)
    weights = torch.ones(1, 1)
    loss, stats, gradient = HeadLoss(shape)(-hidden[None], head, hidden, head, weights)
    assert float(stats[0, TV]) == pytest.approx(1)
    assert float(stats[0, KL]) == pytest.approx(400)
    assert bool(loss.isfinite())
    assert bool(gradient.isfinite().all())


def test_rows_without_weight_give_no_gradient() -> None:
    student, head, hidden, rows, weights = inputs()
    loss = HeadLoss(LossShape.of("hybrid", 1.0, 1.0))
    _, _, gradient = loss(student, head, hidden, rows, weights)
    zero = gradient.abs().sum(-1) == 0
    assert torch.equal(zero, weights == 0)
