"""The mirror of a run that trains: a thread of the first rank uploads in the background what the run's folder holds.

The run's folder is the local tier: training waits for it alone. A checkpoint that was saved there waits for its upload
under hard links, so that retention may delete the folder meanwhile; of several that wait, those that the mirror would
not keep are passed over. A failing store is reported at once and tried again; it never ends the training. At its end
`finish` waits for what is left, or raises RunError with what to do.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from drivetrain.checkpoint.best_evaluation import ranked
from drivetrain.checkpoint.directory import MANIFEST, read_manifest, steps
from drivetrain.checkpoint.mirror.index import Complete, Index, Lost, OwnIndex
from drivetrain.checkpoint.mirror.run_files import RunFiles, entries_of
from drivetrain.checkpoint.mirror.transfer import BELOW, orphans, overwritten, remove, token_of, upload
from drivetrain.config.training import Checkpoints
from drivetrain.errors import RunError, last_line
from drivetrain.runtime import storage
from drivetrain.runtime.object_store import ObjectStore, StoreError
from drivetrain.runtime.run_folder import RunFolder

FILES_EVERY = 30.0  # seconds between two uploads of events and other files
PAUSE = 15.0  # seconds before a failed upload is tried again; each time twice as long, up to
LONGEST_PAUSE = 300.0
LAST_ATTEMPTS = 3
STAGED = ".mirror"
Uploaded = Callable[[int, str, int, float], None]  # step, address, bytes, seconds


class RunMirror:
    def __init__(
        self,
        store: ObjectStore,
        own: OwnIndex,
        folder: RunFolder,
        keep: Checkpoints,
        uploaded: Uploaded,
        warn: Callable[[str], None],
    ) -> None:
        self.store, self._own, self._folder, self._keep = store, own, folder, keep
        self._uploaded, self._warn = uploaded, warn
        self._files = RunFiles(store, folder)
        self._waiting: dict[int, Path] = {}  # step → folder with its files
        self._changed = threading.Condition()
        self._closing = self._idle = False
        self._failure: str | None = None
        self.bytes_moved = 0
        self._rule: tuple[bool, str | None] = (True, None)
        self._overwrite = False
        self._newest: int | None = None  # step that was saved last
        self._uploading: int | None = None  # changes under the lock, and so does what waits
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    # --- what the training calls -------------------------------------------------------------------------------------

    def start(self, overwrite: bool, higher_is_better: bool, metric: str) -> None:
        """Begins to upload, first what the folder holds and the store does not. overwrite: removes the earlier run."""
        self._rule = higher_is_better, metric
        storage.discard(self._folder.path / STAGED)
        there = {each.step: each.manifest for each in self._own.index.checkpoints}
        for path in steps(self._folder.checkpoints):
            with suppress(OSError, ValueError):
                step = read_manifest(path).step
                if there.get(step) != hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest():
                    self._stage(step, path)
        self._overwrite = overwrite
        self._thread.start()

    @property
    def waiting(self) -> list[str]:
        """The checkpoints that are not uploaded yet."""
        with self._changed:
            return [f"step {step}" for step in sorted(self._waiting)]

    def saved(self, step: int, path: Path) -> None:
        """Takes a new checkpoint, before retention looks at the older ones. Raises nothing: the run goes on."""
        self._newest = step
        self._stage(step, path)

    def abandon(self) -> None:
        """Gives the mirror up before anything was uploaded."""
        with suppress(StoreError):  # the lease ends by itself
            self._own.release()
        self._own.give_up()

    def finish(
        self, moved: Callable[[], object] = lambda: None, asked_to_stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Waits for the last uploads. Raises RunError if something is left that could not be uploaded.

        moved: called while bytes move. asked_to_stop: whether to stop waiting.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is None:  # it never started
            self.abandon()
            return
        before = -1
        while self._thread.is_alive() and not asked_to_stop():
            self._thread.join(0.2)
            if self.bytes_moved != before:
                before = self.bytes_moved
                moved()
        if not self._idle:
            left = ", ".join(self.waiting) or "the newest events and report"
            ended = "the run was ended before" if self._thread.is_alive() else "the thread of the uploads has died"
            why = self._failure or ended
            raise RunError(
                f"not everything is in {self.store}: {left} could not be uploaded ({why}). All of it is in "
                f"{self._folder.path}; when the store answers, the same command with --resume uploads it"
            )

    # --- the threads -------------------------------------------------------------------------------------------------

    def _stage(self, step: int, path: Path) -> None:
        staged = self._folder.path / STAGED / path.name.lstrip(".").partition(".")[0]
        try:
            storage.link_all(path, staged)
        except OSError:  # a file system without hard links: the folder itself, as long as retention leaves it
            staged = path
        with self._changed:
            self._waiting[step] = staged
            self._changed.notify_all()
        self._pass_over()

    def _work(self) -> None:
        try:
            self._upload_all()
        finally:
            self._own.give_up()

    def _upload_all(self) -> None:
        attempts, pause, files_at, is_clean, closing = 0, PAUSE, 0.0, False, False
        while not self._idle:
            try:
                if not is_clean:
                    self._clean()
                    is_clean = True
                step, closing = self._next(files_at + FILES_EVERY)
                if step is not None:
                    self._upload(step)
                if closing or time.monotonic() >= files_at + FILES_EVERY:
                    files_at = time.monotonic()
                    self._upload_files()
                attempts, pause, self._failure = 0, PAUSE, None
                if closing and not self.waiting:
                    self._own.release()
                    self._idle = True
            except Lost as error:
                self._fail(error)
                return
            except Exception as error:  # whatever it is, it must neither end the training nor go unseen
                self._fail(error)
                closing = closing or self._closing
                attempts = attempts + 1 if closing else 0
                if attempts >= LAST_ATTEMPTS:
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._closing, 1.0 if closing else pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            finally:
                with self._changed:
                    self._uploading = None

    def _next(self, files_at: float) -> tuple[int | None, bool]:
        """Waits for something to do. Returns the step to upload, which stays among those that wait, and whether the run
        is ending."""
        with self._changed:
            if not self._waiting and not self._closing:
                self._changed.wait(max(0.05, files_at - time.monotonic()))
            self._uploading = max(self._waiting, default=None)
            return self._uploading, self._closing

    def _upload(self, step: int) -> None:
        self._own.check()
        folder, began = self._waiting[step], time.monotonic()
        if not folder.is_dir():  # deleted by retention, where there are no hard links
            self._done(step)
            return
        made = upload(self.store, folder, step, self._own.token, self._moved)
        self._upload_files()  # before the checkpoint counts: a run that goes on from it has the curve up to there
        before = {each.prefix for each in self._own.index.checkpoints}
        index = self._own.change(lambda index: self._with(index, made))
        self._done(step)
        address = f"{self.store}/{BELOW}/{made.prefix}"
        self._uploaded(step, address, made.bytes, time.monotonic() - began)
        remove(self.store, before - {each.prefix for each in index.checkpoints})
        self._pass_over()

    def _upload_files(self) -> None:
        self._own.renew()  # a writer that has lost the run must not replace the other one's files
        self._files.upload(self._own.check)

    def _with(self, index: Index, made: Complete) -> Index:
        others = [each for each in index.checkpoints if each.step != made.step]
        return index.model_copy(update={"checkpoints": self._kept([*others, made])})

    def _kept(self, found: list[Complete]) -> list[Complete]:
        newest = max((each.step for each in found), default=0) if self._newest is None else self._newest
        return kept(found, newest, self._keep, *self._rule)

    def _pass_over(self) -> None:
        """Gives up those that wait and that the mirror would not keep: they take room on the disk."""
        with self._changed:
            waiting = dict(self._waiting)
        trials = [trial for step, folder in waiting.items() if (trial := _trial(step, folder)) is not None]
        others = [each for each in self._own.index.checkpoints if each.step not in waiting]
        stay = {each.step for each in self._kept([*others, *trials])}
        with self._changed:  # what is uploaded now, or was saved anew, stays
            passed = [step for step in waiting if step not in stay and step != self._uploading]
            folders = [self._waiting.pop(step) for step in passed if self._waiting.get(step) == waiting[step]]
        for folder in folders:
            _discard(folder)

    def _done(self, step: int) -> None:
        with self._changed:
            folder = self._waiting.pop(step)
        _discard(folder)

    def _clean(self) -> None:
        """Removes what killed uploads and deletions left, and an earlier run that is overwritten: from the index first,
        and nothing that is no run's."""
        if self._overwrite:
            self._own.change(lambda index: index.model_copy(update={"checkpoints": []}))
            remove(self.store, overwritten(self.store))
            self.store.delete([each.path for each in entries_of(self.store)])
        named, earlier = {each.prefix for each in self._own.index.checkpoints}, self._own.index.earlier
        remove(self.store, orphans(self.store, named, {*earlier}))
        still = sorted({*earlier} & {token_of(prefix) for prefix in named})  # whose deletion may be killed later
        if still != earlier:
            self._own.change(lambda index: index.model_copy(update={"earlier": still}))

    def _moved(self, count: int) -> None:
        self.bytes_moved += count

    def _fail(self, error: Exception) -> None:
        """Reports a failure, once until uploads succeed again."""
        is_new = self._failure is None or isinstance(error, Lost)
        self._failure = str(error) if isinstance(error, StoreError) else last_line(error)
        if is_new:
            then = "" if isinstance(error, Lost) else "; training goes on, and the upload is tried again"
            with suppress(RunError):
                self._warn(f"uploading to {self.store} failed: {self._failure}{then}")


def _discard(folder: Path) -> None:
    """Removes the hard links of a checkpoint that waited, but never the run's own folder."""
    if folder.parent.name == STAGED:
        storage.discard(folder)


def _trial(step: int, folder: Path) -> Complete | None:
    """Returns the entry that a checkpoint would have, as far as retention looks at it."""
    with suppress(OSError, ValueError):
        return Complete(step=step, prefix="", bytes=0, facts=read_manifest(folder).facts, manifest="")
    return None


def kept(found: list[Complete], newest: int, keep: Checkpoints, higher: bool, metric: str | None) -> list[Complete]:
    """Returns the checkpoints that retention keeps (retention.py): the newest, the best by the metric, and those of
    later steps than `newest`, which a run passed over that resumed before them."""
    made = sorted((each for each in found if each.step <= newest), key=lambda each: each.step)
    scored = [
        (each.facts["metric"], each)
        for each in made
        if isinstance(each.facts.get("metric"), int | float) and each.facts.get("metric_name") in (None, metric)
    ]
    best = ranked(scored, higher)[: keep.keep_best]
    chosen = {each.step for each in [*made[-keep.keep_last :], *best]}
    return [each for each in sorted(found, key=lambda each: each.step) if each.step > newest or each.step in chosen]
