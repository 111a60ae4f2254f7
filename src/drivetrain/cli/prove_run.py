"""`drivetrain prove`: runs three traces and compares them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drivetrain.config.engines import SINGLE
from drivetrain.config.run import RunConfig
from drivetrain.errors import counted
from drivetrain.launch.job import Job
from drivetrain.launch.start import start
from drivetrain.prove.trace import Trace
from drivetrain.prove.verdicts import Verdict, remarks, verdicts


@dataclass(frozen=True)
class Proof:
    verdicts: list[Verdict]
    remarks: list[str]

    @property
    def holds(self) -> bool:
        return all(verdict.holds is not False for verdict in self.verdicts)


def prove(run: RunConfig, steps: int, say: Callable[[str], None]) -> Proof:
    """Runs the first steps on the run's engine, in one process, and in one process with batches cut differently."""
    single = run.model_copy(update={"engine": SINGLE, "processes": None, "nodes": 1, "batch_size": run.global_batch})
    single = single.model_copy(update={"batch_size_per_device": None})
    halves = single.model_copy(update={"micro_batch_size": max(1, (single.micro_batch + 1) // 2)})
    say(f"{_at_most(run, steps)} in one process")
    reference = _traced(single, steps, resume=False)
    say("the same with the batch cut in another way: what rounding does")
    rounding = _traced(halves, steps, resume=False, evaluates=False)
    say(f"the same with engine={run.engine.label} on {run.devices} devices, and a resume in the middle")
    asked = _traced(run, steps, resume=True)
    return Proof(verdicts(run, asked, reference, rounding), remarks(reference, steps))


def _at_most(run: RunConfig, steps: int) -> str:
    """Returns how many steps are compared, as words; how many an epoch has is not known before the data are read."""
    if run.loop.steps is None:
        return f"at most {steps} steps"
    return counted(min(steps, run.loop.steps), "step")


def _traced(run: RunConfig, steps: int, resume: bool, evaluates: bool = True) -> Trace:
    task = Job(verb="trace", run=run, steps=steps, resume=resume, evaluates=evaluates)
    return Trace.model_validate(start(task).value)
