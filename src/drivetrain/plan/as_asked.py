"""A plan of ways that were named: each is traced as it stands, and nothing about it is searched."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drivetrain.config import rules
from drivetrain.config.load import load
from drivetrain.config.run import RunConfig
from drivetrain.data.remote_sources import fetched
from drivetrain.errors import UserError
from drivetrain.plan.estimate import Traced
from drivetrain.plan.estimator import NotPlanned
from drivetrain.plan.machines import too_many_nodes
from drivetrain.plan.refusals import distinct_problems
from drivetrain.plan.rows import Plan, Row, chosen, in_order, refused, row
from drivetrain.runtime.run_folder import refuse_code_of_folders


def plan_as_asked(
    run_file: Path, choices: Sequence[Sequence[str]], estimator: Traced, price: float | None = None, trust: bool = False
) -> Plan:
    """Returns a row for each list of overrides. Raises UserError for overrides that cannot be read, and where rules
    refuse all of them."""
    start = time.perf_counter()
    ways = [_read(run_file, overrides, estimator, trust) for overrides in choices]
    judged = [rules.judged(run, too_many_nodes(run.nodes, estimator.nodes), estimator.host) for run, _ in ways]
    rows: list[Row] = []
    for number, (run, its) in enumerate(judged):
        estimator.expect(each for each, refusals in judged[number:] if not refusals)
        reason = "; ".join(f"{each.field}: {each.why}" for each in its)
        found = refused(run, run, reason) if its else as_it_stands(run, estimator)
        steps = None if found.costs is None else estimator.steps(run)
        rows.append(replace(found, overrides=(*choices[number], *ways[number][1]), rank=(number,), steps=steps))
    problems = [its for _, its in judged]
    if any(problems) and all(each.costs is None for each in rows):
        raise UserError(distinct_problems(problems))
    ordered = in_order(rows)
    return Plan(
        machine=estimator.title,
        devices=estimator.nodes * estimator.devices_per_node,
        rows=tuple(ordered),
        choice=chosen(ordered),
        notes=(*([] if estimator.no_speed is None else [estimator.no_speed]), *estimator.notes),
        steps=next((each.steps for each in ordered if each.steps is not None), None),
        price=price,
        traces=sum(each.costs is not None for each in rows),
        seconds=time.perf_counter() - start,
    )


def as_it_stands(run: RunConfig, estimator: Traced) -> Row:
    """Returns the row of a run that no rule refuses, or the reason why its costs cannot be found out."""
    try:
        return row(run, run, estimator.costs(run), estimator)
    except UserError as error:
        return refused(run, run, "; ".join(f"{each.field}: {each.why}" for each in error.problems))
    except NotPlanned as error:
        return refused(run, run, str(error))


def _read(
    run_file: Path, overrides: Sequence[str], estimator: Traced, trust: bool
) -> tuple[RunConfig, tuple[str, ...]]:
    """Returns the run, and an override for what was added to it: one that spreads takes all of the cluster's machines
    unless it names a number."""
    run, problems = load(run_file, overrides)
    if run is None or problems:
        raise UserError(problems)
    refuse_code_of_folders(run, run_file, trust)
    run = fetched(run, data=False)
    if "nodes" not in run.model_fields_set and run.engine.traits.spreads:
        added = () if estimator.nodes == run.nodes else (f"nodes={estimator.nodes}",)
        return run.model_copy(update={"nodes": estimator.nodes}), added
    return run, ()
