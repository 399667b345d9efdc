"""What a study found: each arm beside the full model that took the same seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from ratoon.bench.study import best_rates

Results = Sequence[dict[str, Any]]


def summarise(results: Results) -> dict[str, Any]:
    """One row for each arm and budget at its best learning rate; JSON values.

    `against_full` is the mean over seeds of the loss minus that of the full model with the same
    seconds, seed and so order of tokens, and `stderr` its standard error (None for one seed).
    `rates` has the first seed's loss by learning rate: a best one at the edge was not found.
    `seconds_to_full_loss` is, by arm, the smallest budget whose mean loss is at most that of the
    full model's longest run, as a share of that run's seconds.
    """
    best = best_rates(results)
    losses: dict[tuple[str, float], dict[int, float]] = {}
    curves: dict[tuple[str, float], list[dict[str, float]]] = {}
    for result in results:
        key = result["arm"], result["budget"]
        if result["lr"] == best.get(key):
            losses.setdefault(key, {})[result["seed"]] = result["loss"]
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
    losses: dict[tuple[str, float], dict[int, float]],
    curve: Sequence[dict[str, float]],
    results: Results,
) -> dict[str, Any]:
    arm, budget = key
    mine, full = losses[key], losses.get(("full", budget), {})
    differences = [mine[seed] - full[seed] for seed in sorted(mine.keys() & full.keys())]
    last = curve[-1]
    return {
        "arm": arm,
        "budget": budget,
        "lr": lr,
        "seeds": len(mine),
        "loss": statistics.fmean(mine.values()),
        "loss_stderr": _stderr(list(mine.values())),
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


def _reached(losses: dict[tuple[str, float], dict[int, float]]) -> dict[str, float]:
    longest = max((budget for arm, budget in losses if arm == "full"), default=None)
    if longest is None:
        return {}
    goal = statistics.fmean(losses["full", longest].values())
    reached: dict[str, float] = {}
    for arm, budget in sorted(losses, key=lambda key: -key[1]):
        if statistics.fmean(losses[arm, budget].values()) <= goal:
            reached[arm] = budget / longest
    return reached
