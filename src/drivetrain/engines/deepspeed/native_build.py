"""Prepares DeepSpeed to start without compiling anything, or (nvme) with one build, which is announced and never left
half done."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from filelock import FileLock, Timeout

from drivetrain.distributed.communicator import Communicator
from drivetrain.errors import RunError, problem
from drivetrain.runtime import scratch
from drivetrain.runtime.extension_builds import build_folder, is_building, is_built
from drivetrain.runtime.scratch import Scratch

LOG = logging.getLogger(__name__)


def deepspeed_ready(device: str, nvme: bool) -> None:
    """Imports DeepSpeed and joins it to the existing process group.

    device: "cpu" or "cuda", on which the run computes. nvme: prepares its access to disks as well.
    """
    try:
        import deepspeed
    except ImportError as error:
        raise problem(
            "engine", f"deepspeed cannot be imported: {error}", "pip install 'drivetrain[deepspeed]'"
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # torch 2.13 has new names for what DeepSpeed 0.19 calls in every step
    warnings.filterwarnings("ignore", r"`torch.distributed.\w+_tensor` is deprecated", FutureWarning)
    if not dist.is_initialized():
        raise RunError("engine=deepspeed was asked for, but this process belongs to no group of ranks")
    _choose_device_anew(device)
    # collectives go through gloo or NCCL; its own shared-memory ones would be compiled for minutes at the first start
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    if nvme:
        _async_io_ready()


def _choose_device_anew(device: str) -> None:
    """Lets DeepSpeed choose its device again, by its variable, where an earlier run of this process had another one: it
    chooses once in a process, and would move the model there."""
    from deepspeed.accelerator import get_accelerator, real_accelerator

    if get_accelerator().device_name() != device:
        real_accelerator.ds_accelerator = None


def _async_io_ready() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder

    if not AsyncIOBuilder().is_compatible():
        fix = "apt install libaio-dev (or libaio-devel), or offload to cpu"
        raise problem("engine", "nvme needs libaio with its headers, and they were not found", fix)
    for builder in (PinMemoryBuilder(), AsyncIOBuilder()):  # the second is linked with the first
        built(builder.name, builder.load)


def built(name: str, load: Callable[[], object], patience: float = 60.0) -> None:
    """Loads a native extension; the first process of the machine compiles it, others wait for it.

    A killed process releases its file lock, but torch's own lock stays in the folder: an abandoned one is deleted.
    patience: seconds without a change after which a build by other software counts as dead.
    """
    folder = build_folder(name)
    if is_built(folder):
        load()
        return
    with _alone(folder):
        if (folder / "lock").exists():
            _until_it_ends(folder, patience)
        if is_built(folder):  # by whom we waited for
            load()
        else:
            _compile(folder, load)


def _compile(folder: Path, load: Callable[[], object]) -> None:
    LOG.warning("compiling DeepSpeed's %s, once on this machine (it takes minutes) ...", folder.name)
    shutil.rmtree(folder, ignore_errors=True)
    if shutil.which("ninja") is None:  # it comes with DeepSpeed; the environment need not be activated
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    began = time.monotonic()
    try:
        load()
    except (RuntimeError, ImportError, OSError) as error:
        why = f"DeepSpeed's {folder.name} could not be compiled: {str(error).strip()[-500:]}"
        raise problem("engine", why, "offload to cpu, or mend the compiler") from None
    LOG.warning("compiled %s in %.0f s; it is kept in %s", folder.name, time.monotonic() - began, folder)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds a lock, which the system releases when its holder dies."""
    lock = FileLock(folder.with_name(f"{folder.name}.drivetrain.lock"))
    try:
        lock.acquire(timeout=1)
    except Timeout:
        LOG.warning("another process compiles DeepSpeed's %s (it takes minutes); waiting for it ...", folder.name)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _until_it_ends(folder: Path, patience: float) -> None:
    """Waits for another program's build as long as it goes on, and deletes the remains of a dead one."""
    if is_building(folder, patience):
        LOG.warning("another program compiles %s; waiting for it ...", folder.name)
    while (folder / "lock").exists() and is_building(folder, patience):
        time.sleep(0.5)
    if (folder / "lock").exists():
        LOG.warning("an interrupted build of %s left a lock; starting it anew", folder.name)
        shutil.rmtree(folder, ignore_errors=True)


def swap_folder(parent: Path | None, communicator: Communicator) -> Scratch:
    """Returns a folder of this run alone: DeepSpeed's own file names are the same in every run."""
    assert parent is not None, "a rule asks for it"
    made: list[Scratch] = []

    def made_by_first() -> Path:
        with _on_its_disk():
            parent.mkdir(parents=True, exist_ok=True)
            made.append(scratch.make(parent))
        return made[0].path

    path = communicator.on_first(made_by_first)
    with _on_its_disk():
        parent.mkdir(parents=True, exist_ok=True)  # on the disks of other machines
        return made[0] if made else scratch.join(path)


@contextmanager
def _on_its_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise problem("engine.nvme_path", f"cannot be written: {error}", "give a folder on that disk") from None
