"""Which worker's failure is the cause when several fail at once.

A worker whose colleague is lost in the middle of a common sum fails as well, with an error that
speaks of sockets. What counts is who died without a word, else who failed first.
"""

from __future__ import annotations

import errno
import pickle
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NoReturn

from ratoon.cluster.messages import Failed
from ratoon.errors import RatoonError, WorkerDiedError, WorkerLostError

# How long to wait for the failures of others, once one has failed.
GRACE_S = 0.5
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Died:
    """The process ended and said nothing; `silent` if it was ended because of that."""

    pid: int
    exit_code: int | None
    silent: bool = False


def portable(error: BaseException) -> BaseException:
    """`error` itself if it survives the way through a pipe, else its type and text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever an exception's own pickling may raise
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def raise_cause(
    first: int,
    known: Failed | None,
    connections: Sequence[Connection],
    processes: Sequence[BaseProcess],
    silent: Collection[int] = (),
) -> NoReturn:
    """Raise in the driver what ended worker `first`, or the worker that drew it down.

    `known` is its last message, if that was read already; `silent` are the workers that were ended
    because they gave no sign of life.

    Raises: WorkerDiedError if it ended without a word; RatoonError as the worker raised it; OSError
    if a disk is full; else WorkerLostError.
    """
    deadline = time.monotonic() + GRACE_S
    found: dict[int, Failed | Died] = {}
    for index in (first, *(other for other in range(len(processes)) if other != first)):
        failure: Failed | Died | None = known if index == first else None
        if failure is None:
            failure = _last_word(connections[index], processes[index], deadline)
        if failure is not None:
            found[index] = failure
    cause = min(found, key=lambda index: _place(found[index]), default=first)
    failure = found.get(cause, Died(processes[first].pid or 0, None))
    if isinstance(failure, Died) and cause in silent:
        failure = replace(failure, silent=True)
    _raise(cause, failure)


def _last_word(
    connection: Connection, process: BaseProcess, deadline: float
) -> Failed | Died | None:
    """How a worker failed; None if it has not by the deadline. Its other messages are dropped."""
    resets = 0
    while True:
        ready = wait([connection, process.sentinel], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        if connection not in ready:
            break
        try:
            message = connection.recv()
        except ConnectionResetError:
            # Said once of a closed pipe; what was sent before can still be read.
            resets += 1
            if resets > 1:
                break
        except (EOFError, OSError):
            break
        else:
            if isinstance(message, Failed):
                return message
    process.join(GRACE_S)
    return Died(process.pid or 0, process.exitcode)


def _place(failure: Failed | Died) -> float:
    return failure.at_s if isinstance(failure, Failed) else float("-inf")


def _raise(index: int, failure: Failed | Died) -> NoReturn:
    if isinstance(failure, Died):
        name = f"worker {index} (process {failure.pid})"
        if failure.silent:
            raise WorkerDiedError(
                f"{name} gave no sign of life for longer than workers.timeout_s and was ended; a "
                "process that is stopped, or swapped out, looks like that"
            )
        raise WorkerDiedError(
            f"{name} ended with exit code {failure.exit_code} without a word; a negative code is "
            "the signal that killed it, and -9 often means that memory ran out: lower "
            "rollout.max_batch or workers.count"
        )
    error = failure.error
    error.add_note(f"in worker {index}:\n{failure.traceback}")
    if isinstance(error, RatoonError):
        raise error
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        raise error
    raise WorkerLostError(f"worker {index} failed: {type(error).__name__}: {error}") from error
