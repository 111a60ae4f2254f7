"""The measured speeds of this machine: `drivetrain calibrate` makes and keeps them, planning reads them."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, ValidationError

from drivetrain.config.base import doc
from drivetrain.config.machine import Machine
from drivetrain.runtime.atomic_file import write_whole, writing
from drivetrain.runtime.user_cache import user_cache

Curve = tuple[tuple[float, float], ...]  # (size of one call, seconds of one call), the smallest size first


class DeviceSpeeds(BaseModel, frozen=True, extra="forbid"):
    """Seconds of one call by its size: FLOPs of products, bytes read and written of the rest."""

    matmul: dict[str, Curve] = doc("Products of matrices, by dtype")
    attention: dict[str, Curve] = doc("Attention, by dtype")
    convolution: dict[str, Curve] = doc("Convolutions, by dtype")
    memory: Curve = doc("Operations that move bytes and compute little")
    optimizer: Curve = doc("Optimizer steps")
    random: Curve = doc("Dropout")
    libraries: dict[str, int] = doc("Resident bytes that the first operations of a kind leave behind on a CPU", {})
    call_seconds: float = doc("Between the starts of two operations of a model, in forward and backward passes", gt=0)


class Calibration(BaseModel, frozen=True, extra="forbid"):
    """Speeds of one machine under one version of torch."""

    device: str = doc("cpu or cuda")
    device_name: str = doc("Name of the processor or GPU")
    device_count: int = doc("GPUs; 1 for a processor", gt=0)
    cores: int = doc("Cores that a process may use", gt=0)
    torch: str = doc("Version of torch")
    made_at: str = doc("Date and time, ISO 8601")
    took_seconds: float = doc("Time that measuring took", gt=0)
    foreign_cores: float | None = doc("Cores that other programs used meanwhile; null if it was not measured", None)
    alone: DeviceSpeeds = doc("Speeds of one process, which has all cores")
    together: DeviceSpeeds | None = doc("Speeds of each of two processes at once, which share the cores", None)
    collectives: dict[str, Curve] = doc("Seconds of a collective between two processes, by bytes", {})
    picture_seconds: float = doc("Seconds in which one core reads, decodes and resizes a picture of 500 x 375", gt=0)
    disk_write_bytes: float = doc("Bytes a second written to the folder of this file, flushed", gt=0)

    def of(self, ranks: int) -> DeviceSpeeds:
        """Returns the speeds of each of so many ranks on this machine."""
        return self.alone if ranks == 1 or self.together is None else self.together


def kept_at(machine: Machine) -> Path:
    """Returns the file of a machine's calibration: one for each kind and number of devices and cores, since several
    machines may share a home."""
    kind = f"{machine.device}|{machine.device_name}|{machine.device_count}|{machine.cpu_cores}"
    name = hashlib.sha256(kind.encode()).hexdigest()[:16]
    return user_cache() / "drivetrain" / "calibration" / f"{name}.json"


def keep(calibration: Calibration, file: Path) -> None:
    with writing(file, "calibrate again"):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, calibration.model_dump_json(indent=1))


def kept(machine: Machine) -> Calibration | None:
    """Returns the calibration of a machine; None if there is none, or it was written by another version of the form."""
    file = kept_at(machine)
    try:
        return _read(file, file.stat().st_mtime_ns)
    except (OSError, ValidationError):
        return None


@lru_cache(maxsize=4)
def _read(file: Path, changed: int) -> Calibration:  # noqa: ARG001 -- part of the key
    """Reads a file once: a search asks at each of its rows. changed: when it was written; a new one is read anew."""
    return Calibration.model_validate_json(file.read_bytes())


def usual(seconds: Sequence[float]) -> float:
    """Returns the lower quartile of measured times: other programs only make calls longer, and may do so for half of
    them."""
    return sorted(seconds)[len(seconds) // 4]


def seconds_of(curve: Curve, size: float) -> float:
    """Returns the seconds of one call of a size, between two points by a power law.

    Below the first point a call takes as long as there: it is the time to start it. Beyond the last, its rate.
    """
    sizes = [point for point, _ in curve]
    if size <= sizes[0]:
        return curve[0][1]
    if size >= sizes[-1]:
        return curve[-1][1] * size / sizes[-1]
    place = bisect_left(sizes, size)
    (low, before), (high, after) = curve[place - 1], curve[place]
    share = math.log(size / low) / math.log(high / low)
    return math.exp(math.log(before) + share * math.log(after / before))
