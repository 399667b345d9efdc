"""What a study found: each arm beside the full model that took the same seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from ratoon.bench.study import best_rates

Results = Sequence[dict[str, Any]]
# Of each arm and budget, by seed: seconds and loss at the end.
Losses = dict[tuple[str, float], dict[int, tuple[float, float]]]


def summarise(results: Results) -> dict[str, Any]:
    """One row for each arm and budget at its best learning rate; JSON values.

    `against_full` is the mean over seeds of the loss minus that of the full model with the same
    seconds, seed and so order of tokens, and `stderr` its standard error (None for one seed). An
    adaptive arm does not end exactly at its budget: it is compared with the full model's loss
    between or beyond its budgets, on a line in the logarithm of seconds.
    `rates` has the first seed's loss by learning rate: a best one at the edge was not found.
    `seconds_to_full_loss` is, by arm, the smallest budget whose mean loss is at most that of the
    full model's longest run, as a share of that run's seconds.
    """
    best = best_rates(results)
    losses: Losses = {}
    curves: dict[tuple[str, float], list[dict[str, float]]] = {}
    for result in results:
        key = result["arm"], result["budget"]
        if result["lr"] == best.get(key):
            end = result["curve"][-1]
            losses.setdefault(key, {})[result["seed"]] = (end["seconds"], result["loss"])
            if result["seed"] == 0:
                curves[key] = result["curve"]
    rows = [_row(key, best[key], losses, curves[key], results) for key in curves]
    rows.sort(key=lambda row: (row["budget"], row["loss"]))
    return {
        "benchmark": "pretrain",
        "data": sorted({result["data"] for result in results}),
        "rows": rows,
        "seconds_to_full_loss": _reached(losses),
        "curves": [
            {"arm": arm, "budget": budget, "points": points}
            for (arm, budget), points in sorted(curves.items())
        ],
    }


def _row(
    key: tuple[str, float],
    lr: float,
    losses: Losses,
    curve: Sequence[dict[str, float]],
    results: Results,
) -> dict[str, Any]:
    arm, budget = key
    ends = losses[key]
    found = [(loss, _full_loss(losses, seed, seconds)) for seed, (seconds, loss) in ends.items()]
    differences = [loss - full for loss, full in found if full is not None]
    mine = [loss for _, loss in ends.values()]
    last = curve[-1]
    return {
        "arm": arm,
        "budget": budget,
        "lr": lr,
        "seeds": len(mine),
        "loss": statistics.fmean(mine),
        "loss_stderr": _stderr(mine),
        "against_full": statistics.fmean(differences) if differences else None,
        "stderr": _stderr(differences),
        "tokens": last["tokens"],
        "flops": last["flops"],
        "seconds": last["seconds"],
        "rates": {
            f"{result['lr']:g}": result["loss"]
            for result in sorted(results, key=lambda result: float(result["lr"]))
            if (result["arm"], result["budget"], result["seed"]) == (arm, budget, 0)
        },
    }


def _stderr(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


# Ends that differ by less are at the same seconds: steps are whole.
_SAME = 0.01


def _full_loss(losses: Losses, seed: int, seconds: float) -> float | None:
    """The full model's loss after so many seconds with this seed; None where that is not known."""
    points = sorted(
        ends[seed] for (arm, _), ends in losses.items() if arm == "full" and seed in ends
    )
    for other, loss in points:
        if abs(other / seconds - 1.0) < _SAME:
            return loss
    if len(points) < 2:
        return None
    above = next((n for n, (other, _) in enumerate(points) if other > seconds), len(points) - 1)
    (first, start), (second, end) = points[max(0, above - 1)], points[max(1, above)]
    share = math.log(seconds / first) / math.log(second / first)
    return start + share * (end - start)


def _reached(losses: Losses) -> dict[str, float]:
    longest = max((budget for arm, budget in losses if arm == "full"), default=None)
    if longest is None:
        return {}
    goal = statistics.fmean(loss for _, loss in losses["full", longest].values())
    reached: dict[str, float] = {}
    for arm, budget in sorted(losses, key=lambda key: -key[1]):
        if statistics.fmean(loss for _, loss in losses[arm, budget].values()) <= goal:
            reached[arm] = budget / longest
    return reached
