"""`loader.workers: auto`: processes that load samples where a sample costs time, none where it is there already.

Handing a sample from one process to another costs about as much as copying it. So samples that lie in memory, decoded
or tokenised, are loaded where they are used; pictures that are decoded each time, or a data set that computes, are
loaded ahead. A sample's content does not depend on the process that loads it.
"""

from __future__ import annotations

import multiprocessing
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain.data.streams.endless import Endless
from drivetrain.runtime.hardware import usable_cores

LEAST_SECONDS = 1e-3  # for a sample, from which it is loaded elsewhere
LEAST_WORKERS, MOST_WORKERS = 2, 8
TRIED = 4  # samples
LONG = 0.5  # seconds, after which no more are
_FOUND: Any = WeakIdKeyDictionary()  # samples → workers


class Timed(Protocol):
    def __len__(self) -> int: ...
    def load(self, index: int, epoch: int) -> Any: ...


def workers_for(samples: Timed) -> int:
    """Returns how many processes should load the samples, measured once: one for each core of this rank, less one.

    At least two: one process alone makes samples no quicker than they are made in place, and where they cost more than
    the steps the core that is kept free stands idle (JPEGs, two cores: 1.45 times the rate with two, none with one).
    """
    if samples not in _FOUND:
        _FOUND[samples] = min(MOST_WORKERS, max(LEAST_WORKERS, _cores() - 1)) if _pays(samples) else 0
    found: int = _FOUND[samples]
    return found


def _cores() -> int:
    """Returns the cores of this rank's share."""
    return max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _pays(samples: Timed) -> bool:
    if _cores() == 1 or multiprocessing.get_context().get_start_method() != "fork" or _is_streamed(samples):
        return False
    before = _threads()
    pays = _seconds(samples) >= LEAST_SECONDS
    return pays and _threads() <= before and not _pools() and not _open_files()


def _is_streamed(samples: Timed) -> bool:
    """Returns whether the samples are streamed. Each worker would read all rows again, though it tokenises only its
    own: that is left to the user."""
    return isinstance(samples, Endless)


def _seconds(samples: Timed) -> float:
    """Returns the seconds of loading a sample, by the clock, at the second time: a data set may keep what it has made.
    0 if it cannot be loaded, which the run will report, or lies on a device, which other processes cannot use."""
    indices = (
        sorted({number * (len(samples) - 1) // max(1, TRIED - 1) for number in range(TRIED)}) if len(samples) else []
    )
    took: list[float] = []
    try:
        for index in indices:
            if sum(took) > LONG:
                break
            loaded = samples.load(index, 0)
            if any(isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu" for leaf in tree_leaves(loaded)):
                return 0.0
            start = time.perf_counter()
            samples.load(index, 0)
            took.append(time.perf_counter() - start)
    except Exception:  # of whatever kind a data set raises
        return 0.0
    return sorted(took)[len(took) // 2] if took else 0.0


def _threads() -> int:
    """Counts this process's threads, native ones too if /proc lists them. A worker is forked without them: work that a
    data set passes to its own threads, started at its first use, would wait there for ever."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()


def _pools() -> list[str]:
    """Counts threads of pools that existed before, which may be a data set's."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor-")]


def _open_files() -> list[str]:
    """Returns files that this process holds open for reading. Worker processes would share their positions (h5py, zip
    archives, files of a data set's own), and each would read what another has just passed over."""
    held = []
    for link in Path("/proc/self/fd").glob("*"):
        try:
            name, status = os.readlink(link), os.fstat(int(link.name))
            flags = int(Path(f"/proc/self/fdinfo/{link.name}").read_text().split("flags:")[1].split()[0], 8)
        except OSError:
            continue  # it was closed meanwhile
        reads = flags & os.O_ACCMODE != os.O_WRONLY
        ours = name.endswith((".lock", ".so", " (deleted)"))
        if int(link.name) > 2 and stat.S_ISREG(status.st_mode) and reads and not ours:
            held.append(name)
    return held
