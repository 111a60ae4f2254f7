"""The devices that a queue fills: GPUs as NVIDIA's library lists them, else the CPU, and who uses them now."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from drivetrain.board.records import TRAINING, Asked, Entry

CPU = "cpu"
CHAT = "serve"  # the verb of chats
FOREIGN_BYTES = 1 << 30  # of a GPU's memory in use without an entry of ours: another program works there


@dataclass(frozen=True)
class Device:
    """name: "cpu", or the GPU's number on this machine. uuid: by which a process is given it. places: entries that it
    takes at once."""

    name: str
    title: str
    memory_bytes: int
    places: int = 1
    uuid: str | None = None
    used_bytes: int | None = None
    utilisation: float | None = None

    def is_foreign(self, entries: Sequence[Entry]) -> bool:
        """Returns whether another program holds memory of a GPU that no entry uses."""
        is_ours = any(self.name in each.devices for each in entries)
        return self.name != CPU and not is_ours and (self.used_bytes or 0) > FOREIGN_BYTES

    def as_dict(self, entries: Sequence[Entry]) -> dict[str, Any]:
        return {
            "id": self.name,
            "name": self.title,
            "memory_bytes": self.memory_bytes,
            "used_bytes": self.used_bytes,
            "utilisation": self.utilisation,
            "entries": [each.id for each in entries if self.name in each.devices],
            "others": self.is_foreign(entries),
            "places": self.places,
        }


def devices(at_once_cpu: int) -> list[Device]:
    """Returns the devices as they stand. at_once_cpu: entries that the CPU takes."""
    return [*gpus(), replace(_cpu(), places=at_once_cpu)]


def _cpu() -> Device:
    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = psutil.cpu_percent(interval=None) / 100  # since the last look
    used = memory.total - memory.available
    return Device(CPU, f"CPU, {cores} cores", memory.total, used_bytes=used, utilisation=share)


def gpus() -> list[Device]:
    """Returns the GPUs that this process may use; none where NVIDIA's library does not answer."""
    found: list[Device] = []
    with contextlib.suppress(Exception):  # no package, no driver, no permission: what it raises depends on which
        import pynvml

        pynvml.nvmlInit()
        for number in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            share: float | None = None
            with contextlib.suppress(pynvml.NVMLError):
                share = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
            name, uuid = (_text(ask(handle)) for ask in (pynvml.nvmlDeviceGetName, pynvml.nvmlDeviceGetUUID))
            found.append(Device(str(number), name, int(memory.total), 1, uuid, int(memory.used), share))
    return [each for each in found if _is_ours(each)]


def environment(chosen: Sequence[str], known: Sequence[Device]) -> dict[str, str]:
    """Returns the variables by which a process sees the chosen GPUs alone, and none where the CPU was chosen: one that
    sees a GPU would use it, also while another entry trains there."""
    uuids = [each.uuid for name in chosen for each in known if each.name == name and each.uuid]
    return {"CUDA_VISIBLE_DEVICES": ",".join(uuids)} if uuids or CPU in chosen else {}


def free(entry: Entry, entries: Sequence[Entry], known: Sequence[Device]) -> list[str] | None:
    """Returns devices for an entry that waits, or None while too few are free.

    Named devices are waited for, also those that another program uses: the user chose them. A chat on the CPU waits for
    no place: it computes while a question is answered, and its memory is checked when it is asked for.
    """
    asked = entry.asked
    if asked.wanted is not None:
        names = [each.name for each in known]
        has_all = all(name in names and _has_place(known[names.index(name)], entries) for name in asked.wanted)
        return list(asked.wanted) if has_all else None
    if lane_of(asked) == ("cpu", "chat"):
        return [CPU]
    if asked.device == "cpu":  # an evaluation need not wait until a training on the CPU is over
        entries = [each for each in entries if lane_of(each.asked) in (lane_of(asked), ("cuda", ""))]
    of_kind = [each for each in known if (each.name == CPU) == (asked.device == "cpu")]
    open_ = [each.name for each in of_kind if _has_place(each, entries) and not each.is_foreign(entries)]
    count = 1 if asked.device == "cpu" else asked.count
    return open_[:count] if len(open_) >= count else None


def lane_of(asked: Asked) -> tuple[str, str]:
    """Returns what an entry waits in line for: others of its lane hold it up."""
    if asked.device != CPU:
        return "cuda", ""
    return CPU, "training" if asked.verb in TRAINING else "chat" if asked.verb == CHAT else "use"


def _has_place(device: Device, entries: Sequence[Entry]) -> bool:
    return sum(device.name in each.devices for each in entries) < device.places


def _is_ours(device: Device) -> bool:
    """Returns whether CUDA_VISIBLE_DEVICES of this process, if set, has the GPU (a cluster's job has a part)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is None or any(_names(word, device) for word in _words(visible))


def _names(word: str, device: Device) -> bool:
    return word == device.name or bool(device.uuid and word.startswith("GPU-") and device.uuid.startswith(word))


def _words(text: str) -> Iterator[str]:
    return (word.strip() for word in text.split(",") if word.strip())


def _text(found: Any) -> str:
    return found.decode() if isinstance(found, bytes) else str(found)
