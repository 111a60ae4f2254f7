"""Tests where a process stands, read from the stacks that faulthandler writes."""

from __future__ import annotations

import faulthandler
from pathlib import Path

import pytest
import torch

from drivetrain.launch.diagnostics.process_state import PendingCollective, Standing, read_stacks

TORCH = Path(torch.__file__).parent
HEAD = 'Thread 0x00007f (most recent call first):\n  File "/a/loader.py", line 3 in wait\n\nCurrent thread 0x01:\n'


def test_the_main_threads_frames_are_read_from_faulthandlers_own_words(tmp_path: Path) -> None:
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.dump_traceback(file)
    found = read_stacks((tmp_path / "stacks").read_text())
    name = "test_the_main_threads_frames_are_read_from_faulthandlers_own_words"
    assert found.inner.startswith("test_process_state.py:")
    assert found.inner.endswith(name)
    assert found.own == found.inner
    assert (found.call, "test_process_state.py" in found.stacks) == ("", True)


@pytest.mark.parametrize(
    ("frames", "call"),
    [
        (["distributed/distributed_c10d.py:all_reduce", "distributed/c10d_logger.py:wrapper"], "all_reduce"),
        (["autograd/graph.py:_engine_run_backward", "autograd/__init__.py:backward"], "backward"),
        (["distributed/distributed_c10d.py:all_reduce", "autograd/__init__.py:backward"], "all_reduce"),
        (["nn/functional.py:linear"], ""),
    ],
)
def test_the_call_that_waits_for_other_ranks_is_named(frames: list[str], call: str) -> None:
    split = [frame.partition(":") for frame in frames]
    lines = [f'  File "{TORCH / file}", line 5 in {name}' for file, _, name in split]
    found = read_stacks("\n".join([HEAD.rstrip(), *lines, '  File "/home/me/model.py", line 7 in step', ""]))
    assert (found.call, found.own) == (call, "model.py:7 step")
    assert found.inner == f"{Path(split[0][0]).name}:5 {split[0][2]}"


@pytest.mark.parametrize(("call", "on_gpu", "waits"), [("wait", False, True), ("", True, True), ("", False, False)])
def test_what_was_begun_last_is_waited_for_in_a_call_or_on_a_gpu(call: str, on_gpu: bool, waits: bool) -> None:
    first, newest = (PendingCollective("0", number, "all_reduce of 3 Float", on_gpu) for number in (1, 2))
    where = Standing(own="model.py:7 step", call=call, pending=[first, newest])
    assert where.waits_for == (newest if waits else None)
    assert where.place == ("0 2" if waits else "model.py:7 step")
