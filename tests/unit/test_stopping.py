"""Signals: noted where a run can wait, and at once everywhere else."""

from __future__ import annotations

import os
import signal

import pytest

from ratoon.stopping import Interrupted, Stop, Stopped

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@BOTH
def test_a_signal_ends_what_has_nothing_to_save_at_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=number.name) as ended, Stop().on_signals():
        send(number)
    assert ended.value.exit_code == 128 + number
    assert signal.getsignal(number) is before


@BOTH
def test_the_first_signal_waits_for_a_check_and_the_second_for_nothing(
    number: signal.Signals,
) -> None:
    said: list[str] = []
    reached = []
    with Stop(said.append).on_signals() as stop, stop.deferred():
        stop.check()
        send(number)
        reached.append("after the first")
        assert stop.is_asked
        with pytest.raises(Stopped, match="step 3"):
            stop.check("step 3")
        with pytest.raises(Interrupted):
            send(number)
        # A third one kills: whatever cleans up may hang.
        assert signal.getsignal(number) is signal.SIG_DFL
    assert reached
    assert len(said) == 1


@BOTH
def test_where_nothing_can_be_torn_the_first_signal_raises(number: signal.Signals) -> None:
    with Stop().on_signals() as stop, stop.deferred():
        with pytest.raises(Stopped), stop.at_any_moment():
            send(number)
        with pytest.raises(Stopped), stop.at_any_moment():
            raise AssertionError("what was noted before raises on entry")


def test_without_signals_nothing_stops() -> None:
    stop = Stop()
    with stop.deferred(), stop.at_any_moment():
        stop.check()
