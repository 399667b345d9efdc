"""Interleaved rounds, ratios within a round, and clocks on the parts of a step."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing.context import SpawnContext
from typing import Any, TypeVar

import torch

from ratoon.bench.intervals import median_interval
from ratoon.cluster.local import ENVIRONMENT
from ratoon.processes import end_with_parent

T = TypeVar("T")


def interleaved(arms: Mapping[str, Callable[[int], T]], rounds: int) -> dict[str, list[T]]:
    """Results of each arm by round; arms take turns within a round, so that all see the same noise.

    An arm is called with the number of its round, from 1. Round 0 warms up and is dropped. Every
    other round runs the arms in reverse, so that none always follows the same one.
    """
    results: dict[str, list[T]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        names = list(arms)[:: 1 if number % 2 else -1]
        for name in names:
            result = arms[name](number)
            if number:
                results[name].append(result)
    return results


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Median over rounds of the ratio within a round, with its 95 % bootstrap interval."""
    ratios = [above / below for above, below in zip(numerators, denominators, strict=True)]
    return median_interval(ratios)


class Stopwatch:
    """Adds up the seconds spent in callables that it was put around."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def around(self, parts: Mapping[str, tuple[Any, str]]) -> Iterator[Stopwatch]:
        """Time the attributes `(owner, name)` while the context lasts; parts must not nest."""
        originals = {label: getattr(owner, name) for label, (owner, name) in parts.items()}
        for label, (owner, name) in parts.items():
            setattr(owner, name, self._timed(label, originals[label]))
        try:
            yield self
        finally:
            for label, (owner, name) in parts.items():
                setattr(owner, name, originals[label])

    def take(self) -> dict[str, float]:
        """Seconds by part since the last call."""
        seconds, self.seconds = self.seconds, {}
        return seconds

    def _timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments, **named)
            elapsed = time.perf_counter() - start
            self.seconds[label] = self.seconds.get(label, 0.0) + elapsed
            return result

        return timed


@contextmanager
def worker_environment(threads: int = 1) -> Iterator[SpawnContext]:
    """Where processes start like a run's workers: with huge pages and so many threads."""
    added = {**ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    saved = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield multiprocessing.get_context("spawn")
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _begin_measuring(threads: int) -> None:
    end_with_parent(lambda: None)
    torch.set_num_threads(threads)


@contextmanager
def worker_pool(count: int = 1, threads: int = 1) -> Iterator[ProcessPoolExecutor]:
    """Processes like a run's workers; they end when the one that started them does.

    Each computes with `threads` threads.

    A process starts with its first job, so there is one for each in here.
    """
    with (
        worker_environment(threads) as context,
        ProcessPoolExecutor(count, context, _begin_measuring, (threads,)) as pool,
    ):
        wait([pool.submit(torch.get_num_threads) for _ in range(count)])
        yield pool
