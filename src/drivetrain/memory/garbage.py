"""Keeps Python's collector of cycles from stopping ranks one after another.

Objects that refer to themselves in a circle are found by a collector that Python starts by itself after a number of new
objects. Its passes over young objects take microseconds. One over all of them takes a tenth of a second and more,
begins at another step on every rank, and each time all ranks wait for one. So here objects made before the first step
are set apart (gc.freeze), and passes over later ones are taken at the same steps on all ranks. Memory does not grow:
young cycles go as before, older ones at the next pass. (torchtitan does without automatic passes of any kind.)

A process that starts has another use for none: see `importing`; one that reads rows has use for few: see `rarer`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 50  # steps
NEVER = 2**30  # passes over young objects until one over all
MANY = 100_000  # new objects until a pass, where few are part of a circle; 700 by default
Collect = Callable[[int], None]
_owns_process, _apart = False, 0  # _apart: modules that there were when objects were set apart


def own_process() -> None:
    """Declares that this process runs nothing but drivetrain, so that `importing` may set its objects apart."""
    global _owns_process
    _owns_process = True


@contextmanager
def importing() -> Iterator[None]:
    """While the block runs, which imports modules, no pass is taken; then all objects are set apart, if some came.

    Modules stay until the process ends, and Python passes over all that it has imported again and again meanwhile: a
    seventh of the time that PyTorch and its compiler take to import. Does nothing in a process that runs other code
    too, such as a notebook: objects of that code could be garbage, and those set apart are never freed.
    """
    if not (_owns_process and gc.isenabled()):
        yield
        return
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) != before:
            gc.freeze()
        gc.enable()


def set_imports_apart() -> None:
    """Sets all objects apart if modules were imported since the last call; what is garbage by then is freed before.

    For work that comes again and again, imports some of its modules as it needs them, and takes passes of its own:
    DeepSpeed takes one whenever an engine is closed, which passed over all of PyTorch, Transformers and itself. Does
    nothing in a process that runs other code too.
    """
    global _apart
    if _owns_process and len(sys.modules) != _apart:
        _apart = len(sys.modules)
        gc.collect()
        gc.freeze()


@contextmanager
def rarer() -> Iterator[None]:
    """While the block runs, passes are taken after a hundred times as many new objects.

    Rows become objects by the million, none of which is part of a circle: the last reference frees them, and a fifth of
    the time that reading takes would go into passes over them.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(max(MANY, thresholds[0]) if thresholds[0] else 0, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def collecting(every: int) -> Iterator[Collect]:
    """While the block runs, full passes are taken only when the yielded function is called with a step that `every`
    divides. 0: as in Python by default."""
    if not every:
        yield lambda _: None
        return
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], NEVER)

    def collect(step: int) -> None:
        if step % every == 0:
            gc.collect()

    try:
        yield collect
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
