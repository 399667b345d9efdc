"""The rule that runs a rollout: who gets work, who trains the drafter, when all is done.

A worker that has nothing left trains the drafter for as long as another one still decodes; it is
told to stop when the last response is done. No response ever waits for drafter training.
"""

from __future__ import annotations

from dataclasses import dataclass

from ratoon.coordinator.states import WorkerState


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What the coordinator knows of one worker.

    `unfinished` counts the responses handed to it and not yet returned; `trainable_tokens` what
    its drafter buffer holds.
    """

    index: int
    state: WorkerState
    unfinished: int
    trainable_tokens: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a decision depends on.

    `queued` are the sizes of the groups not yet handed out, in order; `capacity` is how many
    responses a worker decodes at once; `spot_training` whether idle workers may train.
    """

    workers: tuple[WorkerView, ...]
    queued: tuple[int, ...]
    capacity: int
    spot_training: bool


@dataclass(frozen=True, slots=True)
class HandGroup:
    """Give the first queued group to a worker."""

    worker: int


@dataclass(frozen=True, slots=True)
class StartTraining:
    """Let an idle worker train the drafter."""

    worker: int


@dataclass(frozen=True, slots=True)
class StopTraining:
    """End a worker's drafter training within one micro-step."""

    worker: int


@dataclass(frozen=True, slots=True)
class EndRollout:
    """Every response is done and nobody trains: the next phase may begin."""


Action = HandGroup | StartTraining | StopTraining | EndRollout

_CAN_DECODE = frozenset({WorkerState.IDLE, WorkerState.ROLLOUT})


def decide(snapshot: Snapshot) -> tuple[Action, ...]:
    """What to do now. Deterministic; an empty answer means: wait for news."""
    unfinished = sum(worker.unfinished for worker in snapshot.workers)
    if snapshot.queued:
        return _hand_out(snapshot)
    if unfinished:
        return _train(snapshot)
    stops = tuple(
        StopTraining(worker.index)
        for worker in snapshot.workers
        if worker.state is WorkerState.DRAFTER_TRAINING
    )
    if stops:
        return stops
    if all(worker.state is WorkerState.IDLE for worker in snapshot.workers):
        return (EndRollout(),)
    return ()


def _hand_out(snapshot: Snapshot) -> tuple[Action, ...]:
    """The first group goes to the worker with the most room; one at a time, then look again.

    A group larger than a worker's capacity goes to a worker with nothing to do.
    """
    able = [worker for worker in snapshot.workers if worker.state in _CAN_DECODE]
    if not able:
        return ()
    best = min(able, key=lambda worker: (worker.unfinished, worker.index))
    if best.unfinished == 0 or best.unfinished + snapshot.queued[0] <= snapshot.capacity:
        return (HandGroup(best.index),)
    return ()


def _train(snapshot: Snapshot) -> tuple[Action, ...]:
    """One worker trains at a time: the idle one that has the most to train on."""
    if not snapshot.spot_training or any(
        worker.state in (WorkerState.DRAFTER_TRAINING, WorkerState.STOPPING)
        for worker in snapshot.workers
    ):
        return ()
    idle = [
        worker
        for worker in snapshot.workers
        if worker.state is WorkerState.IDLE
        and worker.unfinished == 0
        and worker.trainable_tokens > 0
    ]
    if not idle:
        return ()
    best = max(idle, key=lambda worker: (worker.trainable_tokens, -worker.index))
    return (StartTraining(best.index),)
