"""Records what this process is doing, in a few bytes that another process can read even after this one died.

The bytes are a file of the launch's folder, mapped into memory. The training writes its step, part and batch there,
which costs no system call, and a thread notes once a second that the process runs. A process that was stopped or killed
leaves its last record.

The thread also checks whether the training goes on: whether its Python frames change from second to second, or its
thread, other threads of this process, or processes that it started use a processor. So a process that reads, compiles
or tokenises can be distinguished from one that waits, although it reports nothing itself.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

import psutil

from drivetrain.runtime.frames import other_frames

BEAT_SECONDS = 1.0
SHOWN = 6  # samples of a batch
_HEAD = struct.Struct("qqqd")  # process, rank, beats, time of the last one
_MOVES, _STEP, _PART = struct.Struct("q"), struct.Struct("q"), struct.Struct("24s")
_BATCH = struct.Struct(f"q{SHOWN}q")  # how many, and the first ones
_RESIDENT = struct.Struct("q")  # bytes of memory at the last beat
_AT_MOVES = _HEAD.size
_AT_STEP = _AT_MOVES + _MOVES.size
_AT_PART = _AT_STEP + _STEP.size
_AT_BATCH = _AT_PART + _PART.size
_AT_RESIDENT = _AT_BATCH + _BATCH.size
_SIZE = _AT_RESIDENT + _RESIDENT.size
WORKING = "saving"  # threads of this name work for the run as the main one does
# least shares of a processor: of the training's thread; of all threads, which look around as they wait, as loader
# processes do
OWN_WORK, THREADS_WORK, CHILDRENS_WORK = 0.005, 0.3, 0.05


class Heart:
    """The record of the thread that makes it, the one that trains. While its block runs, the process beats."""

    def __init__(
        self,
        file: Path | None = None,
        rank: int = 0,
        listener: Callable[[Heart, float], None] | None = None,
        spins: Callable[[], bool] = lambda: False,
    ) -> None:
        """file: None if no process will read it. listener: called after each beat, by the beating thread, with the
        seconds in which nothing went on. spins: whether the training may use a processor to wait."""
        self._bytes = _mapped(file)
        self._rank, self._listener, self._spins = rank, listener, spins
        self.main, self._native = threading.get_ident(), threading.get_native_id()
        # not on macOS; and of no thread that may have ended
        self._clock = time.pthread_getcpuclockid(self.main) if hasattr(time, "pthread_getcpuclockid") else None
        self._part, self._moves, self._beats = "", 0, 0
        self._ended, self._process = threading.Event(), psutil.Process()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)
        _HEAD.pack_into(self._bytes, 0, os.getpid(), rank, 0, time.monotonic())

    def start(self) -> Heart:
        self._thread.start()
        return self

    def __enter__(self) -> Heart:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def enter(self, part: str) -> str:
        """Records that this part begins ("": between parts). Returns the part before."""
        before, self._part = self._part, part
        _PART.pack_into(self._bytes, _AT_PART, part.encode()[:24])
        self._moved()
        return before

    def begin(self, step: int) -> None:
        """Records that a step begins. step: counted from 1."""
        _STEP.pack_into(self._bytes, _AT_STEP, step)
        _BATCH.pack_into(self._bytes, _AT_BATCH, 0, *(0,) * SHOWN)

    def batch(self, size: int, first: Sequence[int]) -> None:
        """Records the step's samples over all ranks: their number, and the first SHOWN of them."""
        _BATCH.pack_into(self._bytes, _AT_BATCH, size, *first, *(0,) * (SHOWN - len(first)))

    def read(self) -> Pulse:
        return _pulse(self._bytes)

    def _moved(self) -> None:
        self._moves += 1
        _MOVES.pack_into(self._bytes, _AT_MOVES, self._moves)

    def _beat(self) -> None:
        stood, worked, moves, since = self._place(), self._work(), self._moves, time.monotonic()
        while not self._ended.wait(BEAT_SECONDS):
            place, work, now = self._place(), self._work(), time.monotonic()
            used = [after - before for after, before in zip(work, worked, strict=True)]
            own, threads, children = (each / BEAT_SECONDS for each in used)
            moves_on = place != stood or children >= CHILDRENS_WORK
            if moves_on or ((own >= OWN_WORK or threads >= THREADS_WORK) and not self._spins()):
                self._moved()
            if self._moves != moves:
                since = now
            stood, worked, moves = place, work, self._moves
            self._beats += 1
            _HEAD.pack_into(self._bytes, 0, os.getpid(), self._rank, self._beats, time.monotonic())
            _RESIDENT.pack_into(self._bytes, _AT_RESIDENT, self._process.memory_info().rss)
            if self._listener is not None:
                self._listener(self, now - since)

    def _place(self) -> int:
        """Returns a value that stays equal as long as no working thread reaches another line."""
        frames = other_frames()
        threads = [t.ident for t in threading.enumerate() if t.ident == self.main or t.name.startswith(WORKING)]
        return hash(tuple(_steps(frames[ident]) for ident in threads if ident in frames))

    def _work(self) -> tuple[float, float, float]:
        """Returns the processor seconds used by the training's thread, by all threads here, and by processes it
        started."""
        own = 0.0 if self._clock is None else time.clock_gettime(self._clock)
        return own, time.process_time(), _childrens_work(self._native)


@dataclass(frozen=True)
class Pulse:
    """A record as another process reads it."""

    process: int
    rank: int
    beats: int
    time: float  # of the last beat, by time.monotonic
    moves: int  # counts up whenever something goes on
    step: int  # 0 before the first
    part: str
    batch: tuple[int, ...]  # the first of its samples
    batch_size: int
    resident: int = 0  # bytes of memory at the last beat; 0 before the first

    @property
    def where(self) -> str:
        step = f"step {self.step}" if self.step else "before the first step"
        return f"{step}, {self.part}" if self.part else step


def read(file: Path) -> Pulse | None:
    """Reads a record; None if there is none yet."""
    try:
        found = file.read_bytes()
    except OSError:
        return None
    return _pulse(found) if len(found) == _SIZE else None


def _pulse(content: bytes | mmap.mmap) -> Pulse:
    process, rank, beats, when = _HEAD.unpack_from(content)
    [moves], [step] = _MOVES.unpack_from(content, _AT_MOVES), _STEP.unpack_from(content, _AT_STEP)
    part = _PART.unpack_from(content, _AT_PART)[0].rstrip(b"\0").decode(errors="replace")
    size, *batch = _BATCH.unpack_from(content, _AT_BATCH)
    [resident] = _RESIDENT.unpack_from(content, _AT_RESIDENT)
    return Pulse(process, rank, beats, when, moves, step, part, tuple(batch[:size]), size, resident)


def _mapped(file: Path | None) -> mmap.mmap:
    if file is None:
        return mmap.mmap(-1, _SIZE)
    aside = file.with_suffix(f".partial-{os.getpid()}")
    aside.write_bytes(bytes(_SIZE))
    with aside.open("r+b") as opened:
        mapped = mmap.mmap(opened.fileno(), _SIZE)
    aside.replace(file)
    return mapped


def _childrens_work(thread: int) -> float:
    """Returns the processor time of the processes that a thread of this one started, and of theirs; 0 where the kernel
    has no list."""
    ticks = 0
    with suppress(OSError):
        for child in Path(f"/proc/self/task/{thread}/children").read_text().split():
            with suppress(OSError):  # it ended just now
                # after the name in brackets: state is the third field, times the 14th to 17th
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _steps(frame: FrameType | None) -> tuple[tuple[int, int], ...]:
    found = []
    while frame is not None:
        found.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return tuple(found)
