"""The plan of a run for the machines of a cluster, in sentences beside its batch script."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.config.run import RunConfig
from drivetrain.errors import UserError
from drivetrain.launch.cluster import machine_of
from drivetrain.plan.catalogue import catalogue
from drivetrain.plan.estimate import Traced
from drivetrain.plan.estimator import NotPlanned
from drivetrain.plan.machines import Cluster, cluster, too_many_devices, too_many_nodes
from drivetrain.plan.rows import gib, row


@dataclass(frozen=True)
class Verdict:
    """The plan's verdict on a run. sentence: for the reader. fits: None where it is not known."""

    sentence: str
    fits: bool | None = None


def plan_verdict(run: RunConfig, machine: str | None) -> Verdict:
    """Returns what each rank would take, and whether that fits. Raises UserError for an unknown machine,
    and for one with fewer nodes or devices than the run takes.

    machine: as `drivetrain plan --machine` takes it, where one node stands for each of the run's; None: only memory is
    planned, for a device of unknown size. Data that are not here, or a number of processes that only the cluster knows,
    leave it unplanned, which a sentence states.
    """
    there = None if machine is None else cluster(machine, catalogue())
    if there is not None:
        problems = [] if there.nodes == 1 else too_many_nodes(run.nodes, there.nodes)
        problems += too_many_devices(run.devices // run.nodes, there)
        if problems:
            raise UserError(problems)
    if run.processes is None and run.engine.takes_processes:
        return Verdict("no plan: processes was left out, the ranks of one machine")
    host = machine_of(run) if there is None else there.host
    kind = there or Cluster(run.nodes, host.device_count, "device", None, None, host)
    estimator = Traced(kind.over(run.nodes))
    try:
        costs = estimator.costs(run)
    except UserError as error:
        why = f"{error.problems[0].field}: {error.problems[0].why}"
        named = "" if machine is None else f" --machine {machine}"
        can_stand_in = run.workload.MADE_DATA and error.problems[0].field.startswith("workload.data")
        made = f"; `drivetrain plan{named} --samples N --length TOKENS` plans without the data" if can_stand_in else ""
        return Verdict(f"no plan, and if this is so there too, the run will be refused: {why}{made}")
    except NotPlanned as error:
        return Verdict(f"no plan: {error}")
    takes = f"planned: a rank takes {gib(costs.memory.reserved)} for tensors at its peak"
    if there is None:
        return Verdict(f"{takes}; --machine 8xH100-80GB, as yours is called, says whether that fits")
    planned = row(run, run, costs, estimator)
    seconds = "" if planned.seconds is None else f", and {planned.seconds:.3g} s a step"
    if planned.fits == "yes":
        return Verdict(f"{takes} of {gib(planned.capacity)}{seconds}", True)
    sentence = f"{takes}: {planned.verdict}. `drivetrain plan` with the same --machine finds a way that fits"
    return Verdict(sentence, planned.fits != "no")
