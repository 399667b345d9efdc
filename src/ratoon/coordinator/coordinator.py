"""A rollout's state: what each worker does and has. A decision costs the same for any number.

News come in through the methods, `next_actions` says what to do, and `apply` notes that it was
done. It reads no clock and sends nothing, so that the same code runs a real rollout, a simulated
one, and every interleaving of a small one.
"""

from __future__ import annotations

from collections.abc import Iterable

from ratoon.coordinator.decide import (
    Action,
    EndRollout,
    Snapshot,
    StartTraining,
    StopTraining,
    decide,
)
from ratoon.coordinator.planner import HandOut, Planner
from ratoon.coordinator.states import WorkerState, transition

Task = tuple[int, int]


class Coordinator:
    """One rollout of `num_workers` idle workers."""

    def __init__(self, num_workers: int, planner: Planner, *, spot_training: bool) -> None:
        self.states = [WorkerState.IDLE] * num_workers
        self._planner = planner
        self._spot_training = spot_training
        # (group, member) of what each worker has, in the order of handing out.
        self._tasks: list[dict[Task, None]] = [{} for _ in range(num_workers)]
        self._trainable = [0] * num_workers
        self._handed_out = 0
        self._idle = dict.fromkeys(range(num_workers))
        self._training: dict[int, None] = {}
        self._stopping = 0
        self._there = num_workers

    def next_actions(self, now: float) -> tuple[Action, ...]:
        """What to do, to be carried out in order and told by `apply`; empty: wait for news."""
        return decide(self.snapshot(now))

    def snapshot(self, now: float) -> Snapshot:
        """What `decide` looks at."""
        queued = self._planner.queued
        return Snapshot(
            proposal=self._planner.next(now) if queued else None,
            queued=queued,
            unfinished=queued + self._handed_out,
            training=tuple(self._training),
            stopping=self._stopping,
            settled=len(self._idle) == self._there,
            candidate=None if queued or self._training else self._candidate(),
            spot_training=self._spot_training,
        )

    def apply(self, action: Action, now: float) -> None:
        """An action was carried out."""
        if isinstance(action, EndRollout):
            return
        worker = action.worker
        if isinstance(action, HandOut):
            self._planner.handed(action, now)
            self._tasks[worker] |= {(action.group, member): None for member in action.members}
            self._handed_out += len(action.members)
            if self.states[worker] is not WorkerState.ROLLOUT:
                self._enter(worker, WorkerState.ROLLOUT)
        elif isinstance(action, StartTraining):
            self._planner.close(worker)
            self._enter(worker, WorkerState.DRAFTER_TRAINING)
        elif isinstance(action, StopTraining):
            self._enter(worker, WorkerState.STOPPING)

    def finished(
        self, worker: int, responses: Iterable[tuple[Task, int]], trainable_tokens: int
    ) -> None:
        """A worker returned responses of so many tokens, and has so many to train on.

        Raises: RuntimeError if it did not have one of them.
        """
        tasks = self._tasks[worker]
        for task, tokens in responses:
            if task not in tasks:
                raise RuntimeError(f"worker {worker} returned {task}, which it was not given")
            del tasks[task]
            self._handed_out -= 1
            self._planner.finished(worker, task[0], tokens)
        self._trainable[worker] = trainable_tokens
        if not tasks:
            self._enter(worker, WorkerState.IDLE)

    def stopped(self, worker: int) -> None:
        """A worker ended its drafter training."""
        self._enter(worker, WorkerState.IDLE)
        self._planner.open(worker)

    def lost(self, worker: int) -> None:
        """A worker is gone. What it had is drawn by others: the same keys, the same tokens."""
        if self.states[worker] not in (WorkerState.DRAFTER_TRAINING, WorkerState.STOPPING):
            self._planner.close(worker)
        groups: dict[int, list[int]] = {}
        for group, member in self._tasks[worker]:
            groups.setdefault(group, []).append(member)
        for group, members in groups.items():
            self._planner.returned(worker, group, tuple(members))
        self._handed_out -= len(self._tasks[worker])
        self._tasks[worker] = {}
        self._enter(worker, WorkerState.LOST)
        self._there -= 1

    def tasks(self, worker: int) -> tuple[Task, ...]:
        """What a worker has been given and not returned."""
        return tuple(self._tasks[worker])

    def _candidate(self) -> int | None:
        """Asked for only when nobody trains: from the end of the queue to the first start."""
        able = [worker for worker in self._idle if self._trainable[worker]]
        return max(able, key=lambda worker: (self._trainable[worker], -worker), default=None)

    def _enter(self, worker: int, state: WorkerState) -> None:
        before = self.states[worker]
        self.states[worker] = transition(before, state)
        self._idle.pop(worker, None)
        self._training.pop(worker, None)
        self._stopping += (state is WorkerState.STOPPING) - (before is WorkerState.STOPPING)
        if state is WorkerState.IDLE:
            self._idle[worker] = None
        elif state is WorkerState.DRAFTER_TRAINING:
            self._training[worker] = None
