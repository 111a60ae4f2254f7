"""One rank in a process of its own: `python -m drivetrain.launch.rank FOLDER PARENT`.

The folder holds task.json; what came of it goes beside it, as rank-<number>.json. PARENT is the process to end with.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import traceback
from pathlib import Path

from drivetrain.launch.outcome import done, failed
from drivetrain.launch.task import Task

TASK = "task.json"


def main(folder: Path, parent: int) -> None:
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    rank = int(os.environ["RANK"])
    code = 1
    try:
        from drivetrain.hardware import detect
        from drivetrain.launch.group import join
        from drivetrain.launch.perform import perform

        task = Task.model_validate_json((folder / TASK).read_bytes())
        join(detect(task.run.device).device)
        result = perform(task)
        done(rank, result).write(folder)
        code = result.code
    except BaseException as error:  # also KeyboardInterrupt: the parent tells it once, for all ranks
        failed(rank, error, traceback.format_exc()).write(folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of a broken process group may never end


def _end_with(parent: int, folder: Path) -> None:
    """A parent killed in the middle must not leave ranks computing, nor its folder."""
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
