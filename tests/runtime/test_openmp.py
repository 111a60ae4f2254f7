"""Tests that a thread which waits has no helpers of its own, which would slow down those of others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch  # noqa: F401  whose OpenMP is looked for
from threadpoolctl import threadpool_info

from drivetrain.runtime.hardware import usable_cores

# imports, and a way to count the threads that the kernel knows of this process; one that ends is there a little longer
BEGINNING = """
import os, threading, time
import torch
from drivetrain.runtime.openmp import end_helpers
def compute():
    torch.ones(600, 600) @ torch.ones(600, 600)
    torch.ones(2**20).exp()
def count():
    return len(os.listdir("/proc/self/task"))
def comes_to(number):
    until = time.monotonic() + 60
    while count() != number:
        assert time.monotonic() < until, (count(), number)
        time.sleep(0.01)
compute(), end_helpers(), time.sleep(0.5)
alone, helpers = count(), torch.get_num_threads() - 1
"""


def run(code: str) -> None:
    if not any(each["prefix"] == "libgomp" for each in threadpool_info()):
        pytest.skip("PyTorch computes here with another OpenMP than GNU's, which does not count its threads")
    if usable_cores() < 2:
        pytest.skip("there is one core, on which PyTorch computes without helpers")
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    line = [sys.executable, "-c", BEGINNING + code]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_the_helpers_of_a_thread_end_and_come_again_with_its_next_operation() -> None:
    run(
        """
for _ in range(2):
    compute()
    comes_to(alone + helpers)
    end_helpers()
    comes_to(alone)
"""
    )


def test_helpers_of_other_threads_stay() -> None:
    run(
        """
computed, over = threading.Event(), threading.Event()
def other():
    compute(), computed.set(), over.wait()
thread = threading.Thread(target=other, daemon=True)
thread.start(), computed.wait()
compute()
comes_to(alone + 1 + 2 * helpers)
end_helpers()
comes_to(alone + 1 + helpers)
time.sleep(0.5)
comes_to(alone + 1 + helpers)
"""
    )


def test_while_a_generator_answers_only_its_own_thread_has_helpers_and_none_while_it_is_idle() -> None:
    run(
        """
from drivetrain.generation.requests import Request
from tests.generation.small_models import generator_of, model_of
model = model_of("llama")
model.register_forward_pre_hook(lambda *_: compute())
compute(), end_helpers(), time.sleep(0.5)
alone = count()  # a thread of PyTorch's own may have come
seen = []
generator = generator_of(model)  # tries the model on this thread
comes_to(alone + 1)
compute()
comes_to(alone + 1 + helpers)
generator.answers([Request((1, 2, 3), 2)])
comes_to(alone + 1)
generator.submit(Request((1, 2, 3), 4), lambda piece: seen.append(count()))
while len(seen) < 4:
    time.sleep(0.01)
assert set(seen) == {alone + 1 + helpers}, (seen, alone)
comes_to(alone + 1)
generator.close()
"""
    )
