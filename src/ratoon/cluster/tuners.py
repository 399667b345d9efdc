"""Who chooses each step's tree, from the configuration."""

from __future__ import annotations

from dataclasses import replace

from ratoon.config.speculation import Speculation
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.latency import forward_seconds
from ratoon.speculation.bandit import BanditTuner
from ratoon.speculation.cost_model import CostModelTuner, Latency
from ratoon.speculation.strategy import Strategy, StrategyTable
from ratoon.speculation.tuner import StatefulTuner, TableTuner

# Cost of one more row of a forward pass, in passes, for one live sequence; measured on a CPU.
MIN_CHANCE = 0.01
MAX_MIN_CHANCE = 0.2


def make_tuner(settings: Speculation, model: InferenceModel) -> StatefulTuner:
    """The configured tuner; `cost_model` measures what `model`'s forward passes cost."""
    if settings.tuner == "table":
        return TableTuner(StrategyTable(tiers_of(settings), slack=settings.hysteresis))
    if settings.tuner == "bandit":
        return BanditTuner([(limit, _depths(tree)) for limit, tree in tiers_of(settings)])
    points = forward_seconds(model, settings.max_rows)
    return CostModelTuner(largest_of(settings), settings.max_rows, Latency(points))


def largest_of(settings: Speculation) -> Strategy:
    """The configured tree; live sequences share their budgets."""
    return Strategy(
        depth=settings.depth,
        branching=settings.branching,
        beam=settings.beam,
        budget=settings.budget,
        cap=settings.budget,
        use_learned="learned" in settings.drafters,
        use_suffix="suffix" in settings.drafters,
        min_chance=MIN_CHANCE,
    )


def _depths(tree: Strategy) -> list[Strategy]:
    """The tree, and shallower ones with as many tokens to verify."""
    depths = {tree.depth, max(1, tree.depth // 2), 1}
    return [replace(tree, depth=depth) for depth in sorted(depths, reverse=True)]


def tiers_of(settings: Speculation) -> list[tuple[int, Strategy]]:
    """The configured tree for few live sequences, smaller ones for more (limit, strategy).

    A forward pass has at most about `max_rows` rows. A node must be visited with a chance near the
    cost of its row, which grows with the batch.
    """
    limits = []
    limit = 1
    while limit < settings.max_live_batch:
        limits.append(limit)
        limit *= 2
    tiers = []
    for limit in (*limits, settings.max_live_batch):
        budget = min(settings.budget, settings.max_rows // limit - 1)
        tree = replace(largest_of(settings), cap=None).within(budget, settings.depth)
        min_chance = min(MIN_CHANCE * limit, MAX_MIN_CHANCE)
        tiers.append((limit, replace(tree, min_chance=min_chance)))
    return tiers
