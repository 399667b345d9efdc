"""Processes that end with the one that started them, and leave signals to it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Start processes in here, and a terminal's Ctrl-C reaches this process alone.

    What is started inherits a blocked SIGINT. One that arrives here meanwhile is delivered at the
    end of the block.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # Started with the first process otherwise, and it unblocks SIGINT on its way.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def survive_termination() -> None:
    """From here on SIGTERM does nothing: one that is sent to a group is the parent's business.

    Whoever ends this process must kill it.
    """
    # A handler, since what is ignored would be ignored by programs started from here, too.
    signal.signal(signal.SIGTERM, lambda number, frame: None)


def end_with_parent(last_act: Callable[[], None]) -> None:
    """From here on this process ends when its parent does, whatever it waits for.

    A thread watches; it does `last_act` before. Code that holds the interpreter's lock delays it.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        try:
            last_act()
        finally:
            os._exit(1)

    threading.Thread(target=watch, name="ratoon-parent-watch", daemon=True).start()
