"""Speed of decoding that chooses its trees by itself, against plain decoding.

As in `rollout`: a constant live batch, the same responses in both arms, only decode steps count.
The tuner keeps what it has learned from round to round, as it does from rollout to rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ratoon.bench.intervals import median_interval
from ratoon.bench.subject import Decoded, Subject, decode
from ratoon.bench.timing import interleaved, ratio_interval
from ratoon.cluster.rollout_unit import largest_of
from ratoon.rollout.native.latency import forward_seconds
from ratoon.speculation.cost_model import CostModelTuner, Latency

LIVE_BATCHES = (1, 4, 16, 32, 64)
MAX_ROWS = 128
# With any drafter and at any live batch, guessing must not lose more than this.
BAR = 0.95


def against_plain(subject: Subject, rounds: int) -> list[dict[str, Any]]:
    """One row for each live batch: ratio of speeds with its interval, and what was guessed."""
    points = forward_seconds(subject.model, MAX_ROWS)
    arms: dict[str, Callable[[int], Decoded]] = {}
    for size in LIVE_BATCHES:
        arms[f"plain {size}"] = partial(decode, subject, size)
        arms[f"adaptive {size}"] = _arm(subject, size, points)
    results = interleaved(arms, rounds)
    rows = []
    for size in LIVE_BATCHES:
        plain, adaptive = results[f"plain {size}"], results[f"adaptive {size}"]
        ratio = ratio_interval([d.rate for d in adaptive], [d.rate for d in plain])
        num_rows = sum(d.rows for d in adaptive)
        rows.append(
            {
                "live_batch": size,
                "plain_tokens_per_s": median_interval([d.rate for d in plain])["median"],
                "adaptive_tokens_per_s": median_interval([d.rate for d in adaptive])["median"],
                "ratio": ratio["median"],
                "low": ratio["low"],
                "high": ratio["high"],
                "acceptance_length": sum(d.tokens for d in adaptive) / num_rows,
                "nodes_per_row": sum(d.nodes for d in adaptive) / num_rows,
            }
        )
    return rows


def _arm(subject: Subject, size: int, points: list[tuple[int, float]]) -> Callable[[int], Decoded]:
    drafting = subject.drafting(size)
    tuner = CostModelTuner(largest_of(subject.settings), MAX_ROWS, Latency(points))
    # Later rounds start from the calibration and the index that the warm-up round left.
    state: dict[str, Any] = {}

    def arm(number: int) -> Decoded:
        if state:
            drafting.load_state_dict(state)
        decoded = decode(subject, size, number, drafting, tuner)
        if not state:
            state.update(drafting.state_dict())
        return decoded

    return arm
