"""Drafters guess under the noise and the biases that the verifier selects with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ratoon.sampling import keyed_noise
from ratoon.speculation.proposer import CoupledProposer, RetrievedProposer, StepNoise

VOCAB = 700
KEYS = torch.randint(-(2**62), 2**62, (3, 2), generator=torch.Generator().manual_seed(1))
T0 = torch.tensor([5, 90, 1])


def prepared(temperature: float = 1.0) -> StepNoise:
    noise = StepNoise(KEYS, T0, temperature)
    noise.prepare(4, VOCAB)
    return noise


@pytest.mark.parametrize("depth", range(4))
def test_drafters_see_the_verifiers_noise_of_their_position(depth: int) -> None:
    noise = prepared()
    exact = keyed_noise.exponential(keyed_noise.row_keys(KEYS, T0 + depth), None, VOCAB).float()
    for ids in (torch.arange(VOCAB), torch.randint(0, VOCAB, (3, 20))):
        found = noise.exponential(depth, ids)
        assert found is not None
        expected = exact.gather(1, ids.expand(3, -1))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_a_row_has_the_same_noise_alone() -> None:
    ids = torch.arange(VOCAB)
    together = prepared().exponential(2, ids)
    assert together is not None
    for row in range(3):
        alone = StepNoise(KEYS[row : row + 1], T0[row : row + 1], 1.0)
        alone.prepare(3, VOCAB)
        found = alone.exponential(2, ids)
        assert found is not None
        assert found[0].tolist() == together[row].tolist()


def test_ids_outside_the_vocabulary_get_some_finite_noise() -> None:
    found = prepared().exponential(0, torch.tensor([[-5, VOCAB, 10**9]] * 3))
    assert found is not None
    assert bool((found.isfinite() & (found > 0)).all())


def test_there_is_no_noise_at_temperature_zero() -> None:
    assert prepared(0.0).exponential(0, torch.arange(VOCAB)) is None


class TwoTokens:
    """Scores and retrieves ids 3 and 4, the first as far likelier, and the odd id 900."""

    draft_ids = torch.tensor([3, 4, 900])

    def root(self, num_rows: int, num_children: int = 0) -> Tensor | tuple[Tensor, Tensor]:
        if num_children == 0:
            return torch.tensor([9.0, 1.0, -9.0]).expand(num_rows, 1, 3)
        tokens = self.draft_ids.expand(num_rows, 1, 3)
        return tokens, torch.tensor([0.8, 0.1, 0.1]).expand(num_rows, 1, 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafters_do_not_propose_what_is_suppressed(temperature: float) -> None:
    bias = torch.zeros(VOCAB)
    bias[3] = -torch.inf
    noise = StepNoise(KEYS, T0, temperature, bias)
    noise.prepare(1, VOCAB)
    learned = CoupledProposer(TwoTokens()).root(noise, 3)  # type: ignore[arg-type]
    retrieved = RetrievedProposer(TwoTokens()).root(noise, 3)  # type: ignore[arg-type]
    assert (learned.tokens[:, 0, 0] == 4).all()
    for proposals in (learned, retrieved):
        assert (proposals.chances[proposals.tokens == 3] == 0).all()
        assert (proposals.chances[proposals.tokens == 4] > 0).all()


def test_drafters_follow_a_bias() -> None:
    bias = torch.zeros(VOCAB)
    bias[4] = 50.0
    noise = StepNoise(KEYS, T0, 1.0, bias)
    noise.prepare(1, VOCAB)
    learned = CoupledProposer(TwoTokens()).root(noise, 1)  # type: ignore[arg-type]
    assert learned.tokens.flatten().tolist() == [4, 4, 4]
