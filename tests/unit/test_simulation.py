"""Simulated rollouts: bars that planners must meet, and what a simulation must keep to."""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from rich.console import Console

from ratoon.cli.simulate import planner_table
from ratoon.coordinator.memory import PlannerMemory
from ratoon.coordinator.planner import Work
from ratoon.errors import ConfigError, DataError
from ratoon.report.simulation import render_simulation
from ratoon.simulate.machine import Machine
from ratoon.simulate.rollout import Outcome, Simulation
from ratoon.simulate.scenarios import SCENARIOS, Lengths, Scenario, named, with_costs, with_recorded
from ratoon.simulate.speed import Speeds
from ratoon.simulate.study import check_arms, run_study

SMALL = replace(named("published"), prompts_per_worker=4, group_size=2, slots=4)
SPEEDS = Speeds(SMALL.costs, SMALL.slots)


def rows_of(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["planner"]: row for row in record["rows"]}


def without_cpu(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what this machine's speed has a part in."""
    rows = [
        {key: value for key, value in row.items() if not key.startswith("coordinator")}
        for row in record["rows"]
    ]
    return {**record, "rows": rows}


@pytest.mark.parametrize("workers", [2, 8])
def test_a_worker_at_half_speed_does_not_hold_up_the_others(workers: int) -> None:
    arms = check_arms(["longest_first", "static", "known"])
    rows = rows_of(run_study(named("unequal_workers"), [workers], arms=arms, steps=3))
    assert rows["known"]["to_bound"] <= 1.1
    assert rows["longest_first"]["to_bound"] <= 1.25
    assert rows["static"]["to_bound"] > 1.5
    assert rows["longest_first"]["gain"] > 1.3


@pytest.mark.parametrize("name", SCENARIOS)
def test_planning_is_never_slower_than_the_static_split_and_never_beats_the_bound(
    name: str,
) -> None:
    scenario = replace(named(name), prompts_per_worker=16)
    rows = rows_of(run_study(scenario, [4], steps=2))
    assert all(row["to_bound"] >= 1.0 for row in rows.values())
    assert rows["longest_first"]["gain"] > 1.0
    assert rows["known"]["step_s"] <= 1.02 * rows["longest_first"]["step_s"]
    assert all(0 <= row["idle_frac"] < 1 for row in rows.values())


def test_a_simulation_repeats() -> None:
    stormy = replace(SMALL, crash_share=0.1)
    one, other = (run_study(stormy, [3], steps=2) for _ in range(2))
    assert without_cpu(one) == without_cpu(other)
    assert without_cpu(run_study(SMALL, [3], steps=2, seed=1)) != without_cpu(
        run_study(SMALL, [3], steps=2, seed=2)
    )


def one_rollout(
    scenario: Scenario, count: int, crashes: list[tuple[float, int]], kind: str = "longest_first"
) -> tuple[Outcome, int]:
    """A rollout, and how many tokens it had to draw."""
    size = scenario.group_size
    lengths = [scenario.lengths.draw(0, 0, p, size) for p in range(4 * count)]
    work = [Work(("data", row), 64, size, 4096) for row in range(len(lengths))]
    memory = PlannerMemory(count)
    simulation = Simulation(
        scenario,
        memory.planner(kind, work, scenario.slots),
        work,
        lengths,
        slowness=scenario.slowness(count),
        speeds=SPEEDS,
        quality=scenario.drafter.start,
        memory=memory,
    )
    return simulation.run(crashes), sum(sum(group) for group in lengths)


@pytest.mark.parametrize("kind", ["longest_first", "first_come", "static"])
def test_what_a_lost_worker_had_is_drawn_by_others(kind: str) -> None:
    """At any moment, down to one worker; the coordinator refuses what it did not ask for."""
    for seed in range(8):
        source = random.Random(seed)
        crashes = sorted((source.uniform(0, 60), worker) for worker in source.sample(range(4), 3))
        outcome, tokens = one_rollout(SMALL, 4, crashes, kind)
        calm, same = one_rollout(SMALL, 4, [], kind)
        assert outcome.tokens == tokens == same
        assert outcome.crashes <= 3
        assert outcome.seconds >= calm.seconds * 0.99


def test_a_machine_decodes_as_the_table_says() -> None:
    machine = Machine(slots=2, slowness=2.0, table=[0.0, 0.1, 0.15], prompt_s=0.01)
    machine.give([((0, 0), 10), ((0, 1), 30), ((0, 2), 5)], 1.0, prompt_tokens=5)
    # The prompt takes 0.1 s, ten tokens of two sequences 0.3 s each.
    assert machine.next_end() == pytest.approx(1.1 + 10 * 0.3)
    assert machine.finish(4.1) == [(0, 0)]
    assert machine.next_end() == pytest.approx(4.1 + 5 * 0.3), "the third has the free slot"
    assert machine.finish(5.6) == [(0, 2)]
    assert machine.next_end() == pytest.approx(5.6 + 15 * 0.2)
    machine.use([0.0, 0.05, 0.1], 5.8)
    assert machine.next_end() == pytest.approx(5.8 + 14 * 0.1)
    report = machine.report()
    assert report.tokens == 31
    assert report.seconds == pytest.approx(4.7)
    assert (report.prefill_seconds, report.prefill_tokens) == (0.1, 5)


def test_a_better_drafter_is_faster_where_few_sequences_are_left() -> None:
    speeds = Speeds(named("published").costs, 32)
    bad, good = speeds.table(0.0), speeds.table(0.8)
    assert good[1] < 0.7 * bad[1]
    assert bad[1] == pytest.approx(0.041, rel=0.1), "the tuner decodes plainly where guessing loses"
    assert bad[32] == pytest.approx(0.097, rel=0.1)


def instructions(run: Callable[[], object]) -> int:
    """Bytecode instructions that the coordinator's package executes."""
    counted = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal counted
        if "/ratoon/coordinator/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        counted += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    return counted


@pytest.mark.parametrize("kind", ["longest_first", "first_come"])
def test_the_cost_of_a_decision_does_not_grow_with_the_workers(kind: str) -> None:
    calm = replace(SMALL, drafter=replace(SMALL.drafter, start=0.0, best=0.0))
    few, many = (
        instructions(lambda count=count: one_rollout(calm, count, [], kind)) / count  # type: ignore[misc]
        for count in (8, 64)
    )
    assert many < 1.3 * few


def test_lengths_have_a_body_and_a_bump_at_the_cap() -> None:
    spec = Lengths(cap_share=0.05)
    drawn = sorted(n for prompt in range(500) for n in spec.draw(0, 0, prompt, 8))
    at_cap = sum(n == spec.cap for n in drawn) / len(drawn)
    assert 0.05 <= at_cap < 0.12
    assert 0.8 * spec.median < drawn[len(drawn) // 2] < 1.3 * spec.median
    grown = Lengths(growth=2.0, cap=10**6, cap_share=0.0)
    assert sum(grown.draw(0, 3, 5, 100)) > 6 * sum(grown.draw(0, 0, 5, 100))


def test_recorded_lengths_are_those_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "completions").mkdir()
    for step in (1, 2):
        rows = [
            {
                "dataset": "d",
                "row": row,
                "prompt_ids": [0] * 9,
                "token_ids": [0] * (10 * row + step),
            }
            for row in (1, 2, 3)
        ]
        path = tmp_path / "completions" / f"train_{step:06d}.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    recorded = with_recorded(SMALL, tmp_path)
    assert recorded.prompt_tokens == 9
    assert recorded.lengths.cap == 32
    assert set(recorded.lengths.draw(0, 0, 4, 50)) == {21, 22}
    assert rows_of(run_study(recorded, [2], steps=2))["static"]["step_s"] > 0
    with pytest.raises(DataError, match="no training responses"):
        with_recorded(SMALL, tmp_path / "nothing")
    path.write_text('{"dataset": "d", "row": 1, "prompt_ids": [0], "token_ids": []}\n')
    with pytest.raises(DataError, match=r"train_000002\.jsonl: prompt_ids and token_ids"):
        with_recorded(SMALL, tmp_path)


def test_a_table_of_costs_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text("[[1, 0.01], [64, 0.02]]")
    fast = with_costs(SMALL, path)
    faster = rows_of(run_study(fast, [2], steps=2))["static"]["step_s"]
    assert faster < rows_of(run_study(SMALL, [2], steps=2))["static"]["step_s"]
    for wrong in (
        "[[2, 0.01]]",
        "[[1, 0.01], [1, 0.02]]",
        "[[1, 0]]",
        "[[1, NaN], [2, -1]]",
        "[[1, Infinity]]",
        "[[Infinity, 1]]",
        "{}",
        "[1]",
        "no",
    ):
        path.write_text(wrong)
        with pytest.raises(DataError, match=r"costs\.json"):
            with_costs(SMALL, path)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="published"):
        named("calm")
    with pytest.raises(ConfigError, match="longest_first"):
        check_arms(["fastest"])


def test_the_table_fits_a_narrow_terminal() -> None:
    row = {
        "workers": 1024,
        "planner": "longest_first",
        "step_s": 1050.0,
        "to_bound": 1.084,
        "gain": 1.15,
        "idle_frac": 0.157,
        "trained_tokens": 200_000_000,
        "messages_per_s": 910.5,
        "coordinator_ms": 9999,
        "coordinator_share": 0.008,
    }
    file = io.StringIO()
    console = Console(width=80, file=file)
    console.print(planner_table({"scenario": "s", "meaning": "m", "rows": [row]}))
    last = file.getvalue().splitlines()[-1]
    shown = "1024 longest_first 1,050.0 1.084 1.15 15.7% 200,000,000 910.5 9,999 0.80%"
    assert last.split() == shown.split()


def test_the_page_shows_every_planner() -> None:
    page = render_simulation(run_study(SMALL, [2, 4], steps=2))
    assert page.count('<svg class="chart"') == 3
    for planner in ("longest_first", "first_come", "static", "known"):
        assert planner in page
