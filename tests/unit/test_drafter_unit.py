from __future__ import annotations

import pytest

from ratoon.cluster import drafter_unit
from ratoon.cluster.drafter_unit import DrafterUnit


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
