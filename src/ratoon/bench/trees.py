"""Ways to draft, compared on the same responses: how many tokens does one verification yield?

Coupled trees, greedy trees (ranked without the noise, as EAGLE-2 does), chains by rejection
sampling (token by token, and by block verification), and trees sampled without replacement with
recursive rejection. All use the same drafter, the same recorded responses of the target, as many
nodes to verify and as many levels to draft. Speculation is not run: with a recorded response at
hand one can tell how far each way would have got from each position (see `offline.rejection`), and
steps are counted as the walk through the response takes them. Acceptance does not depend on the
machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ratoon.bench.corpus import OPEN_TEXT, TASK_PROMPTS, Corpus, open_source
from ratoon.drafter.checkpoint import load_drafter, save_checkpoint
from ratoon.errors import ConfigError
from ratoon.observe.provenance import provenance
from ratoon.offline.recorded import entropy, record
from ratoon.offline.rejection import best_shape, block_reach, token_reach
from ratoon.offline.responses import CHILDREN, DEPTH, Counts, GreedyProposer, Responses, wide_tree
from ratoon.offline.training import Recipe, train
from ratoon.speculation.calibration import Calibration
from ratoon.speculation.proposer import CoupledProposer

# The last one is that of training rollouts.
TEMPERATURES = (0.0, 0.6, 1.0)
NUM_CALIBRATION = 8
SHARED_BUDGETS = (1, 2, 4)
SHARED_CAP = 16
# What coupled trees must gain on each at temperature 1, by the lower end of the interval.
BARS = {
    OPEN_TEXT: {"greedy tree": 1.18, "sampled tree": 0.98, "block chain": 1.15},
    TASK_PROMPTS: {"greedy tree": 1.05, "sampled tree": 0.98, "block chain": 1.15},
}


def run(
    model: Path,
    corpus: Corpus,
    *,
    drafter: Path | None = None,
    nodes: int = 16,
    keep: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Compare all ways at all temperatures; JSON values.

    Without `drafter` one is trained first, at temperature 1, and kept in `keep` if that is given.
    `rows` has tokens per verification and what a coupled tree gains, with a bootstrap interval over
    responses; `sharing` what coupled trees gain at temperature 1 where all responses share the
    nodes of a step.

    Raises: CheckpointError, DataError as `open_source` does; ConfigError if a drafter is to be kept
    and none trained.
    """
    if keep is not None and drafter is not None:
        raise ConfigError(f"--keep {keep}: no drafter is trained because --drafter gives one")
    loaded = None if drafter is None else load_drafter(drafter)
    trained_on = 0 if loaded else corpus.train_responses
    source = open_source(
        model,
        corpus.text,
        NUM_CALIBRATION + corpus.responses + trained_on,
        None if loaded is None else loaded.config.taps,
    )
    first = range(NUM_CALIBRATION)
    held_out = range(NUM_CALIBRATION, NUM_CALIBRATION + corpus.responses)
    if loaded is None:
        say(f"drawing {trained_on} responses to train a drafter on")
        finished = record(source, range(held_out.stop, held_out.stop + trained_on), 1.0)
        say(f"training a drafter for {corpus.steps} steps")
        trainer = train(source, finished, Recipe(steps=corpus.steps))
        loaded = trainer.drafter
        if keep is not None:
            save_checkpoint(keep, trainer, version=0)
    rows: list[dict[str, Any]] = []
    for temperature in TEMPERATURES:
        say(f"temperature {temperature:g}")
        recorded = record(source, held_out, temperature)
        calibrating = Responses(source, loaded, record(source, first, temperature), temperature)
        compared = Responses(source, loaded, recorded, temperature)
        rows += _rows(_walks(compared, calibrating, nodes), temperature, entropy(recorded))
    gained = {row["scheme"]: row["low"] for row in rows if row["temperature"] == 1.0}
    return {
        "benchmark": "trees",
        "model": model.name,
        "prompts": corpus.prompts,
        "responses": corpus.responses,
        "nodes": nodes,
        "depth": DEPTH,
        "children": CHILDREN,
        "drafter": {
            "trained_on_responses": trained_on,
            "steps": corpus.steps if trained_on else None,
        },
        "rows": rows,
        "sharing": _sharing(compared, calibrating),
        "bars_met": {
            f"coupled tree / {scheme} >= {bar}": gained[scheme] >= bar
            for scheme, bar in BARS[corpus.prompts].items()
        },
        "provenance": provenance(1),
    }


def _walks(responses: Responses, calibrating: Responses, nodes: int) -> dict[str, Counts]:
    """Every scheme's walk through the responses; what must be fitted is fitted on others."""
    strategy = wide_tree(nodes)
    found: dict[str, Counts] = {}
    for name, proposer in (("coupled tree", CoupledProposer), ("greedy tree", GreedyProposer)):
        calibration = Calibration()
        calibrating.walk(calibrating.tree_step(proposer, strategy, calibration))
        found[name] = responses.walk(responses.tree_step(proposer, strategy, calibration))
    if responses.temperature == 0:
        found["chain"] = responses.walk(responses.greedy_chain_step())
        return found
    found["chain"] = responses.walk(responses.chain_step(token_reach))
    found["block chain"] = responses.walk(responses.chain_step(block_reach))
    shape = best_shape(calibrating.child_acceptance(), nodes)
    found["sampled tree"] = responses.walk(responses.sampled_step(shape))
    return found


def _sharing(responses: Responses, calibrating: Responses) -> list[dict[str, Any]]:
    """Coupled trees of a few nodes per sequence: each its own, or the best of the whole batch."""
    rows = []
    for budget in SHARED_BUDGETS:
        shared = wide_tree(budget, cap=SHARED_CAP)
        own = replace(shared, depth=min(DEPTH, budget), cap=None)
        counts = []
        for strategy in (own, shared):
            calibration = Calibration()
            calibrating.walk(calibrating.tree_step(CoupledProposer, strategy, calibration))
            step = responses.tree_step(CoupledProposer, strategy, calibration)
            counts.append(responses.walk(step))
        rows.append(
            {
                "nodes_per_sequence": budget,
                "own": counts[0].mean,
                "shared": counts[1].mean,
                "ratio": counts[1].mean / counts[0].mean,
                **_interval(counts[1], counts[0]),
            }
        )
    return rows


def _rows(found: dict[str, Counts], temperature: float, nats: float) -> list[dict[str, Any]]:
    coupled = found["coupled tree"]
    return [
        {
            "temperature": temperature,
            "entropy_per_token": nats,
            "scheme": scheme,
            "tokens_per_verification": counts.mean,
            "coupled_tree_gains": coupled.mean / counts.mean,
            **_interval(coupled, counts),
        }
        for scheme, counts in found.items()
    ]


def _interval(ours: Counts, other: Counts) -> dict[str, float]:
    """95 % interval of the ratio of means; both are resampled by the same responses."""
    draws = np.random.default_rng(0).integers(0, len(ours.steps), size=(10_000, len(ours.steps)))

    def means(counts: Counts) -> Any:
        tokens, steps = counts.tokens.numpy()[draws], counts.steps.numpy()[draws]
        return tokens.sum(1) / steps.sum(1)

    low, high = np.quantile(means(ours) / means(other), [0.025, 0.975])
    return {"low": float(low), "high": float(high)}
