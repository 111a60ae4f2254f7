"""Tests that a process's own record outlives it, and one that works is distinguished from one that waits."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.launch.diagnostics.process_state import standing
from drivetrain.measure.throughput import Stopwatch
from drivetrain.runtime import heartbeat
from drivetrain.runtime.heartbeat import Heart, read

DYING = """
import os, sys
from pathlib import Path
from drivetrain.runtime.heartbeat import Heart
heart = Heart(Path(sys.argv[1]), 3).start()
heart.begin(41)
heart.batch(8, [5, 1, 4])
heart.enter("backward")
os.kill(os.getpid(), 9)
"""


def test_a_killed_process_leaves_what_it_was_doing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DYING, str(tmp_path / "pulse-0")], check=False)
    assert done.returncode == -9
    pulse = read(tmp_path / "pulse-0")
    assert pulse is not None
    assert (pulse.rank, pulse.step, pulse.part, pulse.batch, pulse.batch_size) == (
        3,
        41,
        "backward",
        (5, 1, 4, 0, 0, 0),
        8,
    )
    assert pulse.where == "step 41, backward"


def test_without_a_heart_there_is_no_pulse(tmp_path: Path) -> None:
    assert read(tmp_path / "pulse-0") is None


def test_a_part_is_left_for_the_one_around_it_also_when_it_fails() -> None:
    heart = Heart()
    stopwatch = Stopwatch(torch.device("cpu"), heart)
    with stopwatch.part("evaluation"):
        with pytest.raises(ValueError, match="forward"), stopwatch.part("forward"):
            raise ValueError(heart.read().part)
        assert heart.read().part == "evaluation"
    assert heart.read().part == ""


ENOUGH = 6  # moves that are no accident


def moves_of(
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[Callable[[], bool]], object],
    most: float,
    every: float = 0.02,
    **given: Any,
) -> int:
    """Moves of a thread's heart while it does something, until there are ENOUGH or `most` seconds are over."""
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", every)
    found: list[int] = []

    def trained() -> None:
        with Heart(**given) as heart:
            until = time.monotonic() + most
            work(lambda: heart.read().moves < ENOUGH and time.monotonic() < until)
            found.append(heart.read().moves)

    thread = threading.Thread(target=trained)
    thread.start()
    thread.join()
    return found[0]


def computes(goes_on: Callable[[], bool]) -> None:
    while goes_on():
        _ = sum(number * number for number in range(100))


def waits_for_a_thread(name: str) -> Callable[[Callable[[], bool]], None]:
    def both(goes_on: Callable[[], bool]) -> None:
        helper = threading.Thread(target=computes, args=(goes_on,), name=name)
        helper.start()
        helper.join()

    return both


def waits_for_a_process(code: str) -> Callable[[object], object]:
    return lambda _: subprocess.run([sys.executable, "-c", code], check=True)


class Large:
    """In place of a tensor, which takes references to it in the same way."""


@pytest.mark.parametrize("look", ["heart", "standing"])
def test_what_a_function_held_is_free_when_it_returns_though_its_thread_was_looked_at(
    monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    """Without a pass of Python's collector, which comes seldom while several ranks train."""
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.01)

    def work() -> weakref.ref[Large]:
        large, seen = Large(), heart.read().beats
        if look == "standing":
            watching = threading.Thread(target=standing, args=(threading.get_ident(), False))
            watching.start()
            watching.join()
        while heart.read().beats < seen + 3:
            time.sleep(0.01)
        return weakref.ref(large)

    gc.collect()
    gc.disable()
    try:
        with Heart() as heart:
            held = work()
        assert held() is None
    finally:
        gc.enable()


def test_a_thread_that_waits_beats_and_does_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[float] = []
    moves = moves_of(
        monkeypatch, lambda _: threading.Event().wait(0.5), 0.5, listener=lambda _, still: beats.append(still)
    )
    assert moves < ENOUGH, "into the wait and out of it"
    assert max(beats) > 0.2, "the seconds in which nothing went on"


def test_a_thread_that_goes_from_line_to_line_moves_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat.Heart, "_work", lambda _: (0.0, 0.0, 0.0))
    assert moves_of(monkeypatch, computes, 20) >= ENOUGH


def test_a_thread_that_computes_moves_though_it_is_always_seen_in_the_same_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat.Heart, "_place", lambda _: 0)
    assert moves_of(monkeypatch, computes, 20) >= ENOUGH
    assert moves_of(monkeypatch, computes, 0.5, spins=lambda: True) == 0, "it uses a processor to wait"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_a_thread_that_waits_for_a_process_which_computes_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat.Heart, "_place", lambda _: 0)
    idle = "import time; time.sleep(1.5)"
    busy = "import time\nwhile time.process_time() < 1.5: pass"
    counts = [moves_of(monkeypatch, waits_for_a_process(code), 0, every=0.2) for code in (idle, busy)]
    assert counts[1] > counts[0] + 2, "both start, which takes a moment"


def test_a_pool_that_computes_is_work_whatever_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat.Heart, "_place", lambda _: 0)
    assert moves_of(monkeypatch, waits_for_a_thread("of a user"), 20, every=0.1) >= ENOUGH


def test_a_pool_that_saves_counts_as_work_and_another_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat.Heart, "_work", lambda _: (0.0, 0.0, 0.0))
    assert moves_of(monkeypatch, waits_for_a_thread("saving_0"), 20) >= ENOUGH
    assert moves_of(monkeypatch, waits_for_a_thread("progress"), 0.5) < ENOUGH
