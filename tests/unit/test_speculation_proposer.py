"""The noise that reaches the drafters is the noise that the verifier selects with."""

from __future__ import annotations

import pytest
import torch

from ratoon.sampling import keyed_noise
from ratoon.speculation.proposer import StepNoise

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
