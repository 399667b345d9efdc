"""Faults for worker processes, and a driver that meets them on the command line.

`main` replaces the workers' entry point: it reads the faults from the file that an environment
variable names, puts them in place, and goes on as a worker. As a program,
`python faults.py rl CONFIG` is `ratoon rl CONFIG` with such workers.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ratoon.cluster import worker
from ratoon.cluster.drafter_unit import DrafterUnit
from ratoon.cluster.exchange import DrafterExchange
from ratoon.cluster.spec import WorkerSpec
from ratoon.cluster.training_unit import TrainingUnit
from ratoon.drafter.spot_trainer import SpotSession
from ratoon.rollout.native.engine import RolloutEngine

VARIABLE = "RATOON_TEST_FAULTS"
PATIENCE_S = 120.0
# Where a fault strikes: the owner of a method that the phase calls, and its name.
PHASES: dict[str, tuple[Any, str]] = {
    "loading": (worker, "load_decoder"),
    "rollout": (RolloutEngine, "step"),
    "spot": (SpotSession, "run_once"),
    "publish": (DrafterExchange, "publish"),
    "update": (TrainingUnit, "update"),
    "sft": (TrainingUnit, "train_batch"),
    "save": (TrainingUnit, "save"),
}


def main(spec: WorkerSpec, connection: Connection) -> None:
    """A worker with the faults that the environment asks for."""
    faults = json.loads(Path(os.environ[VARIABLE]).read_text(encoding="utf-8"))
    log = Path(faults["log"])
    if faults.get("hold_tail"):
        hold_tail(log)
    for fault in faults.get("faults", ()):
        if fault["worker"] in (spec.index, None):
            owner, name = PHASES[fault["phase"]]
            act = ACTIONS[fault["action"]]
            setattr(owner, name, act(getattr(owner, name), log, spec))
    worker.main(spec, connection)


def note(log: Path, **event: object) -> None:
    """Append an event, whole, to the log that the test reads."""
    with log.open("a") as file:
        file.write(json.dumps(event) + "\n")


def _raise(original: Callable[..., Any], log: Path, spec: WorkerSpec) -> Callable[..., Any]:
    def act(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("injected")

    return act


def _kill(original: Callable[..., Any], log: Path, spec: WorkerSpec) -> Callable[..., Any]:
    def act(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    return act


def _once(signal_number: int) -> Callable[..., Any]:
    """Send this process a signal the first time that any worker comes here."""

    def make(original: Callable[..., Any], log: Path, spec: WorkerSpec) -> Callable[..., Any]:
        marker = log.with_suffix(".struck")

        def act(*args: Any, **kwargs: Any) -> Any:
            if not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal_number)
            return original(*args, **kwargs)

        return act

    return make


def _hang(original: Callable[..., Any], log: Path, spec: WorkerSpec) -> Callable[..., Any]:
    def act(*args: Any, **kwargs: Any) -> Any:
        note(log, hangs=spec.index, folder=str(spec.folder))
        threading.Event().wait()

    return act


def _announce(original: Callable[..., Any], log: Path, spec: WorkerSpec) -> Callable[..., Any]:
    def act(*args: Any, **kwargs: Any) -> Any:
        note(log, enters=spec.index)
        return original(*args, **kwargs)

    return act


def _corrupt(original: Callable[..., Any], log: Path, spec: WorkerSpec) -> Callable[..., Any]:
    def act(self: DrafterExchange, *args: Any) -> int:
        slot: int = original(self, *args)
        self._slots[slot][0] += 1
        return slot

    return act


def _overtake(original: Callable[..., Any], log: Path, spec: WorkerSpec) -> Callable[..., Any]:
    """Every publication is followed by others at once, so that none is read in time."""

    def act(self: SpotSession) -> bool:
        before = self._spot.version
        went_on: bool = original(self)
        if self._spot.version > before:
            for _ in range(4):
                self._spot.publish()
        return went_on

    return act


ACTIONS = {
    "raise": _raise,
    "kill": _kill,
    "kill once": _once(signal.SIGKILL),
    "stop once": _once(signal.SIGSTOP),
    "hang": _hang,
    "announce": _announce,
    "corrupt": _corrupt,
    "overtake": _overtake,
}


def hold_tail(log: Path) -> None:
    """Worker 0 draws one token of each response, then waits for another worker's drafter.

    So spot training happens in every rollout, whatever the machine is busy with.
    """
    decode_once, begin_rollout = worker.Worker._decode_once, worker.Worker.begin_rollout
    take = DrafterUnit.take
    state = {"taken": False, "begun": False}

    def begin(self: worker.Worker, **kwargs: Any) -> None:
        state["taken"] = state["begun"] = False
        begin_rollout(self, **kwargs)

    def taking(self: DrafterUnit, message: Any) -> None:
        take(self, message)
        state["taken"] = True
        note(log, took=message.version, serves=self._served_version)

    def decode(self: worker.Worker, rollout: Any) -> None:
        engine = rollout.engine
        waits = self.spec.index == 0 and self.spec.count > 1 and engine.collect
        if waits and state["begun"] and not state["taken"]:
            if not self._connection.poll(PATIENCE_S):
                raise TimeoutError("no drafter was published while a response waited")
            return
        decode_once(self, rollout)
        state["begun"] = engine._stats.rows_decoded > 0

    begin.is_callable_by_driver = True  # type: ignore[attr-defined]
    worker.Worker.begin_rollout = begin  # type: ignore[method-assign]
    worker.Worker._decode_once = decode  # type: ignore[method-assign]
    DrafterUnit.take = taking  # type: ignore[method-assign]


if __name__ == "__main__":
    import faults  # so that workers import it under this name

    from ratoon.cluster import local

    local.worker = faults  # type: ignore[assignment]
    from ratoon.cli.main import main as command_line

    # A shell's background process inherits an ignored Ctrl-C; one of a terminal does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command_line()
