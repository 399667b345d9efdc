"""Losses, divergences and reductions against formulas written out naively."""

from __future__ import annotations

import math
import random

import pytest
import torch

from ratoon.rl.kl import kl_divergence
from ratoon.rl.losses import clipped_surrogate, mismatch_weights
from ratoon.rl.reduction import response_means, response_weights, weighted_sum


def _random(seed: int, count: int = 200) -> tuple[list[float], list[float], list[float]]:
    source = random.Random(seed)
    old = [-source.expovariate(1.0) for _ in range(count)]
    new = [value + source.gauss(0.0, 0.4) for value in old]
    advantages = [source.choice([-1.5, -0.2, 0.0, 0.3, 2.0]) for _ in range(count)]
    return new, old, advantages


def test_clipped_surrogate_equals_the_formula_token_by_token() -> None:
    new, old, advantages = _random(0)
    logprobs = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    result = clipped_surrogate(
        logprobs - torch.tensor(old, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.28,
    )
    (gradient,) = torch.autograd.grad(result.losses.sum(), logprobs)
    for i, (lp, lp_old, advantage) in enumerate(zip(new, old, advantages, strict=True)):
        ratio = math.exp(lp - lp_old)
        bounded = min(max(ratio, 0.8), 1.28)
        assert result.losses[i].item() == pytest.approx(
            -min(ratio * advantage, bounded * advantage)
        )
        # The bound takes the gradient away where it is the smaller of the two.
        is_clipped = bounded * advantage < ratio * advantage
        assert bool(result.clipped_low[i]) == (is_clipped and ratio < 1)
        assert bool(result.clipped_high[i]) == (is_clipped and ratio > 1)
        expected = 0.0 if is_clipped else -ratio * advantage
        assert gradient[i].item() == pytest.approx(expected)
    assert result.clipped_low.any()
    assert result.clipped_high.any()


def test_equal_log_probabilities_give_ratio_one_and_the_plain_policy_gradient() -> None:
    logprobs = torch.tensor([-0.3, -7.0], requires_grad=True)
    advantages = torch.tensor([2.0, -1.0])
    log_ratios = logprobs - logprobs.detach()
    result = clipped_surrogate(log_ratios, advantages, clip_low=0.2, clip_high=0.2)
    (gradient,) = torch.autograd.grad(result.losses.sum(), logprobs)
    assert torch.equal(result.ratios, torch.ones(2))
    assert torch.equal(gradient, -advantages)


def test_means_over_responses_are_given_to_each_of_their_tokens() -> None:
    values = torch.tensor([1.0, 3.0, 5.0, 2.0, 4.0], dtype=torch.float64, requires_grad=True)
    means = response_means(values, [3, 2])
    assert means.tolist() == [3.0, 3.0, 3.0, 3.0, 3.0]
    (gradient,) = torch.autograd.grad(means @ torch.arange(5.0, dtype=torch.float64), values)
    torch.testing.assert_close(gradient, torch.tensor([1.0, 1.0, 1.0, 3.5, 3.5]).double())


def test_mismatch_weights_are_quotients_cut_at_the_cap_and_exactly_one_for_equal_bits() -> None:
    ours = torch.tensor([-0.1, -3.0, -1.0, -2.0], requires_grad=True)
    theirs = torch.tensor([-0.1, -2.5, -4.0, float("nan")])
    weights = mismatch_weights(ours, theirs, 2.0)
    assert weights[0] == 1.0
    assert weights[1].item() == pytest.approx(math.exp(-0.5))
    assert weights[2] == 2.0
    assert weights[3] == 1.0
    assert not weights.requires_grad


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_divergence_equals_the_formula_and_its_gradient_the_difference_quotient(
    estimator: str,
) -> None:
    new, reference, _ = _random(1)
    formula = {
        "k1": lambda d: d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: math.exp(-d) - 1 + d,
    }[estimator]
    logprobs = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    values = kl_divergence(logprobs, torch.tensor(reference, dtype=torch.float64), estimator)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(values.sum(), logprobs)
    step = 1e-6
    for i, (lp, lp_reference) in enumerate(zip(new, reference, strict=True)):
        d = lp - lp_reference
        assert values[i].item() == pytest.approx(formula(d), abs=1e-12)
        quotient = (formula(d + step) - formula(d - step)) / (2 * step)
        assert gradient[i].item() == pytest.approx(quotient, abs=1e-6)


def test_k3_is_never_negative_and_agrees_with_k1_in_expectation() -> None:
    torch.manual_seed(0)
    policy = torch.log_softmax(torch.randn(12, dtype=torch.float64), -1)
    reference = torch.log_softmax(torch.randn(12, dtype=torch.float64), -1)
    exact = (policy.exp() * (policy - reference)).sum()
    k1 = (policy.exp() * kl_divergence(policy, reference, "k1")).sum()
    values = kl_divergence(policy, reference, "k3")
    assert torch.all(values >= 0)
    torch.testing.assert_close(k1, exact)
    torch.testing.assert_close((policy.exp() * values).sum(), exact)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_weights_make_the_mean_they_are_named_after(reduction: str) -> None:
    source = random.Random(2)
    lengths = [3, 1, 7, 4]
    losses = [[source.gauss(0, 1) for _ in range(length)] for length in lengths]
    everything = [value for response in losses for value in response]
    expected = {
        "token_mean": sum(everything) / len(everything),
        "sequence_mean": sum(sum(r) / len(r) for r in losses) / len(losses),
        "constant": sum(sum(r) / 20 for r in losses) / len(losses),
    }[reduction]
    weights = response_weights(lengths, reduction, max_tokens=20)  # type: ignore[arg-type]
    total = sum(
        float(weighted_sum(torch.tensor(r).double(), torch.full((len(r),), w).double()))
        for r, w in zip(losses, weights, strict=True)
    )
    assert total == pytest.approx(expected, rel=1e-6)


def test_reductions_refuse_lengths_they_cannot_divide_by() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        response_weights([3, 0], "token_mean")
    with pytest.raises(ValueError, match="max_tokens = 4"):
        response_weights([3, 5], "constant", max_tokens=4)
    with pytest.raises(ValueError, match="max_tokens = None"):
        response_weights([3, 5], "constant")
