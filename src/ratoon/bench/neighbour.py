"""How much a decoding worker is slowed by a drafter trained on the next core.

Two processes like a run's workers, one thread each. One decodes the quickstart's prompts at a
constant live batch; the other waits or trains the drafter, by turns in interleaved rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ratoon.bench.drafter import spot_session
from ratoon.bench.intervals import median_interval
from ratoon.bench.live import LiveRows
from ratoon.bench.subject import load_subject
from ratoon.bench.timing import interleaved, ratio_interval, worker_environment, worker_pool
from ratoon.config.speculation import Spot
from ratoon.drafter.trainer import TrainerOptions
from ratoon.errors import ConfigError
from ratoon.models.compute_dtype import DTYPES, fast_dtype
from ratoon.observe.provenance import provenance
from ratoon.processes import end_with_parent
from ratoon.speculation.tuner import RuleTuner

LIVE_BATCHES = (1, 4)
BAR = 0.03


def run(
    model: Path,
    *,
    drafter: Path | None = None,
    share: float | None = None,
    rounds: int = 9,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure in interleaved rounds; JSON values. About three minutes for nine rounds.

    The neighbour trains for `share` of its time, by default as the configuration has it.
    `slowdown` is the share of speed lost beside a training neighbour against the mean of two
    measurements beside a waiting one, with a bootstrap interval; `between_waiting` is the same
    between those two: how much the machine itself moves. The bar is met by the upper end.

    Raises: CheckpointError if model or drafter cannot be read; ConfigError for another share.
    """
    share = Spot().share if share is None else share
    if not 0 < share <= 1:
        raise ConfigError(f"--share {share:g}: must lie in (0, 1]")
    with _neighbour(share, seed) as neighbour, worker_pool() as process:
        rows = _rows(process.submit(_measure, model, drafter, rounds, neighbour).result())
    return {
        "benchmark": "neighbour",
        "model": model.name,
        "share": share,
        "rows": rows,
        "bars_met": {f"slowdown <= {BAR}": max(row["high"] for row in rows) <= BAR},
        "provenance": provenance(seed),
    }


def _measure(
    model: Path, drafter: Path | None, rounds: int, neighbour: Connection
) -> dict[str, list[float]]:
    """Tokens per second of each arm by round, in the decoding process."""
    subject = load_subject(model, drafter)
    live = LiveRows(subject, subject.prompts[: max(LIVE_BATCHES)])
    arms: dict[str, Callable[[int], float]] = {}
    for size in LIVE_BATCHES:
        arms[f"waiting {size}"] = partial(_rate, live, size)
        arms[f"training {size}"] = partial(_rate_beside, live, size, neighbour)
        arms[f"again {size}"] = partial(_rate, live, size)
    return interleaved(arms, rounds)


def _rate(live: LiveRows, size: int, number: int) -> float:
    subject = live.subject
    drafting, tuner = subject.drafting(size), RuleTuner(subject.strategy)
    return live.decode(size, number, drafting=drafting, tuner=tuner).rate


def _rate_beside(live: LiveRows, size: int, neighbour: Connection, number: int) -> float:
    neighbour.send("train")
    neighbour.recv()
    try:
        return _rate(live, size, number)
    finally:
        neighbour.send("wait")
        neighbour.recv()


def _rows(rates: dict[str, list[float]]) -> list[dict[str, Any]]:
    rows = []
    for size in LIVE_BATCHES:
        waiting, training, again = (
            rates[f"{name} {size}"] for name in ("waiting", "training", "again")
        )
        both = [(one + other) / 2 for one, other in zip(waiting, again, strict=True)]
        kept, moved = ratio_interval(training, both), ratio_interval(again, waiting)
        rows.append(
            {
                "live_batch": size,
                "tokens_per_s": median_interval(both)["median"],
                "slowdown": 1 - kept["median"],
                "low": 1 - kept["high"],
                "high": 1 - kept["low"],
                "between_waiting": 1 - moved["median"],
            }
        )
    return rows


@contextmanager
def _neighbour(share: float, seed: int) -> Iterator[Connection]:
    """A process that trains a drafter when told to."""
    with worker_environment() as context:
        ours, theirs = context.Pipe()
        process = context.Process(target=_train_on_demand, args=(theirs, share, seed), daemon=True)
        process.start()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def _train_on_demand(orders: Connection, share: float, seed: int) -> None:
    end_with_parent(lambda: None)
    torch.set_num_threads(1)
    session = spot_session(TrainerOptions(compute_dtype=DTYPES[fast_dtype()]), seed)
    while True:
        if orders.recv() == "train":
            session.run_once()
            orders.send("training")
            rest = 0.0
            while not orders.poll(rest):
                started = time.monotonic()
                session.run_once()
                rest = (time.monotonic() - started) * (1.0 / share - 1.0)
        else:
            orders.send("waiting")
