"""`drivetrain profile`: takes the steps, asks the plan what should be quicker, and tries it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.config.load import load
from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.errors import RankError, RunError, UserError, problem
from drivetrain.launch.external_launcher import OuterLauncher
from drivetrain.launch.job import Job
from drivetrain.launch.prepare import checked
from drivetrain.launch.start import start
from drivetrain.plan.as_asked import plan_as_asked
from drivetrain.plan.catalogue import catalogue
from drivetrain.plan.estimate import Traced
from drivetrain.plan.machines import this_machine
from drivetrain.plan.rows import Row
from drivetrain.plan.timeline import NOTHING, Timeline
from drivetrain.profile.suggestions import Suggestion, suggestions

WARMING = "a few that warm up"
NO_SPEED = "nothing is suggested by the plan, which does not know this machine's speed: run drivetrain calibrate once"
SHORTER = "the run has fewer steps than are profiled: it was continued as a longer run"


@dataclass(frozen=True)
class Trial:
    """plain_seconds: of a step, with the suggestion; None where it could not run, and failure has why."""

    overrides: tuple[str, ...]
    plain_seconds: float | None
    failure: str | None = None


@dataclass(frozen=True)
class Profile:
    """measured: as `profile.recording.record` returns it. planned: the plan's row of the run, if it can be traced."""

    run: RunConfig
    machine: Machine
    measured: dict[str, Any]
    planned: Row | None
    suggestions: list[Suggestion]
    trials: list[Trial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    of_first: bool = True  # whether this is the first rank's, which is the one to show it

    @property
    def slowest(self) -> int:
        """The rank whose steps lasted longest."""
        ranks = self.measured["ranks"]
        return max(range(len(ranks)), key=lambda rank: ranks[rank]["step"])

    @property
    def timeline(self) -> Timeline:
        """The planned memory over a step; empty where it cannot be traced."""
        costs = None if self.planned is None else self.planned.costs
        return NOTHING if costs is None else costs.memory.timeline.thinned()

    def as_object(self) -> dict[str, Any]:
        """Returns the profile as `--json` prints it and profile.json holds it."""
        return {
            "engine": self.run.engine.label,
            "precision": self.run.precision,
            "ranks_number": self.run.world_size,
            "device": self.machine.device,
            **self.measured,
            "planned_memory": self._planned_memory(),
            "suggestions": [each.as_object() for each in self.suggestions],
            "trials": [vars(each) for each in self.trials],
            "notes": self.notes,
        }

    def _planned_memory(self) -> dict[str, Any] | None:
        """Returns what is alive at the step's peak, where each part of the step holds most, and moment by moment."""
        if self.planned is None or self.planned.costs is None:
            return None
        memory, highest = self.planned.costs.memory, self.timeline.highest_of_phases()
        phases = {phase: highest.parts_at(moment) for moment, phase in enumerate(highest.phases)}
        over_step = self.timeline.as_object()
        return {"allocated_bytes": memory.allocated, "parts": memory.parts, "phases": phases, "over_step": over_step}


def profile(
    run_file: Path,
    overrides: Sequence[str],
    steps: int,
    folder: Path,
    tries: int,
    trust: bool,
    say: Callable[[str], None],
) -> Profile:
    """Profiles a run file. tries: how many suggestions are measured. folder: exists, and gets the traces."""
    from drivetrain.runtime.hardware import detect

    _refuse_several_nodes(run_file, overrides)
    ready = checked(run_file, overrides, trust=trust)
    say(f"{steps} steps without the profiler, then {steps} with it, after {WARMING}")
    result = start(Job(verb="profile", run=ready.run, steps=steps, output=folder, notices=ready.notices))
    measured = result.value
    ranks = measured["ranks"]
    slowest = max(ranks, key=lambda rank: rank["step"])
    plans = _Plans(run_file, overrides, ready.run.nodes, trust)
    found = suggestions(ready.run, slowest, measured["workers"], plans.seconds)
    trials = [_tried(run_file, overrides, each.overrides, steps, trust, say) for each in found[:tries]]
    machine = detect(ready.run.device)
    notes = [*ready.notices, *([SHORTER] if measured["lengthened"] else []), *plans.notes]
    return Profile(ready.run, machine, measured, plans.row(()), found, trials, notes, result.of_first)


def _refuse_several_nodes(run_file: Path, overrides: Sequence[str]) -> None:
    """Raises UserError for a run on several nodes, whose ranks only another launcher can start for a profile."""
    run, _ = load(run_file, overrides)
    if run is not None and run.nodes > 1 and OuterLauncher.here() is None:
        why = f"{run.nodes} were given, and profile starts the ranks of one machine"
        fix = "give nodes=1, or start it on each node: torchrun --nnodes N ... -m drivetrain profile run.yaml"
        raise problem("nodes", why, fix)


def _tried(
    run_file: Path,
    overrides: Sequence[str],
    added: tuple[str, ...],
    steps: int,
    trust: bool,
    say: Callable[[str], None],
) -> Trial:
    say(f"the same with {' '.join(added)}")
    try:
        ready = checked(run_file, [*overrides, *added], trust=trust)
        found = start(Job(verb="profile", run=ready.run, steps=steps)).value
    except (UserError, RunError, RankError) as error:
        return Trial(added, None, str(error).splitlines()[0])
    return Trial(added, found["plain_seconds"])


class _Plans:
    """The plan's rows of the run file on this machine, by added overrides. notes: why there are no times."""

    def __init__(self, run_file: Path, overrides: Sequence[str], nodes: int, trust: bool) -> None:
        self._file, self._overrides, self._trust = run_file, [*overrides, f"nodes={nodes}"], trust
        self._estimator = Traced(this_machine(catalogue()).over(nodes))
        self._rows: dict[tuple[str, ...], Row | None] = {}
        no_speed = self._estimator.no_speed
        self.notes = [] if no_speed is None else [NO_SPEED]

    def seconds(self, added: Sequence[str]) -> float | None:
        """Returns the planned seconds of a step; None where the way does not fit, or its time is not known."""
        found = None if self.notes else self.row(tuple(added))
        return None if found is None or found.fits == "no" else found.seconds

    def row(self, added: tuple[str, ...]) -> Row | None:
        if added not in self._rows:
            try:
                plan = plan_as_asked(self._file, [[*self._overrides, *added]], self._estimator, trust=self._trust)
            except (UserError, RunError, RankError):
                self._rows[added] = None
            else:
                self._rows[added] = plan.rows[0]
        return self._rows[added]
