"""Workers as processes of this machine."""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn

from ratoon.cluster import worker
from ratoon.cluster.failures import raise_cause
from ratoon.cluster.heartbeat import forget, silent_s
from ratoon.cluster.messages import Call, Failed, Returned, Shutdown
from ratoon.cluster.spec import WorkerSpec
from ratoon.errors import CapabilityError, ConfigError
from ratoon.observe.files import FolderLock
from ratoon.processes import hold_interrupts

SHUTDOWN_S = 5.0
# How often it is looked whether workers live, while nothing is heard of them.
WATCH_S = 1.0
SHARED_PREFIX = "ratoon-workers-"
# For the workers' C library: huge pages for weights (a fifth faster decoding where the system
# allows it), and large buffers kept instead of given back, so that the next batch does not have to
# clear the same memory again (a sixth faster updates).
KEEP_BYTES = 1 << 33
ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"
    f":glibc.malloc.mmap_threshold={KEEP_BYTES}:glibc.malloc.trim_threshold={KEEP_BYTES}"
}


class LocalWorkers:
    """Starts the workers, passes messages, and ends all of them whatever happens.

    Use as a context manager. Any failure of a worker is raised in the driver by the next call.
    """

    def __init__(self, specs: Sequence[WorkerSpec]) -> None:
        self._specs = specs
        self.descriptions: list[dict[str, Any]] = []
        self._start()

    def _start(self) -> None:
        context, specs = multiprocessing.get_context("spawn"), self._specs
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._lost: set[int] = set()
        self._silent: set[int] = set()
        added = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
        added["OMP_NUM_THREADS"] = str(specs[0].threads)
        saved = {name: os.environ.get(name) for name in added}
        os.environ.update(added)
        try:
            for spec in specs:
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=worker.main,
                    args=(spec, theirs),
                    name=f"worker {spec.index}",
                    daemon=True,
                )
                with hold_interrupts():
                    process.start()
                    self._connections.append(ours)
                    self._processes.append(process)
                theirs.close()
        except BaseException:
            self._kill()
            raise
        finally:
            _restore(saved)

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def numerics(self) -> Literal["invariant", "tolerant"]:
        """`invariant` if every worker proved it."""
        proven = all(item["numerics"] == "invariant" for item in self.descriptions)
        return "invariant" if proven else "tolerant"

    def wait_until_ready(self) -> None:
        """Wait for all workers to load; fills `descriptions`."""
        self.descriptions = self._answers("start", range(len(self)))

    def survivors(self) -> list[int]:
        """The workers that live; nothing is heard of the others until `restart`."""
        self._lost = {i for i, process in enumerate(self._processes) if not process.is_alive()}
        return [index for index in range(len(self)) if index not in self._lost]

    def restart(self) -> None:
        """End those that are left and start all anew, without what the old ones knew."""
        self._kill()
        self.close()
        for spec in self._specs:
            forget(spec.folder, spec.index)
            spec.rendezvous.unlink(missing_ok=True)
        self._start()
        self.wait_until_ready()

    def send(self, index: int, message: object) -> None:
        """Send a message that has no answer."""
        try:
            self._connections[index].send(message)
        except (BrokenPipeError, ConnectionResetError):
            self._fail(index, None)

    def call(self, index: int, method: str, **arguments: Any) -> Any:
        """Call a method of one worker and wait for the answer; it must not be busy."""
        self.send(index, Call(method, arguments))
        return self._answer(index, method)

    def call_all(
        self, method: str, each: Sequence[Mapping[str, Any]] | None = None, **arguments: Any
    ) -> list[Any]:
        """Call a method of all workers at once; `each` adds arguments of their own."""
        for index in range(len(self)):
            own = each[index] if each is not None else {}
            self.send(index, Call(method, {**arguments, **own}))
        return self._answers(method, range(len(self)))

    def call_some(self, indices: Sequence[int], method: str, **arguments: Any) -> list[Any]:
        """Call a method of some workers at once."""
        for index in indices:
            self.send(index, Call(method, arguments))
        return self._answers(method, indices)

    def call_busy(self, method: str) -> None:
        """Call a method of all that live in the midst of work; what else they say is dropped."""
        missing = set(range(len(self))) - self._lost
        for index in missing:
            self.send(index, Call(method))
        while missing:
            for index, message in self.receive():
                if isinstance(message, Returned) and message.method == method:
                    missing.discard(index)

    def receive(self, timeout_s: float | None = None) -> list[tuple[int, object]]:
        """Messages that have arrived, with their worker; waits for the first."""
        living = [index for index in range(len(self)) if index not in self._lost]
        connections = [self._connections[index] for index in living]
        sentinels = [self._processes[index].sentinel for index in living]
        ready = self._wait([*connections, *sentinels], timeout_s)
        messages = []
        for index in living:
            if self._connections[index] in ready:
                messages.append((index, self._receive(index)))
            elif self._processes[index].sentinel in ready:
                self._fail(index, None)
        return messages

    def _wait(
        self, handles: Sequence[Connection | int], timeout_s: float | None = None
    ) -> list[Any]:
        """The handles that are ready; meanwhile workers that are silent too long are ended."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            ready = wait(handles, min(WATCH_S, max(0.0, left)))
            if ready:
                return ready
            self._end_silent()
            if left <= WATCH_S:
                return []

    def _end_silent(self) -> None:
        for spec, process in zip(self._specs, self._processes, strict=True):
            if process.is_alive() and silent_s(spec.folder, spec.index) > spec.timeout_s:
                self._silent.add(spec.index)
                process.kill()

    def close(self) -> None:
        """End all workers; those that do not listen are killed."""
        for connection, process in zip(self._connections, self._processes, strict=True):
            if process.is_alive():
                try:
                    connection.send(Shutdown())
                except (BrokenPipeError, ConnectionResetError):
                    continue
        for process in self._processes:
            process.join(SHUTDOWN_S)
            if process.is_alive():
                process.kill()
                process.join()
        for connection in self._connections:
            connection.close()

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            # Whoever waits for a lost colleague would not hear a polite request.
            self._kill()
        self.close()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _answers(self, method: str, indices: Sequence[int]) -> list[Any]:
        """One answer of each of these, in any order: a failure is raised as soon as it is known."""
        answers: dict[int, Any] = {}
        while len(answers) < len(indices):
            for index, message in self.receive():
                answers[index] = _value(message, method)
        return [answers[index] for index in indices]

    def _answer(self, index: int, method: str) -> Any:
        self._wait([self._connections[index]])
        return _value(self._receive(index), method)

    def _receive(self, index: int) -> object:
        try:
            message = self._connections[index].recv()
        except (EOFError, ConnectionResetError):
            self._fail(index, None)
        if isinstance(message, Failed):
            self._fail(index, message)
        return message

    def _fail(self, index: int, message: Failed | None) -> NoReturn:
        raise_cause(index, message, self._connections, self._processes, self._silent)


@contextmanager
def shared_folder(needed_bytes: int = 0) -> Iterator[Path]:
    """A private folder for the workers, in memory where the system has room for it there.

    It is removed at the end of the block. What runs left that were killed with all their workers is
    removed before.

    Raises: CapabilityError if there is no room on the disk for temporary files either.
    """
    places = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    places = [place for place in places if place.is_dir() and os.access(place, os.W_OK)]
    for place in places:
        sweep_orphans(place)
    roomy = [place for place in places if shutil.disk_usage(place).free >= needed_bytes]
    if not roomy:
        raise CapabilityError(
            f"the workers share {needed_bytes / 1e6:,.0f} MB, for which neither /dev/shm nor "
            f"{tempfile.gettempdir()} has room; free some, or set TMPDIR to a folder on another "
            "disk"
        )
    # It gets the name that is swept when it is locked, so that nobody takes it for an orphan.
    hidden = Path(tempfile.mkdtemp(prefix=f".{SHARED_PREFIX}", dir=roomy[0]))
    lock = FolderLock(hidden)
    folder = hidden.rename(hidden.with_name(hidden.name[1:]))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def sweep_orphans(place: Path) -> None:
    """Remove this user's shared folders whose run has ended without removing them.

    The lock tells: a run holds it for as long as it lives, whatever becomes of process numbers.
    """
    for folder in place.glob(f"{SHARED_PREFIX}*"):
        with suppress(OSError, ConfigError):
            if folder.lstat().st_uid != os.getuid():
                continue
            lock = FolderLock(folder)
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()


def _value(message: object, method: str) -> Any:
    if not isinstance(message, Returned) or message.method != method:
        raise RuntimeError(f"expected the answer to {method}, got {message!r:.200}")
    return message.value


def _restore(saved: Mapping[str, str | None]) -> None:
    for name, value in saved.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
