"""The process that computes rewards, seen from both ends. Imports no torch.

Protocol over one pipe: the worker first sends None (ready) or the error that kept it from
starting; then, for each task received, one outcome. A closed pipe ends it.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

from ratoon.errors import RatoonError, RewardError
from ratoon.processes import end_with_parent, hold_interrupts, survive_termination
from ratoon.records import Prompt
from ratoon.rl.rewards.base import Response, RewardSum

FailureKind = Literal["raised", "not_a_number", "timeout", "died"]
# Beyond its time limit a worker whose parent is gone ends itself after so many seconds.
_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of one response, and how long they took in seconds."""

    parts: dict[str, float]
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """Why there is no score; `detail` is for the user."""

    kind: FailureKind
    detail: str


Outcome = Scored | Failed


class RewardWorker:
    """One reward process and the pipe to it. Used by one thread, but for `kill`."""

    def __init__(self, rewards: RewardSum, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._has_ended = False
        self._kill_lock = threading.Lock()
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, rewards, timeout_s), name="ratoon-reward", daemon=True
        )
        with hold_interrupts():
            self._process.start()
        theirs.close()  # So that the pipe ends when the worker does.

    @property
    def pid(self) -> int:
        """Process id of the worker, which leads its own process group."""
        return self._process.pid or 0

    @property
    def has_ended(self) -> bool:
        """Whether `kill` was called: by the owner, or here because the worker failed."""
        return self._has_ended

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the rewards are imported; a worker that cannot is killed.

        Raises:
            RatoonError: as raised by `RewardSum.load` in the worker.
            RewardError: if the worker died or took too long.
        """
        try:
            if not self._connection.poll(timeout_s):
                raise RewardError(
                    f"The rewards were not imported within {timeout_s:g} s. Does a module of "
                    "yours start work when it is imported?"
                )
            error = self._connection.recv()
            if error is not None:
                raise error
        except (EOFError, OSError):
            self.kill()
            raise RewardError(
                "A reward process ended while it imported the rewards; its messages are above."
            ) from None
        except RatoonError:
            self.kill()
            raise

    def score(self, prompt: Prompt, response: Response) -> Outcome:
        """Score one response; a worker that hangs is killed. Blocks up to the time limit."""
        try:
            self._connection.send((prompt, response))
            if not self._connection.poll(self._timeout_s):
                self.kill()
                return Failed("timeout", f"it took longer than {self._timeout_s:g} s")
            outcome: Outcome = self._connection.recv()
        except (EOFError, OSError):
            # Waiting on the sentinel keeps the process unreaped, so that `kill` hits its group.
            multiprocessing.connection.wait([self._process.sentinel], timeout=1.0)
            self.kill()
            return Failed("died", f"its process ended (exit code {self._process.exitcode})")
        return outcome

    def kill(self) -> None:
        """End the worker and every process that it started. Any thread may call this."""
        with self._kill_lock:
            if self._has_ended:
                return  # Its process id may belong to others by now.
            self._has_ended = True
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (AttributeError, ProcessLookupError, PermissionError):
                self._process.kill()  # No groups on this system, or not a group of its own yet.
            self._process.join()


def _serve(connection: Connection, rewards: RewardSum, timeout_s: float) -> None:
    """Body of the worker process."""
    if hasattr(os, "setsid"):
        os.setsid()  # Its own group: killed with its children.
        survive_termination()
        end_with_parent(lambda: os.killpg(0, signal.SIGKILL))
    try:
        rewards.load()
    except RatoonError as error:
        connection.send(error)
        return
    connection.send(None)
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - os.devnull is no path
        while True:
            try:
                prompt, response = connection.recv()
            except EOFError:
                return
            # A C thread that needs no interpreter lock: ends even a worker whose parent is gone
            # while a regular expression runs away.
            faulthandler.dump_traceback_later(timeout_s + _GRACE_S, exit=True, file=nowhere)
            outcome = _score(rewards, prompt, response)
            faulthandler.cancel_dump_traceback_later()
            try:
                connection.send(outcome)
            except OSError:
                return


def _score(rewards: RewardSum, prompt: Prompt, response: Response) -> Outcome:
    begin = time.perf_counter()
    try:
        parts = rewards.parts(prompt, response)
    except RewardError as error:
        return Failed("not_a_number", str(error))
    except Exception as error:  # noqa: BLE001 - user code; what it raised is the outcome
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Failed(
            "raised", f"{type(error).__name__}: {error} (line {where.lineno} of {where.filename})"
        )
    return Scored(parts, time.perf_counter() - begin)
