"""Log-probabilities of given tokens against the naive computation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ratoon.records import SamplingParams
from ratoon.sampling.keyed_noise import row_keys
from ratoon.sampling.select import Selector
from ratoon.training.logprobs import token_log_probs, token_log_probs_and_entropies


def _naive(hidden: Tensor, head: Tensor, ids: Tensor, temperature: float, limit: int) -> Tensor:
    scores = (hidden @ head.t())[:, :limit] / temperature
    return torch.log_softmax(scores, dim=-1).gather(1, ids[:, None])[:, 0]


@pytest.mark.parametrize("with_main_grad", [False, True])
@pytest.mark.parametrize(("temperature", "limit"), [(1.0, None), (0.7, 290)])
def test_value_and_gradients_equal_the_naive_ones(
    temperature: float, limit: int | None, with_main_grad: bool
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(19, 24, dtype=torch.float64, requires_grad=True)
    head = torch.randn(300, 24, dtype=torch.float64, requires_grad=True)
    ids, weights = torch.randint(0, 290, (19,)), torch.randn(19, dtype=torch.float64)
    naive = _naive(hidden, head, ids, temperature, limit or 300)
    expected = torch.autograd.grad(naive @ weights, (hidden, head))
    if with_main_grad:
        head.main_grad = torch.zeros_like(head)  # type: ignore[attr-defined]
    values = token_log_probs(hidden, head, ids, temperature=temperature, vocab_limit=limit)
    (values @ weights).backward()
    torch.testing.assert_close(values, naive, rtol=0, atol=1e-12)
    torch.testing.assert_close(hidden.grad, expected[0], rtol=0, atol=1e-12)
    head_grad = head.main_grad if with_main_grad else head.grad  # type: ignore[attr-defined]
    torch.testing.assert_close(head_grad, expected[1], rtol=0, atol=1e-12)
    with torch.no_grad():
        again = token_log_probs(hidden, head, ids, temperature=temperature, vocab_limit=limit)
    assert torch.equal(again, values)


@pytest.mark.parametrize("with_main_grad", [False, True])
@pytest.mark.parametrize(("temperature", "limit"), [(1.0, None), (0.7, 290)])
def test_entropies_and_their_gradients_equal_the_naive_ones(
    temperature: float, limit: int | None, with_main_grad: bool
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(19, 24, dtype=torch.float64, requires_grad=True)
    head = torch.randn(300, 24, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 290, (19,))
    weights = torch.randn(2, 19, dtype=torch.float64)
    scores = (hidden @ head.t())[:, : limit or 300] / temperature
    entropies = torch.distributions.Categorical(logits=scores).entropy()
    naive = _naive(hidden, head, ids, temperature, limit or 300)
    expected = torch.autograd.grad(naive @ weights[0] + entropies @ weights[1], (hidden, head))
    if with_main_grad:
        head.main_grad = torch.zeros_like(head)  # type: ignore[attr-defined]
    both = token_log_probs_and_entropies(
        hidden, head, ids, temperature=temperature, vocab_limit=limit
    )
    (both[0] @ weights[0] + both[1] @ weights[1]).backward()
    torch.testing.assert_close(both[1], entropies, rtol=0, atol=1e-12)
    torch.testing.assert_close(hidden.grad, expected[0], rtol=0, atol=1e-12)
    head_grad = head.main_grad if with_main_grad else head.grad  # type: ignore[attr-defined]
    torch.testing.assert_close(head_grad, expected[1], rtol=0, atol=1e-12)
    alone = token_log_probs(hidden, head, ids, temperature=temperature, vocab_limit=limit)
    assert torch.equal(both[0], alone)


def test_the_entropy_of_a_certain_distribution_is_zero_and_pushes_nowhere() -> None:
    hidden = torch.tensor([[900.0, 0.0]], requires_grad=True)
    head = torch.tensor([[1.0, 0.0], [-1.0, 1.0], [0.0, 1.0]])
    _, entropies = token_log_probs_and_entropies(hidden, head, torch.tensor([0]))
    entropies.sum().backward()
    assert entropies.item() == 0.0
    assert torch.equal(hidden.grad, torch.zeros(1, 2))  # type: ignore[arg-type]


def test_a_nearly_certain_token_keeps_its_gradient_in_bfloat16() -> None:
    hidden = torch.tensor([[8.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    head = torch.tensor([[1.0, 1.0], [0.0, -1.0], [0.0, 0.5]], dtype=torch.bfloat16)
    token_log_probs(hidden, head, torch.tensor([0])).sum().backward()
    exact = hidden.detach().double().requires_grad_()
    _naive(exact, head.double(), torch.tensor([0]), 1.0, 3).sum().backward()
    # 1 - p is 7e-4 here, below the rounding of a bf16 number near 1.
    torch.testing.assert_close(hidden.grad.double(), exact.grad, rtol=0.02, atol=1e-6)  # type: ignore[union-attr]


@pytest.mark.parametrize(("temperature", "limit"), [(1.0, None), (0.7, 500)])
def test_bits_are_those_of_selection(temperature: float, limit: int | None) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(5, 16), torch.randn(512, 16)
    selector = Selector(512, limit)
    keys = row_keys(torch.arange(10).view(5, 2), torch.arange(5))
    ids, expected = selector.select(hidden @ head.t(), keys, SamplingParams(temperature))
    values = token_log_probs(hidden, head, ids, temperature=temperature, vocab_limit=limit)
    assert torch.equal(values, expected)
