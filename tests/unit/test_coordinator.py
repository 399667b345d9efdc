"""The coordinator's decisions, checked on every reachable state of small worlds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ratoon.coordinator.decide import (
    EndRollout,
    HandGroup,
    Snapshot,
    StartTraining,
    StopTraining,
    WorkerView,
    decide,
)
from ratoon.coordinator.states import WorkerState, transition


def apply(snapshot: Snapshot, action: object) -> Snapshot:
    """The world right after the driver carried out an action."""
    if isinstance(action, EndRollout):
        return snapshot
    workers = list(snapshot.workers)
    worker = workers[action.worker]
    queued = snapshot.queued
    if isinstance(action, HandGroup):
        state = worker.state
        if state is not WorkerState.ROLLOUT:
            state = transition(state, WorkerState.ROLLOUT)
        worker = replace(worker, state=state, unfinished=worker.unfinished + queued[0])
        queued = queued[1:]
    elif isinstance(action, StartTraining):
        worker = replace(worker, state=transition(worker.state, WorkerState.DRAFTER_TRAINING))
    elif isinstance(action, StopTraining):
        worker = replace(worker, state=transition(worker.state, WorkerState.STOPPING))
    workers[action.worker] = worker
    return replace(snapshot, workers=tuple(workers), queued=queued)


def events(snapshot: Snapshot) -> list[Snapshot]:
    """All the news that may arrive next: a response finishes, or a training stop is confirmed."""
    following = []
    for index, worker in enumerate(snapshot.workers):
        changed = None
        if worker.unfinished:
            left = worker.unfinished - 1
            state = worker.state if left else transition(worker.state, WorkerState.IDLE)
            changed = replace(worker, unfinished=left, state=state, trainable_tokens=10)
        elif worker.state is WorkerState.STOPPING:
            changed = replace(worker, state=transition(worker.state, WorkerState.IDLE))
        if changed is not None:
            workers = (*snapshot.workers[:index], changed, *snapshot.workers[index + 1 :])
            following.append(replace(snapshot, workers=workers))
    return following


def settle(snapshot: Snapshot) -> tuple[Snapshot, bool]:
    """Carry out decisions until there are none; whether the rollout ended."""
    while actions := decide(snapshot):
        for action in actions:
            if isinstance(action, EndRollout):
                return snapshot, True
            snapshot = apply(snapshot, action)
    return snapshot, False


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("queued", [(1,), (2, 2), (1, 3, 1), (5,)])
@pytest.mark.parametrize("spot", [True, False])
def test_every_interleaving_ends_with_all_responses_done_and_nobody_training(
    num_workers: int, queued: tuple[int, ...], spot: bool
) -> None:
    idle = tuple(WorkerView(i, WorkerState.IDLE, 0, 0) for i in range(num_workers))
    frontier, seen, ended = [Snapshot(idle, queued, 2, spot)], set(), 0
    while frontier:
        world, done = settle(frontier.pop())
        if world in seen:
            continue
        seen.add(world)
        if done:
            ended += 1
            assert not world.queued
            assert all(w.unfinished == 0 and w.state is WorkerState.IDLE for w in world.workers)
            continue
        following = events(world)
        assert following, f"nothing can happen any more in {world}"
        frontier.extend(following)
    assert ended


def test_queued_work_is_never_left_lying_for_training() -> None:
    workers = (
        WorkerView(0, WorkerState.ROLLOUT, 2, 0),
        WorkerView(1, WorkerState.IDLE, 0, 99),
    )
    assert decide(Snapshot(workers, (2,), 2, True)) == (HandGroup(1),)


def test_an_idle_worker_trains_while_another_decodes() -> None:
    workers = (
        WorkerView(0, WorkerState.ROLLOUT, 1, 0),
        WorkerView(1, WorkerState.IDLE, 0, 99),
    )
    assert decide(Snapshot(workers, (), 2, True)) == (StartTraining(1),)
    assert decide(Snapshot(workers, (), 2, False)) == ()


def test_training_stops_when_the_last_response_is_done() -> None:
    workers = (
        WorkerView(0, WorkerState.IDLE, 0, 0),
        WorkerView(1, WorkerState.DRAFTER_TRAINING, 0, 99),
    )
    assert decide(Snapshot(workers, (), 2, True)) == (StopTraining(1),)


def test_an_illegal_transition_names_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="allowed: idle, lost"):
        transition(WorkerState.ROLLOUT, WorkerState.UPDATE)
