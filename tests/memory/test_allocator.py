"""malloc's thresholds, seen by where a freed block goes (in a process of its own: they cannot be put back), and what
CUDA's allocator is told."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Any

import pytest
import torch

from drivetrain.config.run import RunConfig
from drivetrain.launch.elastic import environment_of_ranks
from drivetrain.launch.job import Job
from drivetrain.memory.allocator import GIVEN, SEGMENTS, grow_segments, growing_segments

RUN: dict[str, Any] = {"workload": {"type": "module", "path": "x.py"}, "batch_size": 4, "loop": {"steps": 1}}

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


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A build of torch with CUDA, whose allocator remembers what it is told."""
    words: list[str] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", words.append)
    for name in GIVEN:
        monkeypatch.delenv(name, raising=False)
    return words


def test_on_a_gpu_segments_grow(cuda: list[str]) -> None:
    assert growing_segments() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert grow_segments()
    assert cuda == ["expandable_segments:True"]


@pytest.mark.parametrize("name", GIVEN)
def test_a_user_who_has_set_the_allocator_is_left_alone(
    name: str, cuda: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128")
    assert growing_segments() == {}
    assert not grow_segments()
    assert not cuda


def test_ranks_get_it_before_they_start_cuda(cuda: list[str]) -> None:
    for allocator, wanted in (("auto", SEGMENTS), ("keep", SEGMENTS), ("system", None)):
        task = Job(verb="train", run=RunConfig.model_validate({**RUN, "allocator": allocator}))
        assert environment_of_ranks(task, 2).get("PYTORCH_ALLOC_CONF") == wanted
    assert not cuda


def test_without_cuda_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert growing_segments() == {}
