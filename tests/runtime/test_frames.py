"""Looking at the frames of all threads never stops the process."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from drivetrain.runtime.frames import all_frames, other_frames

WITH_GARBAGE = """
import gc, threading, time
from drivetrain.runtime.frames import all_frames

class Circle:
    def __init__(self):
        self.own = self
    def __del__(self):
        time.sleep(1e-4)  # lets other threads run

def begin_threads():
    while not ended.is_set():
        each = threading.Thread(target=int)
        each.start()
        each.join()

gc.set_threshold(1)
ended = threading.Event()
starter = threading.Thread(target=begin_threads)
starter.start()
for _ in range(200):
    Circle()
    all_frames().clear()
ended.set()
starter.join()
"""


@pytest.fixture(params=[True, False])
def collects(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether Python collects garbage."""
    if not request.param:
        gc.disable()
    yield request.param
    gc.enable()


def test_a_collection_while_other_threads_begin_does_not_stop_the_process() -> None:
    """On Python 3.11 `sys._current_frames` did, within a few calls."""
    subprocess.run([sys.executable, "-c", WITH_GARBAGE], check=True, timeout=120)


def test_garbage_is_collected_afterwards_as_before(collects: bool) -> None:
    all_frames().clear()
    assert gc.isenabled() == collects


def test_the_frames_of_all_threads_are_given_and_those_of_the_others() -> None:
    stands, go_on = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        go_on.wait()

    thread = threading.Thread(target=stand)
    thread.start()
    stands.wait()
    others = other_frames()
    every = all_frames()
    own, there = threading.get_ident(), thread.ident
    assert there in every
    assert own in every
    assert there in others
    assert own not in others
    every.clear()
    go_on.set()
    thread.join()
