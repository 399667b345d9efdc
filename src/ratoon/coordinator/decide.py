"""The rule that runs a rollout: who gets work, who trains the drafter, when all is done.

A worker that has nothing left trains the drafter for as long as another one still decodes; it is
told to stop when the last response is done, or when there is work again. No response ever waits for
drafter training. Who gets which work is the planner's proposal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ratoon.coordinator.planner import HandOut


class Snapshot(NamedTuple):
    """All that a decision depends on. Its size does not depend on the number of workers.

    `proposal` is what the planner would hand out now, `queued` the responses that nobody has,
    `unfinished` those and the ones that workers have. `training` are the workers that train,
    `stopping` counts those told to stop, `settled` is whether all workers there are wait for work.
    `candidate` is the idle worker with the most to train on.
    """

    proposal: HandOut | None
    queued: int
    unfinished: int
    training: tuple[int, ...]
    stopping: int
    settled: bool
    candidate: int | None
    spot_training: bool


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


Action = HandOut | StartTraining | StopTraining | EndRollout


def decide(snapshot: Snapshot) -> tuple[Action, ...]:
    """What to do now. Deterministic; an empty answer means: wait for news."""
    if snapshot.queued or not snapshot.unfinished:
        stops = tuple(StopTraining(worker) for worker in snapshot.training)
        if stops:
            return stops
    if snapshot.proposal is not None:
        return (snapshot.proposal,)
    if snapshot.queued:
        return ()
    if snapshot.unfinished:
        return _train(snapshot)
    return (EndRollout(),) if snapshot.settled else ()


def _train(snapshot: Snapshot) -> tuple[Action, ...]:
    """One worker trains at a time."""
    busy = snapshot.training or snapshot.stopping
    if not snapshot.spot_training or busy or snapshot.candidate is None:
        return ()
    return (StartTraining(snapshot.candidate),)
