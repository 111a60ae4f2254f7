"""Signals become a request; outside they stay as they were."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from drivetrain.runtime.signals import stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_request_and_the_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert stop.signal_number is None
        os.kill(os.getpid(), number)
        assert stop.signal_number == number
    assert signal.getsignal(number) == before


def test_the_second_ctrl_c_does_not_wait() -> None:
    with stop_on_signals():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    seen = []

    def elsewhere() -> None:
        with stop_on_signals() as stop:
            seen.append(stop.signal_number)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [None]
