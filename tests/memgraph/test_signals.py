"""Whatever a signal raises waits until nothing is half done, and handlers are afterwards what they were."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from memgraph.interrupts import Interrupts


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
