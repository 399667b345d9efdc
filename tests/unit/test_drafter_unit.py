from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ratoon.cluster import drafter_unit
from ratoon.cluster.drafter_unit import DrafterUnit
from ratoon.drafter.data_buffer import DataBuffer, Sample


@pytest.mark.parametrize(("share", "rest"), [(1.0, 0.0), (0.25, 6.0)])
def test_training_rests_in_proportion_to_its_work(
    share: float, rest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    unit = object.__new__(DrafterUnit)
    unit._rest_per_work, unit._rested_s = 1.0 / share - 1.0, 0.0

    def work(self: DrafterUnit) -> bool:
        now[0] += 2.0
        return True

    def wait(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(drafter_unit.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(DrafterUnit, "run_once", work)
    unit.run_and_rest(wait)
    assert now[0] == 102.0 + rest
    assert unit._rested_s == rest


def test_a_second_rollout_of_a_step_keeps_what_the_first_gave() -> None:
    unit = object.__new__(DrafterUnit)
    unit.buffer = DataBuffer(100, seed=0)
    unit.served = cast(Any, SimpleNamespace(draft_ids=torch.arange(2)))
    unit.trainer = cast(Any, SimpleNamespace(set_embedding=lambda embedding: None))
    head, states = torch.zeros(4, 2), torch.zeros(5, 6)
    for _ in range(2):
        unit.begin_step(3, head, head)
        sample = Sample((len(unit.buffer),), torch.arange(6), states, states[:, :2], 2, 3)
        assert unit.buffer.add(sample)
    assert len(unit.buffer) == 2
