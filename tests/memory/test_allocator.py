"""malloc's thresholds, seen by where a freed block goes. In a process of its own: they cannot be put back."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from drivetrain.memory.allocator import keep_freed_blocks
assert not {keep} or keep_freed_blocks()
for _ in range(20):
    torch.ones(2**24)  # until the heap has found its size
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(2**24)  # 64 MiB, above glibc's largest threshold of its own
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc only")
def test_freed_blocks_are_reused_instead_of_faulted_in_again() -> None:
    faults = {}
    for keep in (False, True):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(keep=keep)], capture_output=True, text=True, check=True
        )
        faults[keep] = int(done.stdout)
    assert faults[False] > 20 * 30  # at least one fault a huge page
    assert faults[True] < 0.1 * faults[False]
