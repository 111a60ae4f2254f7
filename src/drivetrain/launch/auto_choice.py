"""Decides `engine: auto` and `precision: auto` before a run is checked: by a plan for this machine.

A run that goes on, or whose checkpoint is read, has its engine and precision already: its folder's run.yaml has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.config.load import OPEN, left_to_the_plan, load
from drivetrain.config.planned import PlannedFigures
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem, UserError, counted, problem
from drivetrain.launch.external_launcher import OuterLauncher
from drivetrain.plan.overrides import overrides_of
from drivetrain.runtime.run_folder import RunFolder, refuse_code_of_folders

if TYPE_CHECKING:
    from drivetrain.plan.rows import Plan, Row


@dataclass(frozen=True)
class Decision:
    """overrides: the caller's, with the decided values in place of `auto`. notices: what was decided, and why."""

    overrides: list[str]
    notices: list[str] = field(default_factory=list)
    planned: PlannedFigures | None = None


def decided(run_file: Path, overrides: Sequence[str], anew: bool, trust: bool = False) -> Decision:
    """Returns the overrides of a run without `auto`. Raises UserError where nothing fits, with what would.

    anew: whether the run begins, so that its folder does not decide. trust: whether Python runs that a run's own
    run.yaml names.
    """
    asked = left_to_the_plan(run_file, overrides)
    if not asked:
        return Decision([*overrides])
    found = decided_of(_base(run_file, overrides, asked, trust), asked, anew)
    return replace(found, overrides=[*overrides, *found.overrides])


def decided_of(base: RunConfig, asked: Sequence[str], anew: bool) -> Decision:
    """Does the same for a run with stand-ins for the open fields. Returns the overrides of these alone.

    asked: the open ones.
    """
    earlier = None if anew else _of_the_folder(base, asked)
    if earlier is not None:
        notice = f"{' and '.join(asked)}=auto: {' '.join(earlier)}, as the run in {base.folder} has it"
        return Decision(earlier, [notice])
    _refuse_several_nodes_of_another_launcher(asked)
    plan = planned(base, asked)
    if plan.choice is None:
        raise _nothing_fits(plan, asked)
    values = [each for each in _values(plan.choice.run, base, asked) if _is_new(each, base, asked)]
    return Decision(values, [_why(plan, plan.choice, values, asked), *plan.offers], figures(plan.choice))


def _refuse_several_nodes_of_another_launcher(asked: Sequence[str]) -> None:
    """Raises UserError under torchrun and the like on several nodes: each of the ranks would plan for itself, for its
    own node alone."""
    outer = OuterLauncher.here()
    if outer is None or outer.world_size <= outer.processes:
        return
    each = f"{outer.world_size // outer.processes} nodes of {outer.processes} processes"
    why = f"auto is decided before ranks start, and another launcher has started {each}"
    fix = "take the way that `drivetrain plan run.yaml --machine NODESxDEVICESxKIND` finds, such as engine=fsdp"
    raise UserError([Problem(name, why, fix) for name in asked])


def planned(base: RunConfig, asked: Sequence[str]) -> Plan:
    """Returns the plan of a run for this machine. asked: the fields that are open."""
    from drivetrain.plan.catalogue import catalogue
    from drivetrain.plan.estimate import Traced
    from drivetrain.plan.machines import this_machine
    from drivetrain.plan.planning import searched, space_of
    from drivetrain.plan.trace_processes import tracing_processes

    here = this_machine(catalogue()).over(base.nodes)
    with tracing_processes() as processes:
        return searched(base, space_of(base, here.host, asked), Traced(here, processes))


def figures_as_it_stands(run: RunConfig) -> PlannedFigures | None:
    """Returns the planned figures of a run on this machine; None where it cannot be planned."""
    from drivetrain.plan.as_asked import as_it_stands
    from drivetrain.plan.catalogue import catalogue
    from drivetrain.plan.estimate import Traced
    from drivetrain.plan.machines import this_machine

    found = as_it_stands(run, Traced(this_machine(catalogue()).over(run.nodes)))
    return None if found.costs is None else figures(found)


def figures(choice: Row) -> PlannedFigures:
    """Returns the planned figures of a row that fits."""
    assert choice.costs is not None
    return PlannedFigures(
        way=" ".join(choice.overrides),
        peak_bytes=choice.costs.memory.allocated,
        samples_per_second=choice.samples_per_second or 0.0,
        micro_batch_size=choice.run.micro_batch,
    )


def _base(run_file: Path, overrides: Sequence[str], asked: Sequence[str], trust: bool) -> RunConfig:
    """Returns the run with stand-ins for what is open. Raises UserError with all problems of the others."""
    run, problems = load(run_file, [*overrides, *(f"{name}={OPEN[name]}" for name in asked)])
    if run is None or problems:
        raise UserError(problems)
    refuse_code_of_folders(run, run_file, trust)
    return run


def _of_the_folder(base: RunConfig, asked: Sequence[str]) -> list[str] | None:
    """Returns what the run in the folder has for the open fields; None where there is none that can be read."""
    file = RunFolder(base.folder).run_file
    if not file.is_file():
        return None
    run, problems = load(file)
    if run is None or problems:
        return None
    return [each for each in _values(run, base, asked) if each.partition("=")[0] in (*asked, "processes")]


def _values(run: RunConfig, base: RunConfig, asked: Sequence[str]) -> list[str]:
    """Returns the overrides that lead from the base to a run; an open precision always, though the stand-in is the
    same."""
    found = [*overrides_of(run, base)]
    if "precision" in asked and run.precision == base.precision:
        found.insert(1, f"precision={run.precision}")
    return found


def _is_new(override: str, base: RunConfig, asked: Sequence[str]) -> bool:
    """Returns whether an override of the choice is more than what the run has; the engine's own is, if it was open."""
    name, _, _ = override.partition("=")
    if name == "micro_batch_size" and base.micro_batch_size == "auto":
        return False  # found by trying, from the planned one on
    return name in asked or name not in OPEN


def _why(plan: Plan, choice: Row, values: Sequence[str], asked: Sequence[str]) -> str:
    ways = f"{counted(len(plan.rows), 'way')}, {counted(plan.traces, 'trace')}, {plan.seconds:.0f} s"
    others = [row for row in plan.rows if row.fits == "yes" and row.run.engine != choice.run.engine]
    beside = f"; next {' '.join(others[0].overrides)} with {others[0].seconds:.3g} s" if others else ""
    took = f"{' and '.join(asked)}=auto takes {' '.join(values)}"
    return f"{took}: planned {choice.seconds:.3g} s a step, the quickest that fits ({ways}){beside}"


def _nothing_fits(plan: Plan, asked: Sequence[str]) -> UserError:
    nearest = next((row for row in plan.rows if row.costs is not None), plan.rows[0])
    why = f"auto: no way to run fits this machine; nearest {' '.join(nearest.overrides)}: {nearest.verdict}"
    return problem(" and ".join(asked), why, "; ".join(plan.offers) or "take a smaller model or another machine")
