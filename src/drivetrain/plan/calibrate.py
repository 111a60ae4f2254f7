"""Calibrates this machine: measures one process, then two at once, in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.config.machine import Machine
from drivetrain.data.loading_speed import picture_seconds
from drivetrain.errors import RunError
from drivetrain.measure.other_programs import OtherPrograms
from drivetrain.memory.allocator import keep_freed_blocks
from drivetrain.plan.calibrate_collectives import measured_collectives
from drivetrain.plan.calibrate_device import measured_speeds
from drivetrain.plan.calibrate_repeats import Repeats
from drivetrain.plan.calibration import Calibration, Curve, DeviceSpeeds, kept_at

PAIR = 2
PATIENCE = 600  # seconds in which processes that measure have to answer
TF32 = (8, 0)  # the compute capability from which products are rounded to tf32 in hardware
DISK_BYTES = 64 * 2**20

Found = tuple[DeviceSpeeds, dict[str, Curve]]


def calibrated(machine: Machine, report: Callable[[str], None]) -> Calibration:
    """Measures the machine and returns the calibration. report: receives a line before each part.

    Raises RunError if a process that measures fails.
    """
    start, others = time.perf_counter(), OtherPrograms()
    report("pictures and disk")
    pictures = Repeats(lambda number: [number]).shortest(picture_seconds)
    disk = _disk_write_bytes(kept_at(machine).parent)
    report("products, attention, convolutions, memory: one process")
    alone, _ = _in_processes(1, machine)
    together: DeviceSpeeds | None = None
    collectives: dict[str, Curve] = {}
    if machine.device == "cpu" or machine.device_count >= PAIR:
        report("the same in two processes at once, and collectives between them")
        together, collectives = _in_processes(PAIR, machine)
    return Calibration(
        device=machine.device,
        device_name=machine.device_name,
        device_count=machine.device_count,
        cores=machine.cpu_cores,
        torch=torch.__version__,
        made_at=time.strftime("%Y-%m-%dT%H:%M:%S"),
        took_seconds=time.perf_counter() - start,
        foreign_cores=others.cores(),
        alone=alone,
        together=together,
        collectives=collectives,
        picture_seconds=pictures,
        disk_write_bytes=disk,
    )


def measured_dtypes(machine: Machine) -> list[str]:
    """Returns the types of products to measure: what the device multiplies itself, tfloat32 included. Emulated ones
    say nothing about speed, and would take minutes."""
    able = machine.compute_capability is not None and machine.compute_capability >= TF32
    return sorted({*machine.native_dtypes, *(["tfloat32"] if able else [])})


def _disk_write_bytes(folder: Path) -> float:
    folder.mkdir(parents=True, exist_ok=True)
    content = os.urandom(2**20) * (DISK_BYTES // 2**20)
    with tempfile.TemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return DISK_BYTES / (time.perf_counter() - start)


def _in_processes(world: int, machine: Machine) -> Found:
    """Returns what the first of `world` processes measured, all of which measure at the same time."""
    context = multiprocessing.get_context("spawn")
    threads = max(1, machine.cpu_cores // world)
    dtypes = measured_dtypes(machine)
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(world):
            here, there = context.Pipe()
            arguments = (rank, world, machine.device, threads, dtypes, str(Path(folder) / "store"), there)
            processes.append(context.Process(target=_rank, args=arguments, daemon=True))
            processes[-1].start()
            there.close()
            ends.append(here)
        try:
            answers = [_answer(end) for end in ends]
        finally:
            for process in processes:
                process.kill()
                process.join()
    return answers[0]


def _answer(end: Connection) -> Found:
    if not wait([end], timeout=PATIENCE):
        raise RunError(f"a process that measures gave no answer in {PATIENCE} s")
    try:
        found, failure = end.recv()
    except EOFError:
        raise RunError("a process that measures ended without an answer; is there enough memory?") from None
    if failure is not None:
        raise RunError(f"measuring failed: {failure}")
    return found


def _rank(rank: int, world: int, device: str, threads: int, dtypes: list[str], store: str, end: Connection) -> None:
    """Measures in one of the processes, and sends (result, error)."""
    answer: tuple[Any, str | None]
    try:
        answer = _measured(rank, world, device, threads, dtypes, store), None
    except Exception as error:
        answer = None, f"{type(error).__name__}: {error}"
    end.send(answer)
    end.recv()  # until the parent ends this process: gloo's threads may still need the group


def _measured(rank: int, world: int, device: str, threads: int, dtypes: list[str], store: str) -> Found:
    torch.set_num_threads(threads)
    keep_freed_blocks()  # as a run does
    on = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    if on.type == "cuda":
        torch.cuda.set_device(on)
    backend = "gloo" if on.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.FileStore(store, world), rank=rank, world_size=world)
    repeats = Repeats(_everyone)
    return measured_speeds(on, dtypes, repeats), measured_collectives(on, repeats) if world > 1 else {}


def _everyone(number: float) -> list[float]:
    found = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    found[dist.get_rank()] = number
    dist.all_reduce(found)
    return found.tolist()
