"""A scenario with several planners and numbers of workers, step after step, side by side."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from ratoon.coordinator.lengths import LengthModel, Uid
from ratoon.coordinator.longest_first import LongestFirst
from ratoon.coordinator.memory import PlannerMemory
from ratoon.coordinator.pace import least_seconds
from ratoon.coordinator.planner import Planner, Work
from ratoon.errors import ConfigError
from ratoon.simulate.rollout import Outcome, Simulation
from ratoon.simulate.scenarios import Scenario
from ratoon.simulate.speed import Speeds

# Longest first by the lengths themselves, which no planner can know: what prediction could gain.
Arm = Literal["longest_first", "first_come", "static", "known"]
ARMS: tuple[Arm, ...] = get_args(Arm)


class _Known(LengthModel):
    """Says what the lengths are."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        self._lengths = lengths

    def predict(self, uid: Uid, prompt_tokens: int, limit: int) -> float:
        """The length of response number `uid[1]`."""
        return float(self._lengths[uid[1]])


@dataclass(slots=True)
class _Arm:
    """What one planner remembers from step to step, and its drafter."""

    memory: PlannerMemory
    quality: float
    rows: list[dict[str, float]] = field(default_factory=list)


def check_arms(names: Sequence[str]) -> tuple[Arm, ...]:
    """Planners by name. Raises: ConfigError if one is unknown."""
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise ConfigError(f"planner {unknown[0]!r} is unknown; there are: {', '.join(ARMS)}")
    return tuple(arm for arm in ARMS if arm in names)


def run_study(
    scenario: Scenario,
    workers: Iterable[int],
    *,
    arms: Sequence[Arm] = ARMS,
    steps: int = 4,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run all arms on the same lengths and crashes; JSON values.

    Each step draws the same prompts again in another order. Figures are means over the steps but
    the first, in which nothing is known yet.
    """
    rows = []
    speeds = Speeds(scenario.costs, scenario.slots)
    for count in workers:
        for arm in arms:
            say(f"{scenario.name}: {arm}, {count} workers")
            rows.append(_run_arm(scenario, speeds, arm, count, steps, seed))
    for row in rows:
        static = next(
            (r for r in rows if (r["planner"], r["workers"]) == ("static", row["workers"])), None
        )
        row["gain"] = static["step_s"] / row["step_s"] if static else None
    return {
        "scenario": scenario.name,
        "meaning": scenario.meaning,
        "steps": steps,
        "seed": seed,
        "responses_per_worker": scenario.prompts_per_worker * scenario.group_size,
        "slots": scenario.slots,
        "rows": rows,
    }


def _run_arm(
    scenario: Scenario, speeds: Speeds, arm: Arm, count: int, steps: int, seed: int
) -> dict[str, Any]:
    state = _Arm(PlannerMemory(count), scenario.drafter.start)
    slowness = scenario.slowness(count)
    for step in range(steps):
        outcome, bound = _run_step(scenario, speeds, arm, state, slowness, step, seed)
        state.rows.append({**asdict(outcome), "bound": bound})
        state.quality *= 1 - scenario.drafter.stale
    kept = state.rows[min(1, steps - 1) :]
    mean = {name: statistics.fmean(row[name] for row in kept) for name in kept[0]}
    return {
        "workers": count,
        "planner": arm,
        "step_s": mean["seconds"],
        "to_bound": statistics.fmean(row["seconds"] / row["bound"] for row in kept),
        "idle_frac": statistics.fmean(row["idle_s"] / (count * row["seconds"]) for row in kept),
        "trained_tokens": mean["trained_tokens"],
        "messages_per_s": mean["messages"] / mean["seconds"],
        "coordinator_ms": 1e3 * mean["coordinator_s"],
        "coordinator_share": mean["coordinator_s"] / mean["seconds"],
    }


def _run_step(
    scenario: Scenario,
    speeds: Speeds,
    arm: Arm,
    state: _Arm,
    slowness: Sequence[float],
    step: int,
    seed: int,
) -> tuple[Outcome, float]:
    """One rollout, and what no schedule could beat."""
    count, size, memory = len(slowness), scenario.group_size, state.memory
    prompts = list(range(count * scenario.prompts_per_worker))
    random.Random(f"{seed}/{step}").shuffle(prompts)
    lengths = [scenario.lengths.draw(seed, step, prompt, size) for prompt in prompts]
    work = [
        Work((scenario.name, prompt), scenario.prompt_tokens, size, scenario.lengths.cap)
        for prompt in prompts
    ]
    flat = [length for group in lengths for length in group]
    soonest = _bound(speeds.table(state.quality), flat, slowness)
    crashes = [(part * soonest, worker) for part, worker in scenario.crashes(seed, step, count)]
    planner: Planner
    if arm == "known":
        work = [
            Work((scenario.name, number), scenario.prompt_tokens, 1, scenario.lengths.cap)
            for number in range(len(flat))
        ]
        lengths = [[length] for length in flat]
        planner = LongestFirst(work, count, scenario.slots, _Known(flat), memory.pace)
    else:
        planner = memory.planner(arm, work, scenario.slots)
    simulation = Simulation(
        scenario,
        planner,
        work,
        lengths,
        slowness=slowness,
        speeds=speeds,
        quality=state.quality,
        memory=memory,
    )
    outcome = simulation.run(crashes)
    memory.lengths.end_round()
    state.quality = simulation.quality
    return outcome, _bound(speeds.table(simulation.quality), flat, slowness)


def _bound(table: Sequence[float], lengths: Sequence[int], slowness: Sequence[float]) -> float:
    """`least_seconds` at the fastest that a table allows."""
    slots = min(range(1, len(table)), key=lambda live: table[live] / live)
    return least_seconds(
        lengths, slowness, slots=slots, alone=min(table[1:]), together=table[slots]
    )
