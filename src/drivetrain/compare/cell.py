"""Runs one cell in a process of its own: `python -m drivetrain.compare.cell FOLDER`.

The folder holds request.json. The run prints into its log; its outcome goes to outcome.json, unless the process is
killed: then the parent writes it. Standard input is a pipe from the parent; its end means that the parent is gone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from drivetrain.compare.outcome import Outcome, Status
from drivetrain.config.planned import PlannedFigures
from drivetrain.config.run import RunConfig
from drivetrain.errors import OutOfMemory, RankError, RunError, UserError
from drivetrain.memory.garbage import own_process

REQUEST = "request.json"


class OnRay(BaseModel):
    """A placement group that holds a run's machines: its name, and the address and namespace to find it by."""

    address: str
    namespace: str
    group: str


class Request(BaseModel):
    key: str
    verb: Literal["train", "predict"]
    run: RunConfig
    checkpoint: str | None  # to predict with; None: fresh weights
    plan: bool = False  # a training is planned first
    on_ray: OnRay | None = None  # the machines of a run that takes several; None: this one is enough


def main(folder: Path) -> int:
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    request = Request.model_validate_json((folder / REQUEST).read_bytes())
    start = time.perf_counter()
    status, reason = _judged(request)
    Outcome(key=request.key, status=status, reason=reason, seconds=time.perf_counter() - start).write(folder)
    return 0 if status == "completed" else 1


def _judged(request: Request) -> tuple[Status, str]:
    try:
        _run(request)
    except UserError as error:
        return "refused", "; ".join(f"{found.field}: {found.why}" for found in error.problems)
    except OutOfMemory as error:
        return "out of memory", str(error)
    except RunError as error:
        return "failed", str(error)
    except Exception as error:
        import traceback

        sys.stderr.write(error.traceback if isinstance(error, RankError) else traceback.format_exc())  # into the log
        message = _line(error) if isinstance(error, RankError) else f"{type(error).__name__}: {_line(error)}"
        return ("out of memory" if _is_out_of_memory(error) else "failed"), message
    return "completed", ""


def _run(request: Request) -> None:
    from drivetrain.launch.job import Job
    from drivetrain.launch.start import start

    if request.verb == "train":
        job = Job(verb="train", run=request.run, overwrite=True, planned=_planned(request))
    else:
        job = Job(verb="time_predictions", run=request.run, checkpoint=request.checkpoint)
    if request.on_ray is None:
        start(job)
        return
    from drivetrain.launch.on_ray import RayCluster
    from drivetrain.launch.ray_connection import connected

    with connected(request.on_ray.address, request.on_ray.namespace):
        start(job, place=RayCluster(request.on_ray.group))


def _planned(request: Request) -> PlannedFigures | None:
    if not request.plan:
        return None
    from drivetrain.launch.auto_choice import figures_as_it_stands

    return figures_as_it_stands(request.run)


def _is_out_of_memory(error: Exception) -> bool:
    """Returns whether memory of a device, of Python, or of a library ran out, here or on a rank."""
    from drivetrain.memory.shortage import is_shortage, names_shortage

    return is_shortage(error) or names_shortage(str(error))


def _line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")[:300]


def _end_with_the_parent() -> None:
    """Ends with the parent: a comparison killed in the middle must not leave a cell computing."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    own_process()
    sys.exit(main(Path(sys.argv[1])))
