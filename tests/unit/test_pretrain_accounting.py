"""What a run has cost, counted by hand for a small model."""

from __future__ import annotations

import pytest

from ratoon.est.sampler import NestedSampler
from ratoon.est.subnetwork import Rates, Shape, Subnetwork
from ratoon.loop.accounting import Account, StepCost
from ratoon.models.hf_config import family_config

MODEL = family_config(
    "llama", vocab_size=100, hidden_size=8, intermediate_size=20, num_layers=4, num_heads=2,
    num_kv_heads=2, head_dim=4, max_positions=16,
)  # fmt: skip
SHAPE = Shape.of(MODEL)
FULL = Subnetwork.full(SHAPE)
# Of a token, forward: four projections, half of 16 tokens' attention, three matrices of the MLP.
LAYER = 2 * 8 * 8 * 4 + 2 * 16 * 8 + 2 * 8 * 20 * 3
HEAD = 2 * 8 * 100


def _cost() -> StepCost:
    return StepCost(MODEL, FULL, tokens=64, length=16, parameters=[(10, 10)], optimizer="adamw")


def test_a_step_is_forward_twice_as_much_backward_and_the_optimizer() -> None:
    assert _cost().flops(FULL) == 64 * 3 * (4 * LAYER + HEAD) + 17 * 100


def test_half_of_the_layers_cost_half_of_the_layers_and_all_of_the_rest() -> None:
    half = NestedSampler(SHAPE).draw(Rates(layers=0.5), 0, 0, 1)
    assert _cost().flops(half) == 64 * 3 * (2 * LAYER + HEAD) + 17 * 100
    assert _cost().forward(half, 48) == 48 * (2 * LAYER + HEAD)
    # The paper leaves head, attention and optimizer out.
    assert _cost().paper(half) == 0.5


def test_an_account_compares_with_the_whole_model_on_the_same_tokens() -> None:
    account = Account(
        steps=4, tokens=256, flops=30.0, full_flops=40.0, paper_steps=3.0, train_s=1.5
    )
    metrics = account.metrics()
    assert metrics["pretrain/saved_frac"] == pytest.approx(0.25)
    assert metrics["pretrain/saved_frac_paper"] == pytest.approx(0.25)
    assert metrics["pretrain/train_s"] == 1.5
    assert Account(**account.state()) == account


def test_an_account_of_nothing_has_saved_nothing() -> None:
    metrics = Account().metrics()
    assert metrics["pretrain/saved_frac"] == metrics["pretrain/saved_frac_paper"] == 0
