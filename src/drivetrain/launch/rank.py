"""One rank in a process of its own: `python -m drivetrain.launch.rank FOLDER PARENT`.

The folder holds task.json and attempt.json; what came of it goes beside them, as rank-<number>.json. PARENT is the
process to end with.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import traceback
from pathlib import Path

from drivetrain.heartbeat import Heart
from drivetrain.launch.asked import Answers, pulse_file
from drivetrain.launch.outcome import clear, done, failed
from drivetrain.launch.standing import waits_on_gpu
from drivetrain.launch.task import Task

TASK = "task.json"


def main(folder: Path, parent: int) -> None:
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    number, code = int(os.environ["LOCAL_RANK"]), 1
    try:
        heart = Heart(pulse_file(folder, number), rank, Answers(folder, number), waits_on_gpu).start()
        from drivetrain.attempt import Attempt
        from drivetrain.hardware import detect
        from drivetrain.launch.group import join
        from drivetrain.launch.perform import perform

        if number == 0:  # of ranks that made room for a node which came late
            clear(folder)
        task = _fitted(Task.model_validate_json((folder / TASK).read_bytes()), world, local)
        if world > 1:
            join(detect(task.run.device).device, task.run.hang_seconds)
        result = perform(task, Attempt.read(folder), heart)
        done(rank, result).write(folder)
        code = result.code
    except BaseException as error:  # also KeyboardInterrupt: the parent tells it once, for all ranks
        failed(rank, error, traceback.format_exc()).write(folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of a broken process group may never end


def _fitted(task: Task, world: int, local: int) -> Task:
    """The task on as many ranks as there are; UserError where fewer than asked for cannot do it."""
    from drivetrain.config import rules
    from drivetrain.config.restarts import shrunk
    from drivetrain.errors import UserError
    from drivetrain.hardware import detect

    run = shrunk(task.run, world, local)
    if run is task.run:
        return task
    problems = rules.check(run, detect(run.device))
    if problems:
        raise UserError(problems)
    told = f"{world} of {task.run.world_size} ranks are there; the global batch stays {run.global_batch}"
    return task.model_copy(update={"run": run, "notices": [*task.notices, told]})


def _end_with(parent: int, folder: Path) -> None:
    """A parent killed in the middle must not leave ranks computing, nor its folder."""
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
