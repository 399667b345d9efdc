"""Speed of decoding that chooses its trees by itself, against plain decoding.

As in `rollout`: a constant live batch, the same responses in both arms, only decode steps count.
The tuner keeps what it has learned from round to round, as it does from rollout to rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ratoon.bench.subject import Decoded, Subject, compared, decode, guessing_arm
from ratoon.bench.timing import interleaved
from ratoon.cluster.tuners import largest_of
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
        tuner = CostModelTuner(largest_of(subject.settings), MAX_ROWS, Latency(points))
        arms[f"adaptive {size}"] = guessing_arm(subject, size, tuner)
    results = interleaved(arms, rounds)
    rows = []
    for size in LIVE_BATCHES:
        plain, adaptive = results[f"plain {size}"], results[f"adaptive {size}"]
        rows.append(compared(size, plain, adaptive, "adaptive"))
    return rows
