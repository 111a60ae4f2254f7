"""The parts of a board, and its answers to requests: free of HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain.board import run_file
from drivetrain.board.access import User
from drivetrain.board.curves import Curves
from drivetrain.board.detect import ThisMachine
from drivetrain.board.entries import RUN_FILE, id_of
from drivetrain.board.feed import Feed
from drivetrain.board.files import Uploads
from drivetrain.board.foreign import axes_problems, foreign_problems, named_places
from drivetrain.board.places import Places, followed
from drivetrain.board.queue import Queue, digest_of, unknown_devices
from drivetrain.board.records import Asked, Entry, now
from drivetrain.board.runs import Runs
from drivetrain.board.verbs import VerbProcess
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem, UserError
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.web.refusals import Refusal

OWN = ".board"  # folder of the board's own files, within the folder of runs


@dataclass(frozen=True)
class Board:
    """root: the folder of runs; data: folders that the file picker shows; operators_code: whether run files of
    operators may name Python, and files outside these folders."""

    root: Path
    data: tuple[Path, ...]
    queue: Queue
    runs: Runs
    curves: Curves
    feed: Feed
    machine: ThisMachine
    verbs: VerbProcess
    uploads: Uploads
    operators_code: bool = False

    @classmethod
    def at(
        cls, root: Path, data: Sequence[Path], machine: ThisMachine | None = None, operators_code: bool = False
    ) -> Board:
        """machine: to check for; left out, this one is looked at in the background."""
        queue = Queue(root / OWN)
        runs = Runs(root, queue.entries)
        return cls(
            root=root,
            data=tuple(data),
            queue=queue,
            runs=runs,
            curves=Curves(),
            feed=Feed(runs, queue),
            machine=machine or ThisMachine(),
            verbs=VerbProcess(root),
            uploads=Uploads(root / OWN / "uploads"),
            operators_code=operators_code,
        )

    def start(self) -> None:
        self.queue.start()
        self.feed.start()

    def close(self) -> None:
        """Ends the board; what runs goes on."""
        self.verbs.close()
        self.feed.close()
        self.queue.close()

    def check(self, user: User, text: str) -> run_file.Checked:
        """Returns what the schema and the rules of this machine find. Files that the user may not name are refused
        before any is read."""
        problems = self._named_problems(user, text)
        return run_file.Checked(text, None, problems, []) if problems else run_file.check(text, self.machine.machine())

    def refuse_named(self, user: User, text: str) -> None:
        """Raises UserError for files that a run file names and that the user may not name. No file is read."""
        if problems := self._named_problems(user, text):
            raise UserError(problems)

    def _named_problems(self, user: User, text: str) -> list[Problem]:
        return [] if self.is_trusted(user) else named_places(run_file.values_of(text), self.run_places)

    def usable(self, user: User, text: str, axes: Sequence[str] = ()) -> RunConfig:
        """Returns the run of a run file that this user may read data and train with. axes: of a plan, which change it.
        Raises UserError with all problems."""
        checked = self.check(user, text)
        if checked.run is None or checked.problems:
            raise UserError(checked.problems)
        self.refuse_foreign(user, checked.run, axes)
        return checked.run

    def refuse_foreign(self, user: User, run: RunConfig, axes: Sequence[str] = ()) -> None:
        """Raises UserError for Python, and for files outside the board's folders, that an operator's run file names."""
        if self.is_trusted(user):
            return
        problems = [*foreign_problems(run, self.run_places), *axes_problems(axes, self.run_places)]
        if problems:
            raise UserError(problems)

    def is_trusted(self, user: User) -> bool:
        """Returns whether a user's run files may name Python, and files outside the board's folders."""
        return user.may("administrator") or (self.operators_code and user.may("operator"))

    @property
    def data_places(self) -> Places:
        """Where the file picker and the forms for a trained run may lead."""
        return Places(tuple(map(followed, self.data)), followed(self.root / OWN))

    @property
    def run_places(self) -> Places:
        """Where run files of operators may lead."""
        return Places((followed(self.root), *map(followed, self.data)), followed(self.root / OWN))

    def train(self, user: User, key: str, text: str, devices: list[str] | None) -> tuple[Entry, bool]:
        """Queues a training. Raises UserError with all problems of the run file."""
        digest = digest_of(verb="train", text=text, devices=devices)
        name = id_of(user.name, key)
        earlier = self.queue.entries.one(name)
        if earlier is not None:
            return same(earlier, digest), False
        unknown_devices(devices)
        run = self.usable(user, text)
        with self.queue.with_lock():
            free = self.runs.free_name(run.name)
            asked = self._asked(name, digest, user, free, run, devices)
            return self.queue.add(asked, {RUN_FILE: text})

    def resume(self, user: User, key: str, run: str) -> tuple[Entry, bool]:
        """Queues a training that goes on from the newest good checkpoint."""
        digest, name = digest_of(verb="resume", run=run), id_of(user.name, key)
        with self.queue.with_lock():
            earlier = self.queue.entries.one(name)
            if earlier is not None:
                return same(earlier, digest), False
            summary = self.runs.one(run)
            refuse_others(user, summary["owner"])
            if "resume" not in summary["can"]:
                raise Refusal(409, f"the run is {summary['status']} and cannot go on", "cannot_resume")
            file, text = self.runs.run_file(run), self.runs.submitted(run)
            checked = self.check(user, run_file.edited(text, {}, ["output"]))
            if checked.run is None:
                raise UserError(checked.problems)
            self.refuse_foreign(user, checked.run)
            is_sent = file.is_relative_to(self.queue.entries.folder)
            asked = self._asked(name, digest, user, run, checked.run, None, None if is_sent else file, resume=True)
            return self.queue.add(asked, {RUN_FILE: text} if is_sent else {})

    def _asked(
        self,
        name: str,
        digest: str,
        user: User,
        run: str,
        config: RunConfig,
        devices: list[str] | None,
        file: Path | None = None,
        resume: bool = False,
    ) -> Asked:
        """Returns a training as the queue holds it. file: the run file; None: the entry's own."""
        file = file or self.queue.entries.folder / name / RUN_FILE
        folder = RunFolder(self.root / run).path
        words = ["train", str(file), f"name={run_file.flow(run)}", f"output={run_file.flow(str(folder))}"]
        on_gpu = self.machine.machine().device == "cuda" and config.device != "cpu"
        return Asked(
            id=name,
            digest=digest,
            verb="train",
            run=run,
            words=[*words, *(["--resume"] if resume else [])],
            owner=user.name,
            created=now(),
            device="cuda" if on_gpu else "cpu",
            count=config.devices if on_gpu else 1,
            wanted=devices,
            resume=resume,
        )

    def delete(self, user: User, run: str) -> int:
        """Deletes a run and its entries. Returns the bytes that it had."""
        refuse_others(user, self.runs.one(run)["owner"])
        size = self.runs.delete(run, self.queue.with_lock())
        self.curves.forget(self.runs.folder(run))
        return size

    def stop(self, user: User, run: str, at_once: bool) -> Entry:
        """Asks the keeper of a run to end it."""
        summary = self.runs.one(run)
        refuse_others(user, summary["owner"])
        if ("kill" if at_once else "stop") not in summary["can"]:
            why = f"the run is {summary['status']}"
            if summary["status"] == "running":
                why = "the run was started outside the board: stop it where it was started"
            raise Refusal(409, why, "cannot_stop")
        entry = self.queue.entries.one(summary["entry"])
        assert entry is not None
        self.queue.entries.stop(entry, user.name, at_once)
        return self.queue.entries.one(entry.id) or entry

    def end(self, user: User, entry: Entry) -> Entry:
        """Asks the keeper of an evaluation, predictions, an export or a chat to end it: they leave nothing to save. A
        chat first ends its answers, and at once when it is asked again."""
        refuse_others(user, entry.asked.owner)
        if entry.asked.verb == "train":
            raise Refusal(409, "it is a training: stop it on the page of its run", "cannot_stop")
        if entry.state not in ("running", "stopping"):
            raise Refusal(409, f"the entry is {entry.state}, and does not run", "not_running")
        at_once = entry.asked.verb != "serve" or entry.state == "stopping"
        self.queue.entries.stop(entry, user.name, at_once)
        return self.queue.entries.one(entry.id) or entry


def same(earlier: Entry, digest: str) -> Entry:
    """Returns the entry of a request that came again. Raises Refusal for another request with its key."""
    if earlier.asked.digest != digest:
        raise Refusal(409, "this key was sent with another form: send a new key with each form", "key_reused", "key")
    return earlier


def refuse_others(user: User, owner: str | None) -> None:
    """Raises Refusal (403) unless the user may change what belongs to an owner; None: the command line's."""
    if owner != user.name and not user.may("administrator"):
        whose = "was started at the command line" if owner is None else f"belongs to {owner}"
        raise Refusal(403, f"it {whose}: its owner or an administrator may do that", "not_yours")
