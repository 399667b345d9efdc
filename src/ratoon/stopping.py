"""Signals that ask a run to stop: the first one in order, a second one at once.

A run that has something to save looks at `Stop` where nothing is torn by ending there; until then
a signal ends it at once.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# As the shell counts: 128 and the number of the signal.
KILLED = 128
# EX_TEMPFAIL of sysexits.h: not a failure; try again.
STOPPED = 75
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal ends the run at once."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.exit_code = KILLED + number


class Stopped(KeyboardInterrupt):
    """A signal ended the run in order: what was complete is saved."""

    exit_code = STOPPED


class Stop:
    """Whether a run has been asked to stop, `is_asked`. Without `on_signals` it never is.

    `notify` is told when the first signal has been noted.
    """

    def __init__(self, notify: Callable[[str], None] = lambda text: None) -> None:
        self._notify = notify
        self.is_asked = self._may_wait = self._may_raise = False

    @contextmanager
    def on_signals(self) -> Iterator[Stop]:
        """Mind SIGINT and SIGTERM in here. Of the main thread only.

        Raises: Interrupted wherever the code is, but for a first signal within `deferred`.
        """
        before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """In here the first signal is noted, and `check` raises."""
        self._may_wait = True
        try:
            yield
        finally:
            self._may_wait = False

    @contextmanager
    def at_any_moment(self) -> Iterator[None]:
        """Within `deferred`: in here the first signal raises Stopped wherever the code is."""
        self._may_raise = True
        try:
            self.check()
            yield
        finally:
            self._may_raise = False

    def check(self, message: str = "") -> None:
        """Raise Stopped, with the message, if a signal was noted."""
        if self.is_asked:
            raise Stopped(message)

    def ask(self) -> None:
        """Ask for a stop, as a first signal does."""
        self.is_asked = True
        self._notify("stopping after what cannot be interrupted; once more ends the run at once")
        if self._may_raise:
            raise Stopped

    def _handle(self, number: int, frame: object) -> None:
        if self._may_wait and not self.is_asked:
            self.ask()
            return
        # Whatever cleans up hangs: the next one ends the process.
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_DFL)
        raise Interrupted(number)
