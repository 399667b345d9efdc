"""Coupled chances: right about the race that the target runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ratoon.speculation.coupled import DRAFT_TEMPERATURE, FLATTENING, propose, retrieved_chances


def exponentials(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape).exponential_(generator=generator)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_children_are_the_best_perturbed_scores(temperature: float) -> None:
    logits = torch.randn(3, 2, 40, generator=torch.Generator().manual_seed(1)) * 3
    noise = exponentials(3, 40)
    indices, chances = propose(logits, noise, temperature, 4)
    log_q = (logits / (DRAFT_TEMPERATURE * temperature)).log_softmax(-1)
    scores = log_q - noise.log()[:, None]
    expected_chances, expected = (scores / FLATTENING).softmax(-1).topk(4)
    assert indices.tolist() == expected.tolist()
    torch.testing.assert_close(chances, expected_chances)


def test_without_temperature_children_are_the_most_likely_and_chances_are_q() -> None:
    logits = torch.randn(2, 1, 30, generator=torch.Generator().manual_seed(2))
    indices, chances = propose(logits, None, 0.0, 3)
    expected_chances, expected = logits.softmax(-1).topk(3)
    assert indices.tolist() == expected.tolist()
    torch.testing.assert_close(chances, expected_chances)


def test_there_are_no_more_children_than_tokens() -> None:
    indices, chances = propose(torch.randn(1, 1, 3), exponentials(1, 3), 1.0, 8)
    assert indices.shape == chances.shape == (1, 1, 3)
    assert float(chances.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_node_of_logits_that_are_no_numbers_has_no_chances(poison: float) -> None:
    logits = torch.randn(3, 1, 6)
    logits[0] = poison
    logits[1, 0, 2] = poison
    indices, chances = propose(logits, exponentials(3, 6), 1.0, 6)
    assert chances[0].tolist() == [[0.0] * 6]
    assert bool(chances.isfinite().all())
    assert float(chances[1][indices[1] == 2]) == 0.0
    assert float(chances[2].sum()) == pytest.approx(1.0)


def test_excluded_tokens_leave_the_others_their_chances() -> None:
    logits = torch.randn(1, 1, 6)
    logits[0, 0, 2] = -torch.inf
    indices, chances = propose(logits, exponentials(1, 6), 1.0, 6)
    assert float(chances.sum()) == pytest.approx(1.0)
    assert int(indices[0, 0, -1]) == 2


def test_noise_is_needed_above_temperature_zero() -> None:
    with pytest.raises(ValueError, match="exponentials"):
        propose(torch.randn(1, 1, 6), None, 1.0, 2)


def test_a_coupled_drafter_is_right_more_often_than_a_greedy_one() -> None:
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(4000, 60, generator=generator) * 1.5
    draft = target + torch.randn(4000, 60, generator=generator)
    noise = exponentials(4000, 60)
    picked = (target.log_softmax(-1) - noise.log()).argmax(-1, keepdim=True)
    coupled = propose(draft[:, None], noise, 1.0, 4)[0][:, 0]
    greedy = draft.topk(4).indices
    coupled_hits = (coupled == picked).any(1).float().mean()
    greedy_hits = (greedy == picked).any(1).float().mean()
    assert coupled_hits > greedy_hits + 0.1


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_one_retrieved_candidate_wins_as_often_as_its_chance_says(probability: float) -> None:
    num_draws = 40_000
    p = torch.full((21,), (1 - probability) / 20)
    p[0] = probability
    noise = exponentials(num_draws, 21, seed=4)
    wins = (noise / p).argmin(1) == 0
    chances = retrieved_chances(torch.full((num_draws, 1), probability), noise[:, :1])[:, 0]
    order = chances.argsort()
    for part in order.chunk(5):
        expected = float(chances[part].mean())
        assert float(wins[part].float().mean()) == pytest.approx(expected, abs=0.02)


def test_several_retrieved_candidates_share_the_chance() -> None:
    num_draws = 40_000
    p = torch.tensor([0.4, 0.25] + [0.35 / 30] * 30)
    noise = exponentials(num_draws, 32, seed=5)
    winner = (noise / p).argmin(1)
    chances = retrieved_chances(p[:2].expand(num_draws, -1), noise[:, :2])
    assert float(chances.sum(1).max()) <= 1.0 + 1e-6
    for candidate in range(2):
        wins = float((winner == candidate).float().mean())
        assert float(chances[:, candidate].mean()) == pytest.approx(wins, abs=0.05)


def test_retrieval_without_noise_or_without_candidates_is_plain() -> None:
    priors = torch.tensor([[0.3, 0.0, 0.1]])
    assert retrieved_chances(priors, None).tolist() == priors.tolist()
    chances = retrieved_chances(priors, exponentials(1, 3))
    assert float(chances[0, 1]) == 0.0
    assert retrieved_chances(torch.zeros(1, 3), exponentials(1, 3)).tolist() == [[0.0] * 3]
