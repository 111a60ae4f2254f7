"""One rank in a process of its own: `python -m drivetrain.launch.rank FOLDER PARENT`.

The folder holds task.json and attempt.json; the outcome goes beside them, as rank-<number>.json. The rank ends when the
process PARENT does.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from drivetrain.errors import last_line
from drivetrain.launch.diagnostics.process_state import waits_on_gpu
from drivetrain.launch.diagnostics.stack_request import Answers, pulse_file
from drivetrain.launch.job import Job
from drivetrain.launch.outcome import RankOutcome, clear, done, failed
from drivetrain.memory.garbage import importing, own_process
from drivetrain.runtime.heartbeat import Heart

TASK = "task.json"
MOST_REMOVALS = 10  # of a folder in which this rank's own threads may be making a file just then
_ending = threading.Lock()


def main(folder: Path, parent: int) -> None:
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    number, code = int(os.environ["LOCAL_RANK"]), 1
    try:
        heart = Heart(pulse_file(folder, number), rank, Answers(folder, number), waits_on_gpu).start()
        own_process()
        with importing():
            from drivetrain.launch.execute import perform
            from drivetrain.launch.group import join
            from drivetrain.runtime.attempt import Attempt
            from drivetrain.runtime.hardware import detect

        if number == 0:  # of ranks that made room for a node which came late
            clear(folder)
        task = _fitted(Job.model_validate_json((folder / TASK).read_bytes()), world)
        if world > 1:
            warnings = join(detect(task.run.device).device, task.run.hang_seconds)
            task = task.model_copy(update={"notices": [*task.notices, *warnings]})
        result = perform(task, Attempt.read(folder), heart)
        outcome, code = done(rank, result), result.code
    except BaseException as error:  # also KeyboardInterrupt: the parent tells it once, for all ranks
        outcome = failed(rank, error, traceback.format_exc())
    _leave(outcome, folder, parent)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of a broken process group may never end


def _fitted(task: Job, world: int) -> Job:
    """Returns the task on as many ranks as there are; raises UserError if it needs more."""
    from drivetrain.config import rules
    from drivetrain.config.restarts import shrunk
    from drivetrain.errors import UserError
    from drivetrain.runtime.hardware import detect

    run = shrunk(task.run, world)
    if run is task.run:
        return task
    # the ranks are there already; `processes` is no longer the number of this node's where nodes have unequal numbers
    problems = [each for each in rules.check(run, detect(run.device)) if each.field != "processes"]
    if problems:
        raise UserError(problems)
    notice = f"{world} of {task.run.world_size} ranks are there; the global batch stays {run.global_batch}"
    return task.model_copy(update={"run": run, "notices": [*task.notices, notice]})


def _leave(outcome: RankOutcome, folder: Path, parent: int) -> None:
    """Writes for the parent how this rank ended. If the parent is gone, errors about other ranks do not matter."""
    if os.getppid() != parent:
        _end_alone(folder)
    try:
        outcome.write(folder)
    except OSError as error:  # the disk is full, say: the parent reads the last line of this rank's stderr
        why = outcome.message or "; ".join(map(str, outcome.problems)) or outcome.kind
        _say(f"{outcome.traceback}{folder} cannot be written: {last_line(error)}; {why}")


def _end_with(parent: int, folder: Path) -> None:
    """Ends this rank with its parent: a killed parent must not leave ranks computing, nor its folder."""
    while os.getppid() == parent:
        time.sleep(0.5)
    _end_alone(folder)


def _end_alone(folder: Path) -> NoReturn:
    """Ends a rank whose parent is gone, with one line."""
    _ending.acquire()  # once: it is never given back
    try:
        _say(f"rank {os.environ['RANK']} ends: the process that started it is gone")
        for _ in range(MOST_REMOVALS):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.05)
    finally:
        os._exit(1)


def _say(line: str) -> None:
    """Writes to stderr, if anything reads it: its reader may have gone with the parent."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
