"""Runs a job's ranks on a Ray cluster: a placement group with a bundle a machine, and in it one actor a device.

Ray places and watches; the ranks form their own process group, as under torch elastic, so that the curve has the same
bits. A lost actor or machine ends the attempt, and the ranks start again, in another placement, from the newest
checkpoint (restarts.py). Several machines have to see the run's folder at the same place, as anywhere else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from drivetrain.config.load import load
from drivetrain.config.micro_batch_backoff import AUTO
from drivetrain.config.run import RunConfig
from drivetrain.errors import UserError, problem
from drivetrain.launch.attempt_on_actors import AttemptOnActors, Member
from drivetrain.launch.elastic import Died
from drivetrain.launch.job import Job, Node, Result
from drivetrain.launch.prepare import Checked, checked
from drivetrain.launch.rank_process import RankProcess
from drivetrain.launch.ray_connection import (
    LOOK_SECONDS,
    PLACE_SECONDS,
    answers,
    as_options,
    first_line,
    got,
    needs,
    no_room,
)
from drivetrain.launch.rendezvous import Meeting

FEWER_SECONDS = 60  # with min_nodes: after which fewer machines do


class RayCluster:
    """Where a run is checked and its attempts are made."""

    def __init__(self, group: str | None = None) -> None:
        """group: the name of a placement group that somebody else has made for the run and will remove."""
        self._group = group
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

        check: Any = ray.remote(**as_options(needs(run, run.processes or 1)), max_retries=0)(there)
        found: Checked | UserError = got(check.remote(), PLACE_SECONDS)
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
            attempt = AttemptOnActors(task, folder, members, answers, self._kept)
            return attempt.run()
        except RayError as error:
            raise Died(f"the cluster lost a machine or an actor: {first_line(error)}") from None
        finally:
            for member in members:
                with suppress(RayError):
                    got(member.actor.close.remote(), LOOK_SECONDS)
                with suppress(RayError, ValueError):
                    ray.kill(member.actor)
            if self._group is None:
                remove_placement_group(group)

    def _placed(self, run: RunConfig, processes: int) -> tuple[PlacementGroup, int]:
        """Returns a group with a bundle a machine, and their number: fewer with min_nodes, where no more come."""
        bundle = needs(run, processes)
        if self._group is not None:
            group = get_placement_group(self._group)
            if group.wait(PLACE_SECONDS):  # again, where a machine of it was lost
                return group, run.nodes
            raise no_room([bundle] * run.nodes)
        least = min(run.min_nodes or run.nodes, run.nodes)
        for nodes in range(run.nodes, least - 1, -1):
            strategy = "STRICT_PACK" if nodes == 1 else "STRICT_SPREAD"
            group = placement_group([bundle] * nodes, strategy=strategy)
            if group.wait(PLACE_SECONDS if nodes == least else FEWER_SECONDS):
                return group, nodes
            remove_placement_group(group)
        raise no_room([bundle] * least)

    def _members(self, run: RunConfig, group: PlacementGroup, nodes: int, processes: int) -> list[Member]:
        made = []
        for rank in range(nodes * processes):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank // processes)
            options = {**as_options(needs(run)), "scheduling_strategy": place, "max_restarts": 0, "max_concurrency": 2}
            made.append(ray.remote(OnRay).options(**options).remote())
        addresses = got([actor.address.remote() for actor in made], PLACE_SECONDS)
        return [
            Member(rank, rank % processes, processes, address, actor)
            for rank, (actor, address) in enumerate(zip(made, addresses, strict=True))
        ]


class OnRay(RankProcess):
    """The actor: a rank's process, with the address of its machine."""

    def address(self) -> str:
        return str(ray.util.get_node_ip_address())
