"""The threads that help a thread to compute on a CPU.

Each thread that computes with PyTorch gets helpers of its own from OpenMP, which stay and wait for its next operation.
GNU's OpenMP has them spin while they wait, as long as all helpers together are no more than cores; else they go to
sleep at once, and each operation wakes them. So where one thread loads a model and another one computes with it, steps
of 40 million parameters took 1.2 to 1.7 times as long on two cores as where the first one had ended its helpers
(`python bench/helper_threads.py`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from threadpoolctl import threadpool_info

SOFT = 1  # omp_pause_soft: settings stay as they are (OpenMP 5.2, section 18.6.1)


def end_helpers() -> None:
    """Ends the helpers of the calling thread; its next operation that needs some makes new ones, within 0.1 ms."""
    for pause in _pauses():
        pause(SOFT)


@functools.cache
def _pauses() -> tuple[Callable[[int], int], ...]:
    """Returns `omp_pause_resource_all` of each GNU OpenMP that this process has loaded. Other kinds do not count their
    threads."""
    found = (ctypes.CDLL(each["filepath"]) for each in threadpool_info() if each["prefix"] == "libgomp")
    return tuple(library.omp_pause_resource_all for library in found if hasattr(library, "omp_pause_resource_all"))
