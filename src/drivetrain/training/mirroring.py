"""The mirror of a training in an object store: opened before any work starts, finished after everything else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from drivetrain.checkpoint.mirror.restoring import claimed, restore
from drivetrain.checkpoint.mirror.run_mirror import RunMirror
from drivetrain.config.run import RunConfig
from drivetrain.distributed.communicator import Communicator
from drivetrain.errors import RunError
from drivetrain.runtime import storage
from drivetrain.runtime.heartbeat import Heart
from drivetrain.runtime.notices import notify
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.runtime.signals import StopRequest
from drivetrain.tracking.events import CheckpointUploaded, Event, Warned
from drivetrain.workloads.base import BestMetric

SHARE_OF_GRACE = 0.8  # of the time after SIGTERM, which the last uploads may take


class Mirroring:
    """The side of a mirror that a training calls. Without a mirror, as on all ranks but the first, nothing happens."""

    def __init__(self, overwrite: bool = False) -> None:
        self.mirror: RunMirror | None = None
        self.has_started = False
        self.is_ending = False  # once the run's events are closed
        self._overwrite = overwrite
        self._send: Callable[[Event], None] = lambda _: None

    def start(self, send: Callable[[Event], None], metric: BestMetric) -> None:
        """Begins to upload. send: where the mirror's events go from now on."""
        self._send = send
        if self.mirror is not None:
            self.has_started = True
            self.mirror.start(self._overwrite, metric.higher_is_better, metric.name)

    def saved(self, step: int, path: Path) -> None:
        """Takes a new checkpoint, before retention looks at the older ones."""
        if self.mirror is not None:
            self.mirror.saved(step, path)

    def uploaded(self, step: int, address: str, size: int, seconds: float) -> None:
        if not self.is_ending:
            with suppress(RunError):  # of a folder that is gone, which ends the training itself
                self._send(CheckpointUploaded(step=step, path=address, bytes=size, seconds=seconds))

    def warned(self, message: str) -> None:
        if self.is_ending or not self.has_started:
            notify(message)
        else:
            self._send(Warned(message=message))


@contextmanager
def mirrored(
    config: RunConfig,
    communicator: Communicator,
    folder: RunFolder,
    resume: bool,
    overwrite: bool,
    heart: Heart | None,
    stop: StopRequest,
) -> Iterator[Mirroring]:
    """Claims the run's mirror and brings what this machine lacks; in the end waits for the last uploads.

    Raises UserError if the mirror is another run's, and RunError if not everything could be uploaded.
    """
    if config.mirror is None:
        yield Mirroring()
        return
    made: list[Mirroring] = []
    communicator.on_first(lambda: made.append(_opened(config, folder, resume, overwrite)))
    mirroring = made[0] if made else Mirroring()
    until = _Deadline(stop, config.grace_seconds)
    try:
        yield mirroring
    except BaseException:
        mirroring.is_ending = True
        if mirroring.mirror is not None:
            with suppress(RunError):  # what came first is what to report
                mirroring.mirror.finish(_moving(heart), until)
        raise
    mirroring.is_ending = True
    if mirroring.mirror is not None:
        if mirroring.mirror.waiting:
            notify(f"uploading to {mirroring.mirror.store}: {', '.join(map(str, mirroring.mirror.waiting))}")
        mirroring.mirror.finish(_moving(heart), until)


def _moving(heart: Heart | None) -> Callable[[], object]:
    """Returns what records that bytes move, so that a long upload is no standstill."""
    return (lambda: heart.enter("uploading")) if heart is not None else lambda: None


class _Deadline:
    """Whether the time is up that a run has after SIGTERM."""

    def __init__(self, stop: StopRequest, grace_seconds: float) -> None:
        self._stop, self._grace = stop, grace_seconds * SHARE_OF_GRACE

    def __call__(self) -> bool:
        return self._stop.since is not None and time.monotonic() - self._stop.since > self._grace


def _opened(config: RunConfig, folder: RunFolder, resume: bool, overwrite: bool) -> Mirroring:
    assert config.mirror is not None
    store, own = claimed(config.mirror, resume, overwrite, notify)
    own.keep()  # restoring, reading data and building take longer than the lease
    mirroring = Mirroring(overwrite)
    mirroring.mirror = RunMirror(store, own, folder, config.checkpoints, mirroring.uploaded, mirroring.warned)
    try:
        if resume:
            storage.make(folder.path)
            restore(store, own.index, folder, notify)
    except BaseException:
        mirroring.mirror.abandon()
        raise
    return mirroring
