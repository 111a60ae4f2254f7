"""Runs a job's ranks on a Ray cluster: a placement group with a bundle a machine, and in it one actor a device.

Ray places and watches; the ranks form their own process group, as under torch elastic, so that the curve has the same
bits. A lost actor or machine ends the attempt, and the ranks start again, in another placement, from the newest
checkpoint (restarts.py). Several machines have to see the run's folder at the same place, as anywhere else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from drivetrain.config.load import load
from drivetrain.config.micro_batch_backoff import AUTO
from drivetrain.config.run import RunConfig
from drivetrain.errors import RankError, RunError, UserError, problem
from drivetrain.launch.attempt_on_actors import AttemptOnActors, Member
from drivetrain.launch.elastic import Died
from drivetrain.launch.job import Job, Node, Result
from drivetrain.launch.prepare import Checked, checked
from drivetrain.launch.rank_process import RankProcess
from drivetrain.launch.rendezvous import Meeting

PLACE_SECONDS = 600  # in which the cluster has to have room; it may have to start machines
FEWER_SECONDS = 60  # with min_nodes: after which fewer machines do
LOOK_SECONDS = 20  # in which an actor answers; one that does not is lost


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connects to a cluster while the block runs. address: "auto" for the one that this machine belongs to."""
    if ray.is_initialized():  # by the caller, who also ends it
        yield
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        why = f"no Ray cluster answers at {address} ({first}): start one with `ray start --head`, or name another"
        raise RunError(why) from error
    try:
        yield
    finally:
        ray.shutdown()


class RayCluster:
    """Where a run is checked and its attempts are made."""

    def __init__(self) -> None:
        self._kept: dict[str, str] = {}

    def checked(self, run_file: Path, overrides: Sequence[str], nodes: int | None, **given: Any) -> Checked:
        """Does what prepare.checked does on a machine of the cluster, with the devices of one machine of the run.
        Raises UserError with all problems."""
        words = [*overrides, *([] if nodes is None else [f"nodes={nodes}"])]
        run, problems = load(run_file, words)
        if run is None:
            raise UserError(problems)
        if run.processes is None and run.engine.takes_processes:
            raise problem("processes", "was left out: Ray has to know how many devices of a machine to hold", "give it")
        if run.micro_batch_size == AUTO:
            raise problem("micro_batch_size", "auto starts processes again and again on one machine", "give a number")
        folder = os.getcwd()

        def there() -> Checked | UserError:
            os.chdir(folder)
            try:
                return checked(run_file, overrides, nodes, Node(0, "chosen by Ray"), **given)
            except UserError as error:
                return error

        check: Any = ray.remote(**_resources(run, run.processes or 1), max_retries=0)(there)
        found: Checked | UserError = self._got(check.remote(), PLACE_SECONDS)
        if isinstance(found, UserError):
            raise found
        return found

    def devices_left(self, run: RunConfig) -> int:
        """Returns the ranks of a machine: the cluster decides which machine takes the place of a lost one."""
        return run.processes or 1

    def one_attempt(self, task: Job, folder: Path, meeting: Meeting, processes: int) -> Result:
        """Returns the first rank's result. Raises Died, or the failure that came first."""
        del meeting
        group, nodes = self._placed(task.run, processes)
        members = list[Member]()
        try:
            members = self._members(task.run, group, nodes, processes)
            attempt = AttemptOnActors(task, folder, members, self._look, self._kept)
            return attempt.run()
        except RayError as error:
            raise Died(f"the cluster lost a machine or an actor: {_first_line(error)}") from None
        finally:
            for member in members:
                with suppress(RayError):
                    self._got(member.actor.close.remote(), LOOK_SECONDS)
                with suppress(RayError, ValueError):
                    ray.kill(member.actor)
            remove_placement_group(group)

    def _placed(self, run: RunConfig, processes: int) -> tuple[PlacementGroup, int]:
        """Returns a group with a bundle a machine, and their number: fewer with min_nodes, where no more come."""
        bundle = {name: float(value) for name, value in _bundle(run, processes).items()}
        least = min(run.min_nodes or run.nodes, run.nodes)
        for nodes in range(run.nodes, least - 1, -1):
            strategy = "STRICT_PACK" if nodes == 1 else "STRICT_SPREAD"
            group = placement_group([bundle] * nodes, strategy=strategy)
            if group.wait(PLACE_SECONDS if nodes == least else FEWER_SECONDS):
                return group, nodes
            remove_placement_group(group)
        raise RunError(
            f"the cluster has no room within {PLACE_SECONDS} s for {least} machine{'s' * (least > 1)} with "
            f"{_text(bundle)} each; it has {_text(ray.cluster_resources())} in all: give fewer processes or nodes, or "
            "wait until other work has ended"
        )

    def _members(self, run: RunConfig, group: PlacementGroup, nodes: int, processes: int) -> list[Member]:
        made = []
        for rank in range(nodes * processes):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank // processes)
            options = {**_resources(run, 1), "scheduling_strategy": place, "max_restarts": 0, "max_concurrency": 2}
            made.append(ray.remote(OnRay).options(**options).remote())
        addresses = self._got([actor.address.remote() for actor in made], PLACE_SECONDS)
        return [
            Member(rank, rank % processes, processes, address, actor)
            for rank, (actor, address) in enumerate(zip(made, addresses, strict=True))
        ]

    def _look(self, calls: Sequence[Any]) -> list[Any]:
        """Returns the answers of actors, or the error of each that is lost."""
        found = []
        until = time.monotonic() + LOOK_SECONDS
        for call in calls:
            try:
                found.append(ray.get(call, timeout=max(0.1, until - time.monotonic())))
            except RayError as error:
                found.append(RankError(_first_line(error)))
        return found

    def _got(self, call: Any, seconds: float) -> Any:
        try:
            return ray.get(call, timeout=seconds)
        except GetTimeoutError:
            free = _text(ray.available_resources())
            raise RunError(f"the Ray cluster has not answered within {seconds:g} s; free there: {free}") from None


class OnRay(RankProcess):
    """The actor: a rank's process, with the address of its machine."""

    def address(self) -> str:
        return str(ray.util.get_node_ip_address())


def _bundle(run: RunConfig, processes: int) -> dict[str, float]:
    return {name: value * processes for name, value in _share(run).items()}


def _share(run: RunConfig) -> dict[str, float]:
    """Returns what one rank asks for. Ray gives it as many threads as it has cores, unless OMP_NUM_THREADS is set."""
    return {"CPU": 1.0} if run.device == "cpu" else {"CPU": 1.0, "GPU": 1.0}


def _resources(run: RunConfig, devices: int) -> dict[str, float]:
    return {f"num_{name.lower()}s": value * devices for name, value in _share(run).items()}


def _text(resources: Mapping[str, float]) -> str:
    """Returns the devices and cores among the resources of a cluster."""
    return ", ".join(f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if name in resources) or "none"


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
