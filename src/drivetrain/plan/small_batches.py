"""Costs of a run whose model cannot be traced: measured on small batches, from which those of its own follow."""

from __future__ import annotations

from dataclasses import replace

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.plan.derive import Cut, Derivation
from drivetrain.plan.search_space import Family
from drivetrain.plan.step_costs import StepCosts
from drivetrain.plan.trace import measured_step_costs
from drivetrain.workloads.base import Workload

SMALL, LARGER = 2, 4  # samples of a micro-batch; BatchNorm takes no batch of one


def measured_costs(run: RunConfig, machine: Machine, workload: Workload) -> StepCosts:
    """Returns the costs of a step of one process. Its model runs, on this machine, with a few samples at a time.

    Raises what the model raises.
    """
    samples = run.step_samples
    cut = Cut.of(samples, min(run.micro_batch_limit or samples, samples))
    family = Family(run, samples, (cut.size,))
    cuts = [cut] if cut.size <= LARGER else family.of_whole_prompts(_small(min(2, cut.count)), SMALL)
    measured = {each: measured_step_costs(family.traced_as(each), machine, workload) for each in cuts}
    found = Derivation(measured).at(cut)
    taken = sum(each.seconds_taken for each in measured.values())
    return replace(found, origin="measured", seconds_taken=taken)


def _small(count: int) -> list[Cut]:
    """Returns cuts of `count` micro-batches each, and where these are several one of a single one."""
    cuts = [Cut(size, count, count * size) for size in (SMALL, LARGER)]
    return cuts if count == 1 else [*cuts, Cut(SMALL, 1, SMALL)]
