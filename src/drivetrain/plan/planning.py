"""Plans a run file: the ways that are named as they stand, or else a search for the best one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from drivetrain.config.axes import choices, read_axes
from drivetrain.config.load import AUTO, OPEN, left_to_the_plan, load, replaced, resolve_key
from drivetrain.config.machine import Machine
from drivetrain.config.precision import PRECISIONS
from drivetrain.config.rules import judged_anywhere, precision_gap
from drivetrain.config.run import RunConfig
from drivetrain.data.remote_sources import fetched
from drivetrain.errors import Problem, UserError, problem
from drivetrain.plan.as_asked import plan_as_asked
from drivetrain.plan.calibration import kept
from drivetrain.plan.catalogue import catalogue
from drivetrain.plan.estimate import Traced
from drivetrain.plan.machines import beyond_link, cluster, too_many_nodes
from drivetrain.plan.overrides import after
from drivetrain.plan.rows import Plan, Row
from drivetrain.plan.search import search
from drivetrain.plan.search_space import SEARCHED, Space, with_global_batch
from drivetrain.plan.trace_processes import tracing_processes
from drivetrain.runtime.run_folder import refuse_code_of_folders
from drivetrain.workloads.generating import MakesSamples

CANDIDATES = ("fp32", "tf32", "bf16-mixed")  # weights, their sums and updates stay in fp32


def planned(
    run_file: Path,
    arguments: Sequence[str],
    machine: str,
    devices: Path | None = None,
    price: float | None = None,
    trust: bool = False,
    say: Callable[[str], None] | None = None,
) -> Plan:
    """Returns the plan of a run file.

    arguments: overrides, and axes as `compare` takes them: with an axis each combination is planned as it stands,
    without one the best way is searched. Where the machine's speed is not known, the run is planned as it stands too,
    without times. machine: as `machines.cluster` takes it. devices: a YAML with devices of the user's own.
    say: takes the way that is looked at, in words, and the number of its trace.
    """
    try:
        there = cluster(machine, catalogue(devices))
    except UserError as error:  # what is wrong with the run shows without a machine
        raise UserError([*_problems_anywhere(run_file, arguments), *error.problems]) from None
    with tracing_processes() as processes:
        estimator = Traced(there, processes, say)
        found = _planned(run_file, arguments, estimator, price, trust)
    _refuse_for_all(found, estimator)
    fixed, axes = read_axes(arguments)
    replacing = dict.fromkeys(note for each in choices(fixed, axes) for note in replaced(run_file, each.overrides))
    return replace(found, notes=(*replacing, *found.notes))


def _refuse_for_all(plan: Plan, estimator: Traced) -> None:
    """Raises the UserError for which none of the ways could be planned, where they have no other reason."""
    failures = [*estimator.failures.values()]
    if len(failures) == 1 and isinstance(failures[0], UserError) and all(row.costs is None for row in plan.rows):
        raise failures[0]


def _problems_anywhere(run_file: Path, arguments: Sequence[str]) -> list[Problem]:
    """Returns the problems of a run file, in each of the ways that are named, on whatever machine."""
    try:
        fixed, axes = read_axes(arguments)
        asked = [f"{name}={OPEN[name]}" for name in left_to_the_plan(run_file, fixed)]
        read = [load(run_file, [*each.overrides, *asked]) for each in choices(fixed, axes)]
    except UserError as error:
        return list(error.problems)
    found = [each for run, its in read for each in (its if run is None else judged_anywhere(run, its))]
    return list(dict.fromkeys(found))


def _planned(run_file: Path, arguments: Sequence[str], estimator: Traced, price: float | None, trust: bool) -> Plan:
    fixed, axes = read_axes(arguments)
    if axes or estimator.no_speed is not None:
        ways = [each.overrides for each in choices(fixed, axes)]
        return _noted(plan_as_asked(run_file, ways, estimator, price, trust), estimator)
    asked = left_to_the_plan(run_file, fixed)
    base, problems = load(run_file, [*fixed, *(f"{name}={OPEN[name]}" for name in asked)])
    if base is not None:
        problems = [*problems, *too_many_nodes(base.nodes, estimator.nodes)]
    if base is None or problems:
        raise UserError(problems)
    refuse_code_of_folders(base, run_file, trust)
    base = fetched(base, data=False)
    named = {resolve_key(each.partition("=")[0])[0] for each in fixed}
    if "engine" not in named:  # the file's own engine is one of those that are searched
        asked = [*asked, "engine"]
    found = searched(base, space_of(base, estimator.host, asked), estimator, price)
    own = [each for each in fixed if not _is_open(each, asked)]
    return _with_own(_noted(found, estimator), own, "precision" in asked)


def _noted(plan: Plan, estimator: Traced) -> Plan:
    """Returns the plan with notes of what its figures leave out or take for granted."""
    return replace(plan, notes=(*plan.notes, *_notes(plan, estimator)))


def _notes(plan: Plan, estimator: Traced) -> Iterator[str]:
    in_eight_bits = any(each.timing is not None and each.run.precision_spec.layers is not None for each in plan.rows)
    if in_eight_bits and estimator.cluster.is_here and kept(estimator.host) is not None:
        yield "fp8: this machine's calibration has no products in 8 bits, so that the times are those of bf16"
    if any(each.host_bytes for each in plan.rows):
        yield "what the host keeps for GPUs, and the time that this takes, was not compared with a GPU yet"
        if estimator.host_memory is None:
            yield (
                f"the memory of a host with {estimator.cluster.name} is not known: whether it has the host memory in "
                "these rows is not judged; a file of --devices may name its host_memory_mib"
            )
    planned = {row.run.workload.model_dump_json(): row.run for row in plan.rows if row.costs is not None}
    if any(isinstance(estimator.samples.of(run), MakesSamples) for run in planned.values()):  # data are read for each
        yield (
            "memory and times are those of updates: the answers that the model gives before them, their rewards and "
            "evaluations are not planned, and often take longer"
        )
    choice, there = plan.choice, estimator.cluster.devices
    if choice is not None and estimator.host.device != "cpu" and choice.run.world_size < there:
        yield f"the choice takes {choice.run.world_size} of the {there} devices; the others would stand idle"
    apart = beyond_link(estimator.cluster)
    if apart is not None:
        yield apart


def _is_open(override: str, asked: Collection[str]) -> bool:
    """Returns whether an override is the `auto` of a field that the plan decides."""
    key, _, value = override.partition("=")
    return value.strip() == AUTO and resolve_key(key)[0] in asked


def _with_own(plan: Plan, own: Sequence[str], with_precision: bool) -> Plan:
    """Returns the plan with the user's own overrides before those of each row, which win. with_precision: each row
    names its precision, since the run's is open."""

    def overrides(row: Row) -> tuple[str, ...]:
        is_named = not with_precision or any(each.startswith("precision=") for each in row.overrides)
        return after(own, row.overrides if is_named else (*row.overrides, f"precision={row.run.precision}"))

    rows = {id(each): replace(each, overrides=overrides(each)) for each in plan.rows}
    choice = None if plan.choice is None else rows[id(plan.choice)]
    return replace(plan, rows=tuple(rows[id(each)] for each in plan.rows), choice=choice)


def space_of(base: RunConfig, host: Machine, asked: Collection[str]) -> Space:
    """Returns the ways to search. asked: those of the fields engine and precision that are open; the others are as the
    run has them. A precision is taken from CANDIDATES where the host has instructions for it."""
    able = (name for name in CANDIDATES if PRECISIONS[name].compute in {*host.native_dtypes, "float32"})
    precisions = [name for name in able if not [*precision_gap(name, host)]]
    return Space(
        tuple(precisions) if "precision" in asked else (base.precision,),
        None if "engine" in asked else (base.engine,),
        fixed_of(base),
    )


def searched(base: RunConfig, space: Space, estimator: Traced, price: float | None = None) -> Plan:
    """Returns the plan of a search. Raises UserError where the machine's speed is not known."""
    if estimator.no_speed is not None:
        raise problem("engine", estimator.no_speed, "then the quickest way can be searched")
    whole = with_global_batch(base, estimator.nodes * estimator.devices_per_node)
    found = search(base, space, estimator, estimator.steps(whole), price)
    return replace(found, notes=(*found.notes, *estimator.notes))


def fixed_of(base: RunConfig) -> frozenset[str]:
    """Returns the searched fields that the run file sets."""
    return frozenset(name for name in SEARCHED if name in base.model_fields_set and getattr(base, name) != "auto")
