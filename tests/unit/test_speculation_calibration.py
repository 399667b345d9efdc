"""Calibration: chances come to agree with outcomes, and travel with a snapshot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ratoon.speculation.calibration import Calibration
from ratoon.speculation.proposer import Source
from ratoon.speculation.tree import Tree
from ratoon.speculation.verify import Verified


def one_child_step(claimed: Tensor, happens: Tensor, source: Source) -> tuple[Tree, Verified]:
    """Rows with one child each: claimed chances `[B]`, and whether the target picked it."""
    num_rows = len(claimed)
    zeros, ones = torch.zeros(num_rows, 1).long(), torch.ones(num_rows, 1)
    tree = Tree(
        tokens=torch.cat([zeros, zeros + 5], 1),
        parents=torch.cat([zeros - 1, zeros], 1),
        depths=torch.cat([zeros, zeros + 1], 1),
        chances=torch.cat([ones, claimed[:, None]], 1),
        valid=torch.ones(num_rows, 2, dtype=torch.bool),
        sources=torch.cat([zeros, zeros + (1 << source)], 1),
    )
    picked = happens[:, None].long()
    path = torch.cat([zeros, torch.where(picked > 0, 1, -1)], 1)
    return tree, Verified(path, path.clone(), torch.zeros(num_rows, 2), 1 + picked[:, 0])


def trained(claim: float, truth: float, source: Source, steps: int = 1500) -> Calibration:
    calibration = Calibration()
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        odds = float(calibration.odds([source], [1], 0)) * claim / (1 - claim)
        claimed = torch.full((4,), odds / (1 + odds))
        happens = torch.rand(4, generator=generator) < truth
        calibration.observe(*one_child_step(claimed, happens, source))
    return calibration


def calibrated(calibration: Calibration, source: Source, claim: float) -> float:
    odds = float(calibration.odds([source], [1], 0)) * claim / (1 - claim)
    return odds / (1 + odds)


@pytest.mark.parametrize(("claim", "truth"), [(0.6, 0.3), (0.2, 0.5), (0.4, 0.4)])
def test_chances_come_to_agree_with_outcomes(claim: float, truth: float) -> None:
    calibration = trained(claim, truth, Source.SUFFIX)
    assert calibrated(calibration, Source.SUFFIX, claim) == pytest.approx(truth, abs=0.04)
    assert calibrated(calibration, Source.LEARNED, claim) == pytest.approx(claim)


def test_nothing_observed_changes_nothing() -> None:
    odds = Calibration().odds([Source.LEARNED, Source.SUFFIX], [2, 3], 4)
    assert odds.tolist() == [1.0] * 5


def test_nodes_that_were_not_reached_teach_nothing() -> None:
    calibration = Calibration()
    tree, _ = one_child_step(torch.tensor([0.5]), torch.tensor([False]), Source.LEARNED)
    chain = Tree(
        tokens=torch.cat([tree.tokens, torch.tensor([[6]])], 1),
        parents=torch.cat([tree.parents, torch.tensor([[1]])], 1),
        depths=torch.cat([tree.depths, torch.tensor([[2]])], 1),
        chances=torch.cat([tree.chances, torch.tensor([[0.4]])], 1),
        valid=torch.ones(1, 3, dtype=torch.bool),
        sources=torch.cat([tree.sources, torch.tensor([[1]])], 1),
    )
    root_only_path = torch.tensor([[0]])
    calibration.observe(
        chain, Verified(root_only_path, root_only_path, torch.zeros(1, 1), torch.tensor([1]))
    )
    assert float(calibration.odds([Source.LEARNED], [1], 0)) < 1.0
    assert float(calibration.odds([Source.LEARNED], [1], 1)) == 1.0


def test_a_snapshot_restores_the_state_and_does_not_follow_it() -> None:
    calibration = trained(0.6, 0.2, Source.LEARNED, steps=50)
    state = calibration.state_dict()
    before = calibrated(calibration, Source.LEARNED, 0.6)
    calibration.observe(
        *one_child_step(torch.full((4,), 0.5), torch.zeros(4).bool(), Source.LEARNED)
    )
    assert calibrated(calibration, Source.LEARNED, 0.6) != before
    other = Calibration()
    other.load_state_dict(state)
    assert calibrated(other, Source.LEARNED, 0.6) == before


def test_depth_counts_from_where_drafting_started() -> None:
    calibration = Calibration()
    tree, verified = one_child_step(torch.tensor([0.5]), torch.tensor([False]), Source.LEARNED)
    tree = replace(tree, depths=tree.depths + 3)
    calibration.observe(tree, verified, torch.tensor([3]))
    assert float(calibration.odds([Source.LEARNED], [1], 0)) < 1.0
    assert float(calibration.odds([Source.LEARNED], [1], 3)) == 1.0
