"""Tries what a run on a GPU depends on: NCCL, Triton and NVML.

Each try is a process of its own (`python -m drivetrain.doctor.tries`), because a broken library may crash or hang. The
same tries work on a CPU, with gloo in NCCL's place and C++ in Triton's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

NAMES = ("NCCL", "Triton", "NVML")
SECONDS = 120.0  # a compiler's first start takes most of a minute
Answer = tuple[str, str]  # yes, no or "not tried", and what was seen


def tried(device: str, count: int) -> dict[str, Answer]:
    """Returns an answer for each of NAMES. device: "cpu" or "cuda"; count: GPUs that NCCL is to join."""
    if device != "cuda":
        return dict.fromkeys(NAMES, ("not tried", "PyTorch sees no GPU here"))
    return {"NCCL": joined("nccl", device, count), "Triton": compiled(device), "NVML": managed()}


def joined(backend: str, device: str, world: int, seconds: float = SECONDS) -> Answer:
    """Sums a tensor over `world` ranks of a backend, one a GPU."""
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        meeting = str(Path(folder) / "store")
        given = [["join", backend, device, str(rank), str(world), meeting] for rank in range(world)]
        return _together(given, seconds)


def compiled(device: str, seconds: float = SECONDS) -> Answer:
    """Compiles a small function for the device and compares its result with the uncompiled one's."""
    return _together([["compile", device]], seconds)


def managed(seconds: float = SECONDS) -> Answer:
    """Queries NVIDIA's management library for the first GPU."""
    return _together([["nvml"]], seconds)


def _together(given: Sequence[Sequence[str]], seconds: float) -> Answer:
    """Returns the answer of the first of several processes, or of the one that failed first: the others may wait for
    it for ever."""
    children = [_started(arguments) for arguments in given]
    deadline = time.monotonic() + seconds
    with ThreadPoolExecutor(len(children)) as pool:  # read all the time: a full pipe would stop a process
        outputs = [pool.submit(child.communicate) for child in children]
        while not all(each.done() for each in outputs) and time.monotonic() < deadline and not _failed(children):
            time.sleep(0.05)
        failed = _failed(children)
        is_over = all(child.poll() is not None for child in children)
        for child in children:
            child.kill()
        if failed:
            lines = outputs[failed[0]].result()[1].strip().splitlines()
            whose = f"rank {failed[0]}: " if len(children) > 1 else ""
            code = children[failed[0]].returncode
            return "no", f"{whose}exit code {code}: {lines[-1][:300] if lines else 'without an error'}"
        if not is_over:
            return "no", f"hangs: no answer within {seconds:.0f} s"
        return "yes", json.loads(outputs[0].result()[0].splitlines()[-1])


def _failed(children: Sequence[subprocess.Popen[str]]) -> list[int]:
    """Returns the numbers of processes that ended with an error."""
    return [number for number, child in enumerate(children) if child.poll()]


def _started(arguments: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "drivetrain.doctor.tries", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# --- in the process of a try -----------------------------------------------------------------------------------------


def _join(backend: str, device: str, rank: str, world: str, meeting: str) -> str:
    number, size = int(rank), int(world)
    own = torch.device(device, number) if device == "cuda" else torch.device(device)
    bound = own if device == "cuda" else None
    if bound is not None:
        torch.cuda.set_device(bound)
    store = dist.FileStore(meeting, size)
    dist.init_process_group(backend, store=store, rank=number, world_size=size, device_id=bound)
    ones = torch.ones(2**18, device=own)
    dist.all_reduce(ones)
    summed = bool((ones == size).all())
    dist.destroy_process_group()
    if not summed:
        raise RuntimeError(f"{backend} summed {size} ones to {ones[0].item()}")
    label = ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else backend
    return f"{label}: summed over {size} rank{'s' if size > 1 else ''}"


def _compile(device: str) -> str:
    def function(values: Tensor) -> Tensor:
        return torch.nn.functional.gelu(values).sum(-1)

    values = torch.linspace(-3, 3, 64 * 128, device=device).view(64, 128)
    torch.testing.assert_close(torch.compile(function)(values), function(values), rtol=1e-4, atol=1e-4)
    try:
        found = f"Triton {version('triton')}" if device == "cuda" else "C++"
    except PackageNotFoundError:
        found = "Triton, of a package with another name"
    return f"{found}: a compiled function gives what the uncompiled one does"


def _nvml() -> str:
    from drivetrain.measure.nvml import Gpu, driver_version

    gpu = Gpu(torch.device("cuda", torch.cuda.current_device()))
    share = gpu.read()
    known = {"utilisation": share, **gpu.extra()}
    absent = [name for name, value in known.items() if value is None]
    return f"driver {driver_version()}" + (f"; it does not know {', '.join(absent)}" if absent else "; all figures")


_TRIES: dict[str, Callable[..., str]] = {"join": _join, "compile": _compile, "nvml": _nvml}

if __name__ == "__main__":
    print(json.dumps(_TRIES[sys.argv[1]](*sys.argv[2:])))
