"""Candidates: runs that differ in some overrides, each with its planned costs, or with the reason why it cannot be.

Data are read once for all candidates whose workload is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain.config import rules
from drivetrain.config.load import load
from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.errors import RunError, UserError
from drivetrain.plan.step_costs import StepCosts
from drivetrain.plan.trace import fullest_step_costs
from drivetrain.runtime.run_folder import refuse_code_of_folders
from drivetrain.training.assemble import read_workload
from drivetrain.workloads.base import Workload


@dataclass(frozen=True)
class Candidate:
    """One way to run. run: None where the run file cannot be read with these overrides. reason: why it cannot work."""

    overrides: tuple[str, ...]
    run: RunConfig | None
    reason: str | None = None


@dataclass(frozen=True)
class Planned:
    """costs: None where the candidate was refused or could not be traced; reason says why."""

    candidate: Candidate
    costs: StepCosts | None
    reason: str | None = None


def candidates(run_file: Path, choices: Sequence[Sequence[str]], machine: Machine, trust: bool) -> list[Candidate]:
    """Returns the run file under each list of overrides, judged for the machine.

    Raises UserError where none of them can work, with all their problems.
    """
    found, problems = [], []
    for overrides in choices:
        run, its = load(run_file, overrides)
        if run is not None:
            refuse_code_of_folders(run, run_file, trust)
            run, its = rules.judged(run, its, machine)
        problems += its
        reason = "; ".join(f"{each.field}: {each.why}" for each in its) or None
        found.append(Candidate(tuple(overrides), run, reason))
    if all(each.reason for each in found):
        raise UserError(problems)
    return found


def planned(ways: Sequence[Candidate], machine: Machine) -> Iterator[Planned]:
    """Yields the costs of each candidate, in order. Raises UserError where data or model cannot be read."""
    samples = _Samples()
    for candidate in ways:
        if candidate.run is None or candidate.reason is not None:
            yield Planned(candidate, None, candidate.reason)
            continue
        workload = samples.of(candidate.run)
        try:
            yield Planned(candidate, fullest_step_costs(candidate.run, machine, workload))
        except UserError as error:
            reason = "; ".join(f"{each.field}: {each.why}" for each in error.problems)
            yield Planned(candidate, None, reason)
        except RunError as error:
            yield Planned(candidate, None, str(error))


class _Samples:
    """The workload of the latest candidate, kept for the next one if that has the same."""

    def __init__(self) -> None:
        self._key = ""
        self._workload: Workload | None = None

    def of(self, run: RunConfig) -> Workload:
        parts = {"workload", "seed", "adapter", "quantised_base", "quantisation_aware"}
        key = run.model_dump_json(include=parts)
        if self._workload is None or key != self._key:
            self._key, self._workload = key, read_workload(run, training=True)
        return self._workload
