"""The frames that the threads of this process execute."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

# Before 3.12 Python collects garbage within calls that allocate. Within sys._current_frames that could stop the process
# for ever: a finaliser lets another thread run, which waits for the list of threads that the call has locked
# (https://github.com/python/cpython/issues/106883)
COLLECTS_WITHIN = sys.version_info < (3, 12)


def all_frames() -> dict[int, FrameType]:
    """Returns the frame that each thread executes, by the thread's id. It holds this call's frame, which holds it: a
    circle, with the tensors of all frames in it, which the caller has to clear."""
    pauses = COLLECTS_WITHIN and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        return sys._current_frames()
    finally:
        if pauses:
            gc.enable()


def other_frames() -> dict[int, FrameType]:
    """Returns the frame that each other thread executes, by the thread's id.

    With this thread's own frame the mapping would be part of a circle (the frame holds the mapping it is in), which
    keeps all frames, with the tensors that their functions have long left, until Python collects circles.
    """
    frames = all_frames()
    del frames[threading.get_ident()]
    return frames
