"""Python's collector of cycles, kept from stopping ranks one after another.

What refers to itself in a circle is found by a collector that Python starts by itself, when so many objects were made.
Its passes over young objects take microseconds. One over all of them takes a tenth of a second and more, begins at
another step on every rank, and each time all ranks wait for one. So here what was made before the first step is set
apart (gc.freeze), and passes over what was made since are taken at the same steps on all ranks. Memory does not grow:
young cycles go as before, older ones at the next pass. (torchtitan does without automatic passes of any kind.)
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 50  # steps
NEVER = 2**30  # passes over young objects until one over all
Collect = Callable[[int], None]


@contextmanager
def collecting(every: int) -> Iterator[Collect]:
    """Within, full passes are taken where the yielded function is called with a step that `every` divides, and at no
    other time. 0: as Python has it."""
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
