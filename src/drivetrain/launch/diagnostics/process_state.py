"""Describes where this process stands: the Python stack of each thread, the collective it waits in, its loader's
processes."""

from __future__ import annotations

import os
import pickle
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import psutil

from drivetrain.runtime.frames import all_frames
from drivetrain.runtime.heartbeat import WORKING

# torch's own records of what each group was asked for last, where it was built with them: gloo's and NCCL's
RECORDERS = {"gloo": "_dump_fr_trace", "nccl": "_dump_nccl_trace"}
_THEIRS = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_RANKS = os.path.join(_OWN, "distributed", "communicator.py")
_CHECKPOINT = os.path.join(_OWN, "checkpoint", "")
_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"
_BACKWARD = f"{os.sep}torch{os.sep}autograd{os.sep}"


@dataclass(frozen=True)
class PendingCollective:
    """A collective that was begun and has not ended. group: numbered as in torch, the same on all ranks."""

    group: str
    number: int
    what: str
    on_gpu: bool = False  # the program may be far ahead of it

    def __str__(self) -> str:
        return f"{self.what}, number {self.number} of group {self.group}"


@dataclass(frozen=True)
class Standing:
    inner: str = ""  # the innermost frame of the thread that trains
    own: str = ""  # its innermost frame in the user's code, or in ours
    call: str = ""  # the call of torch.distributed it is in, or "backward"
    stacks: str = ""
    pending: list[PendingCollective] = field(default_factory=list)
    begun: dict[str, int] = field(default_factory=dict)  # group → number of the newest collective it was asked for
    children: list[str] = field(default_factory=list)  # loader processes that do not run
    writes: bool = False  # it is at a checkpoint's files, and waits for no other rank in that

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, found: dict[str, Any]) -> Standing:
        return cls(**{**found, "pending": [PendingCollective(**each) for each in found["pending"]]})

    @property
    def waits_for(self) -> PendingCollective | None:
        """Returns the collective that was begun last, if the training thread or its GPU waits for one."""
        newest = self.pending[-1] if self.pending else None
        return newest if newest is not None and (self.call or newest.on_gpu) else None

    @property
    def waits_in(self) -> str:
        return str(self.waits_for or self.call)

    @property
    def place(self) -> str:
        """Returns a value that is equal on ranks that wait for one another."""
        newest = self.waits_for
        return self.own if newest is None else f"{newest.group} {newest.number}"


def standing(main: int, is_recorded: bool = True) -> Standing:
    """Returns this process's state. main: the training thread. is_recorded: read torch's recorder too."""
    frames = all_frames()
    try:
        stack = traceback.extract_stack(frames[main]) if main in frames else []
        stacks = "".join(_stack(thread, main, frames) for thread in threading.enumerate())
        pending, begun = _recorded() if is_recorded else ([], {})
        found = replace(_of_stack(stack, stacks), pending=pending, begun=begun, children=_stuck_children())
        return replace(found, writes=_writes(main, frames, any(each.on_gpu for each in pending)))
    finally:
        frames.clear()


def read_stacks(text: str) -> Standing:
    """Reads faulthandler's output: threads with the main one last, frames from within outwards."""
    main = re.split(r"^(?=Current thread|Thread )", text, flags=re.M)[-1]
    frames = re.findall(r'^ +File "(.*)", line (\d+) in (.*)$', main, flags=re.M)
    return _of_stack([traceback.FrameSummary(file, int(line), name) for file, line, name in reversed(frames)], main)


def _of_stack(stack: Sequence[traceback.FrameSummary], stacks: str) -> Standing:
    own = [each for each in stack if not each.filename.startswith(("<", *_THEIRS)) or each.filename.startswith(_OWN)]
    users = [each for each in own if not each.filename.startswith(_OWN)]
    return Standing(
        inner=_described(stack[-1]) if stack else "",
        own=_described((users or own)[-1]) if own else "",
        call=_call(stack),
        stacks=stacks,
    )


def _call(stack: Sequence[traceback.FrameSummary]) -> str:
    """Returns the innermost function of torch.distributed or communicator.py, or the backward pass, in which engines
    reduce."""
    theirs = (each for each in stack if _DISTRIBUTED in each.filename or each.filename == _RANKS)
    names = [each.name for each in theirs if each.name != "wrapper"]
    if names:
        return names[-1]
    return "backward" if any(_BACKWARD in each.filename and each.name == "backward" for each in stack) else ""


def _described(frame: traceback.FrameSummary) -> str:
    return f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}"


def _stack(thread: threading.Thread, main: int, frames: dict[int, Any]) -> str:
    """Returns the stacks of threads that work for the run; others do not matter."""
    if thread.ident not in frames or not (thread.ident == main or thread.name.startswith(WORKING)):
        return ""
    lines = "".join(traceback.format_stack(frames[thread.ident]))
    return f"thread {thread.name}:\n{lines}"


def _writes(main: int, frames: dict[int, Any], waits_on_gpu: bool) -> bool:
    """Returns whether the process writes. waits_on_gpu: then the training thread does not write: it may be about to
    copy what its GPU has not made."""
    threads = {thread.ident for thread in threading.enumerate() if thread.name.startswith(WORKING)}
    threads |= set() if waits_on_gpu else {main}
    stacks = [traceback.extract_stack(frame) for thread, frame in frames.items() if thread in threads]
    at_files = [stack for stack in stacks if any(each.filename.startswith(_CHECKPOINT) for each in stack)]
    return any(not _call(stack) for stack in at_files)


def _recorded() -> tuple[list[PendingCollective], dict[str, int]]:
    """Returns the collectives of this process's groups in torch's flight recorders, the oldest first; empty without
    one."""
    pending, begun = list[tuple[int, PendingCollective]](), dict[str, int]()
    for backend in RECORDERS:
        for entry in _entries(backend, only_active=False):
            if entry["is_p2p"]:
                continue
            found = _collective(entry, backend)
            begun[found.group] = max(found.number, begun.get(found.group, 0))
            if _is_active(entry):
                pending.append((entry["time_created_ns"], found))
    return [found for _, found in sorted(pending, key=lambda each: each[0])], begun


def _entries(backend: str, only_active: bool) -> list[dict[str, Any]]:
    """Returns entries of the record. One of 2,000 collectives takes 26 ms to read, with Python's lock held; those under
    way take none."""
    joined = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)  # it may be half imported
    if joined is None or not joined():
        return []
    import torch

    dump = getattr(torch._C._distributed_c10d, RECORDERS[backend], None)
    # with collectives, without stacks
    return [] if dump is None else list(pickle.loads(dump(True, False, only_active)).get("entries", ()))


def _is_active(entry: dict[str, Any]) -> bool:
    return not entry["retired"] and entry["state"] != "completed"


def waits_on_gpu() -> bool:
    """Returns whether this process's GPU computes, or a collective is under way on it: the program then may use a
    processor to wait for it."""
    begun = getattr(sys.modules.get("torch.cuda"), "is_initialized", None)  # it may be half imported
    if begun is None or not begun():
        return False
    return any(map(_is_active, _entries("nccl", only_active=True))) or _computes()


def _computes() -> bool:
    """Returns whether work is queued on the default stream of a GPU that this process uses. False if CUDA refuses to
    answer: after an error, which the training thread will report, and while a graph is captured."""
    import torch

    is_used: Any = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    used = filter(is_used, range(torch.cuda.device_count()))
    try:
        return any(not torch.cuda.default_stream(number).query() for number in used)
    except RuntimeError:
        return False


def _collective(entry: dict[str, Any], backend: str) -> PendingCollective:
    """Reads an entry. group: each backend counts its own collectives of a group that has both."""
    sizes = " and ".join("x".join(map(str, size)) or "scalar" for size in entry["input_sizes"][:2])
    kinds = ", ".join(dict.fromkeys(entry["input_dtypes"]))
    what = f"{entry['profiling_name'].rpartition(':')[2]} of {sizes} {kinds}".rstrip()
    group, on_gpu = str(entry["process_group"][0]), backend == "nccl"
    return PendingCollective(f"{group} (NCCL)" if on_gpu else group, int(entry["collective_seq_id"]), what, on_gpu)


def _stuck_children() -> list[str]:
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            status = child.status()
        except psutil.Error:
            continue
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_DISK_SLEEP):
            found.append(f"its process {child.pid} is in state {status}")
    return found
