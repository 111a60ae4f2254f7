"""Limits how much of its device's memory a process may take: a run's memory_limit, and the free memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from drivetrain.errors import problem

LEAST_LEFT = 64 * 2**20  # bytes to the limit, or nothing can be begun
SAFE_SHARE = 0.9  # of what is free on a CPU: beyond it the kernel may end any process of the machine
TRIED_SHARE = 0.95  # of a limit, or of a GPU: a training takes some more than its steps do (meters, fragments)


@contextmanager
def limited(most: int | None, device: str, field: str = "memory_limit") -> Iterator[None]:
    """While the block runs, allocations beyond `most` bytes fail. Raises UserError if the process takes as much
    already.

    field: the key of the run file that set it.

    On a CPU the limit is for memory that the kernel counts as data (RLIMIT_DATA: heap, private maps, stacks of threads;
    not files and libraries); on a GPU for memory that PyTorch's allocator holds.
    """
    if most is None:
        yield
    elif device == "cuda":
        gpu = torch.cuda.current_device()
        whole = torch.cuda.get_device_properties(gpu).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / whole), gpu)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, gpu)
    else:
        import resource

        taken = data_bytes()
        if taken + LEAST_LEFT > most:
            mebibytes = (most >> 20, taken >> 20, LEAST_LEFT >> 20)
            why = "a process may take {} MiB; it takes {} before it begins, and works in {} at the least"
            raise problem(field, why.format(*mebibytes), "end what else takes memory, or give more where it is limited")
        before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)


def data_bytes() -> int:
    """Returns the bytes that RLIMIT_DATA counts for this process; 0 where the system does not report them."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("VmData:")), "VmData: 0 kB")
    return int(line.split()[1]) * 1024


def trial_limit(limit: int | None, device: str, processes: int) -> int:
    """Returns the bytes that each process may take while it tries what fits. processes: on this machine, which share
    it."""
    if limit is not None:
        return int(limit * TRIED_SHARE)
    if device == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory * TRIED_SHARE)
    return safe_limit(processes)


def safe_limit(processes: int) -> int:
    """Returns the bytes that each CPU process may take without the machine running out."""
    free = min([psutil.virtual_memory().available, *_cgroup_left()])
    return data_bytes() + int(free * SAFE_SHARE) // processes


def attainable_memory() -> int:
    """Returns the bytes that processes of this machine could still get at the most: what is free, what the kernel would
    give back of its cache of files, and swap."""
    if sys.platform == "darwin":  # memory is compressed there, and swap grows on demand
        return psutil.virtual_memory().total
    free = min([psutil.virtual_memory().available, *_cgroup_left(with_cache=True)])
    return free + psutil.swap_memory().free


def _cgroup_left(with_cache: bool = False) -> list[int]:
    """Returns what is left of a container's memory, where it has a limit (cgroup v2, v1). with_cache: count the files
    that the kernel holds for the container, and would give back, as free."""
    for folder, most, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit, taken = (Path(folder, name).read_text().strip() for name in (most, used))
        except OSError:
            continue
        if limit.isdigit():
            return [int(limit) - int(taken) + (_cached_files(Path(folder, "memory.stat")) if with_cache else 0)]
    return []


def _cached_files(statistics: Path) -> int:
    """Returns the bytes of files in a container's memory; 0 where the kernel does not report them."""
    try:
        words = statistics.read_text().split()
    except OSError:
        return 0
    found = dict(zip(words[::2], words[1::2], strict=False))
    names = ("active_file", "inactive_file")
    total = sum(int(found.get(f"total_{name}", 0)) for name in names)  # cgroup v1, groups within counted
    return total or sum(int(found.get(name, 0)) for name in (*names, "slab_reclaimable"))
