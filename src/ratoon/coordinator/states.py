"""States of a worker and the transitions that may happen."""

from __future__ import annotations

from enum import Enum


class WorkerState(Enum):
    """What a worker is doing."""

    LOADING = "loading"
    ROLLOUT = "rollout"
    IDLE = "idle"
    DRAFTER_TRAINING = "drafter training"
    STOPPING = "stopping"
    UPDATE = "update"
    LOST = "lost"


_ALLOWED: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.LOADING: frozenset({WorkerState.IDLE, WorkerState.LOST}),
    WorkerState.IDLE: frozenset(
        {
            WorkerState.ROLLOUT,
            WorkerState.DRAFTER_TRAINING,
            WorkerState.UPDATE,
            WorkerState.LOADING,
            WorkerState.LOST,
        }
    ),
    WorkerState.ROLLOUT: frozenset({WorkerState.IDLE, WorkerState.LOST}),
    WorkerState.DRAFTER_TRAINING: frozenset({WorkerState.STOPPING, WorkerState.LOST}),
    WorkerState.STOPPING: frozenset({WorkerState.IDLE, WorkerState.LOST}),
    WorkerState.UPDATE: frozenset({WorkerState.IDLE, WorkerState.LOST}),
    WorkerState.LOST: frozenset(),
}


def transition(current: WorkerState, target: WorkerState) -> WorkerState:
    """`target`, if a worker may go there from `current`; `ValueError` otherwise."""
    if target not in _ALLOWED[current]:
        allowed = ", ".join(sorted(state.value for state in _ALLOWED[current])) or "nothing"
        raise ValueError(
            f"a worker cannot go from {current.value} to {target.value}; allowed: {allowed}"
        )
    return target
