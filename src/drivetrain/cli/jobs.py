"""Starts a verb's job on the run's ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.cli.console import print_notices

if TYPE_CHECKING:
    from drivetrain.launch.job import Node, Result
    from drivetrain.launch.prepare import Checked
    from drivetrain.launch.restarts import Place


def start_job(checked: Checked, node: Node | None = None, place: Place | None = None, **job: Any) -> Result:
    """Starts the job on the ranks of a checked run, and returns the result of the first.

    place: where the ranks run, if not on this machine or `node`. job: fields of launch.job.Job, beside the run and its
    notices.
    """
    from drivetrain.launch.job import Job, Node
    from drivetrain.launch.start import start_at_terminal

    if job["verb"] != "train" and checked.is_first:
        print_notices(checked.notices)  # a training reports them itself, and keeps them
    task = Job(run=checked.run, notices=checked.notices, planned=checked.planned, **job)
    return start_at_terminal(task, node or Node(), place)
