"""Rewards in worker processes, while other responses still decode.

One thread owns one worker process: it hands over one response at a time, waits for the score no
longer than the time limit, and replaces a worker that hangs or dies. Responses that wait for a
worker stay in this process.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

from ratoon.errors import RewardError
from ratoon.records import Prompt
from ratoon.rl.rewards.base import Response, RewardSum
from ratoon.rl.rewards.worker import Failed, FailureKind, Outcome, RewardWorker

_START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The score of one submitted response.

    Example: `RewardResult(key=("arithmetic/train", 7, 0), score=1.1, parts={"number": 1.0,
    "format": 1.0}, failure=None, seconds=0.0001)` with a format weight of 0.1.
    """

    key: Hashable
    score: float
    parts: Mapping[str, float]
    failure: FailureKind | None
    seconds: float = field(compare=False)


@dataclass(frozen=True, slots=True)
class _Task:
    index: int
    key: Hashable
    prompt: Prompt
    response: Response


class RewardPool:
    """Scores responses in the background. Use as a context manager, or call `close`.

    Attributes:
        failures: how many responses got no score so far, by kind.
    """

    def __init__(
        self,
        rewards: RewardSum,
        *,
        num_workers: int = 1,
        timeout_s: float = 10.0,
        on_error: Literal["fail", "count"] = "fail",
    ) -> None:
        """Start the workers and wait until each has imported the rewards.

        Args:
            rewards: what to compute.
            num_workers: processes.
            timeout_s: longest time for one response, all rewards together. Seconds.
            on_error: a reward that raises, hangs, kills its process, or returns no finite number
                raises in `poll` and `drain` (`"fail"`), or scores 0 and is counted (`"count"`).

        Raises:
            ConfigError: if the user's function cannot be imported.
            CapabilityError: if a package is missing.
            RewardError: if a worker does not start.
        """
        self.failures: Counter[FailureKind] = Counter()
        self._rewards, self._timeout_s, self._on_error = rewards, timeout_s, on_error
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[tuple[_Task, Outcome] | BaseException] = (
            queue.SimpleQueue()
        )
        self._num_submitted = 0
        self._pending: set[int] = set()
        self._lock = threading.Lock()
        self._is_closing = False
        self._workers: list[RewardWorker] = []
        self._slots: list[threading.Thread] = []
        try:
            started = [self._start_worker() for _ in range(num_workers)]
            for worker in started:
                worker.wait_ready(_START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        for worker in started:
            slot = threading.Thread(
                target=self._run_slot, args=(worker,), name="ratoon-reward-slot", daemon=True
            )
            self._slots.append(slot)
            slot.start()

    @property
    def num_pending(self) -> int:
        """Responses submitted whose results have not been handed out."""
        return len(self._pending)

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        with self._lock:
            return tuple(worker.pid for worker in self._workers if not worker.has_ended)

    def submit(
        self, key: Hashable, prompt: Prompt, text: str, num_tokens: int | None = None
    ) -> None:
        """Queue one response; returns at once.

        Args:
            key: comes back with the result.
            prompt: what was asked.
            text: the decoded response, without special tokens.
            num_tokens: its length, for rewards that judge that.
        """
        if self._is_closing:
            raise RewardError("The reward pool is closed.")
        task = _Task(self._num_submitted, key, prompt, Response(text, num_tokens))
        self._num_submitted += 1
        self._pending.add(task.index)
        self._tasks.put(task)

    def poll(self) -> list[RewardResult]:
        """Results that have arrived since the last call, in the order of submission.

        Raises:
            RewardError: if a reward failed and `on_error` is `"fail"`.
        """
        arrived = []
        while True:
            try:
                arrived.append(self._arrived.get_nowait())
            except queue.Empty:
                return self._deliver(arrived)

    def drain(self) -> list[RewardResult]:
        """Wait for all pending results; returns them in the order of submission.

        Raises:
            RewardError: if a reward failed and `on_error` is `"fail"`; of several failures always
                the one submitted first, and responses behind it are not waited for.
        """
        arrived: list[tuple[_Task, Outcome] | BaseException] = []
        missing = set(self._pending)
        failed: list[int] = []
        while missing:
            item = self._arrived.get()
            arrived.append(item)
            if isinstance(item, BaseException):
                break
            task, outcome = item
            missing.discard(task.index)
            if self._on_error == "fail" and isinstance(outcome, Failed):
                failed.append(task.index)
            if failed and min(failed) < min(missing, default=self._num_submitted):
                break
        return self._deliver(arrived)

    def close(self) -> None:
        """End all workers, whatever they do; results that were not fetched are lost."""
        with self._lock:
            self._is_closing = True
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()
        for _ in self._slots:
            self._tasks.put(None)
        for slot in self._slots:
            slot.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _deliver(self, arrived: list[tuple[_Task, Outcome] | BaseException]) -> list[RewardResult]:
        scored: list[tuple[_Task, Outcome]] = []
        for item in arrived:
            if isinstance(item, BaseException):
                raise RewardError(f"The reward pool broke down: {item}") from item
            scored.append(item)
            self._pending.discard(item[0].index)
        return [self._result(*pair) for pair in sorted(scored, key=lambda pair: pair[0].index)]

    def _result(self, task: _Task, outcome: Outcome) -> RewardResult:
        if not isinstance(outcome, Failed):
            total = self._rewards.total(outcome.parts)
            return RewardResult(task.key, total, outcome.parts, None, outcome.seconds)
        self.failures[outcome.kind] += 1
        if self._on_error == "fail":
            raise RewardError(
                f"The reward of a response to {task.prompt.dataset}, row {task.prompt.row}, "
                f"failed: {outcome.detail.rstrip('.')}. To score such responses 0 and count them, "
                "set reward_runtime.on_error: count, also to go on with this run by --resume."
            )
        return RewardResult(task.key, 0.0, {}, outcome.kind, 0.0)

    def _start_worker(self) -> RewardWorker:
        with self._lock:
            if self._is_closing:
                raise RewardError("The reward pool is closed.")
            worker = RewardWorker(self._rewards, self._timeout_s)
            self._workers = [other for other in self._workers if not other.has_ended]
            self._workers.append(worker)
        return worker

    def _run_slot(self, worker: RewardWorker) -> None:
        """Body of a thread: feed one worker after the other."""
        while (task := self._tasks.get()) is not None:
            try:
                if worker.has_ended:
                    worker = self._start_worker()
                    worker.wait_ready(_START_TIMEOUT_S)
                outcome = worker.score(task.prompt, task.response)
            except Exception as error:  # noqa: BLE001 - handed to the caller by `poll`
                if self._is_closing:
                    return
                self._arrived.put(error)
            else:
                self._arrived.put((task, outcome))
