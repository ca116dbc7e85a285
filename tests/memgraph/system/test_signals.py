"""An exception from a signal waits until the state is consistent, and the handlers are restored."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from memgraph.system.signals import Interrupts


class Stopped(Exception):
    pass


def stop(*given: Any) -> None:
    raise Stopped


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1"])
def test_it_is_raised_where_it_is_asked_for(name: str) -> None:
    number = signal.Signals[name]
    before = signal.signal(number, stop)
    reached = []
    try:
        with pytest.raises(Stopped), Interrupts() as interrupts:
            signal.raise_signal(number)
            reached.append("behind the signal")
            interrupts.check()
            reached.append("behind the check")
        assert reached == ["behind the signal"]
        assert signal.getsignal(number) is stop
        with pytest.raises(Stopped), Interrupts():
            signal.raise_signal(number)
            signal.raise_signal(number)  # the second one does not wait
            reached.append("behind both")
        assert len(reached) == 1
    finally:
        signal.signal(number, before)


def test_what_the_system_handles_stays_with_it() -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
            signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_who_only_takes_note_of_a_signal_hears_of_it_after_an_error_too() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with pytest.raises(OSError, match="disk"), Interrupts():
            signal.raise_signal(signal.SIGTERM)
            raise OSError("the disk is full")
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signals_of_two_kinds_wait_for_each_other() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    plain = signal.signal(signal.SIGINT, stop)
    reached = []
    try:
        with pytest.raises(Stopped), Interrupts():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGUSR1)
            reached.append("the end")
        assert reached and heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.signal(signal.SIGINT, plain)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_between_leaves_no_other_without_its_handler(
    name: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, plain = signal.Signals[name], signal.signal
    before = {one: plain(one, stop) for one in (signal.SIGTERM, signal.SIGUSR1)}
    held = signal.getsignal(signal.SIGINT)

    def between(one: int, handler: Any) -> Any:
        found = plain(one, handler)
        if handler is stop if ends else one == signal.SIGINT:
            monkeypatch.undo()
            signal.raise_signal(number)
        return found

    try:
        with pytest.raises(Stopped):
            if ends:
                with Interrupts():
                    monkeypatch.setattr(signal, "signal", between)
            else:
                monkeypatch.setattr(signal, "signal", between)
                with Interrupts():
                    pass
        assert signal.getsignal(signal.SIGINT) is held
        assert all(signal.getsignal(one) is stop for one in before)
    finally:
        for one, handler in before.items():
            plain(one, handler)
