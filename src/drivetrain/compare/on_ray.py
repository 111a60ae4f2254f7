"""Spreads the cells of a comparison over a Ray cluster, each with the devices that it needs, at once where there are
enough.

A placement group holds a cell's devices. The next group is asked for once the one before has been placed, so that the
order of the cells is kept and the cluster counts how many run at once. In it an actor runs the same process
as a comparison on one machine does, and watches it. Where a run takes several machines, the cell's process stays beside
the comparison and places the run's ranks in the group (launch/on_ray.py). All machines have to see the comparison's
folder at the same place.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from drivetrain.compare.cell import OnRay
from drivetrain.compare.cell_actor import CellActor, Seen
from drivetrain.compare.cell_process import Limits
from drivetrain.compare.matrix import Cell, Job, Matrix
from drivetrain.compare.outcome import Outcome, Status
from drivetrain.compare.runner import Listener, prepare
from drivetrain.config.machine import Machine
from drivetrain.config.micro_batch_backoff import AUTO
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem, RankError, problem
from drivetrain.launch.ray_connection import (
    PLACE_SECONDS,
    answers,
    as_options,
    as_text,
    connected,
    got,
    needs,
    no_room,
)

POLL_SECONDS = 0.5
TRIES = 3  # of a cell whose machine is lost


@contextmanager
def on_ray(address: str) -> Iterator[RayCells]:
    """Connects to a cluster while the block runs."""
    with connected(address):
        yield RayCells()


@dataclass
class Running:
    cell: Cell
    group: PlacementGroup
    actor: Any


class RayCells:
    """The cluster as a place for cells."""

    def __init__(self) -> None:
        context = ray.get_runtime_context()
        self._address, self._namespace, self._here = context.gcs_address, context.namespace, context.get_node_id()

    # --- before any cell starts --------------------------------------------------------------------------------------

    def described(self, runs: Sequence[RunConfig]) -> tuple[Machine, dict[str, str], dict[str, Any]]:
        """Returns a machine of the cluster, its versions, and its description, with the devices that the largest run
        takes of one machine, as far as one has them. Raises RunError if none has room, UserError if a run leaves its
        devices to the machine."""
        if any(run.processes is None and run.engine.takes_processes for run in runs):
            raise problem("processes", "was left out: Ray has to know how many devices each cell holds", "give it")
        asked = {"CPU": 1.0}
        if any("GPU" in needs(run) for run in runs):
            most = max(_devices(run) for run in runs)
            asked["GPU"] = min(float(most), max(1.0, _largest("GPU")))
        folder = os.getcwd()

        def there() -> tuple[Machine, dict[str, str], dict[str, Any]]:
            from drivetrain.runtime import environment
            from drivetrain.runtime.hardware import detect

            with suppress(OSError):  # where the folder is not seen, its cells say so
                os.chdir(folder)
            machine = detect()
            return machine, environment.versions(), environment.describe(machine)

        task: Any = ray.remote(**as_options(asked), max_retries=0)(there)
        found: tuple[Machine, dict[str, str], dict[str, Any]] = got(task.remote(), PLACE_SECONDS)
        return found

    def fitted(self, matrix: Matrix, limits: Limits) -> Matrix:
        """Returns the matrix without the cells for which no machine of the cluster is large enough: they are refused.
        Raises UserError for a limit that cannot be kept."""
        several = [cell for cell in matrix.cells if cell.run is not None and cell.run.nodes > 1]
        if several and limits.resident_bytes is not None:
            why = f"it watches one machine, and {len(several)} cells run on several"
            raise problem("--cell-memory", why, "leave it out, or give nodes=1")
        return replace(matrix, cells=tuple(_judged(cell) for cell in matrix.cells))

    # --- the cells ---------------------------------------------------------------------------------------------------

    def run(self, cells: list[Cell], job: Job, limits: Limits, listener: Listener) -> dict[str, Outcome]:
        """Runs cells of different keys, and returns how each ended, by its key. An exception ends those that run."""
        work = _Work(self, cells, job, limits, listener)
        try:
            while not work.is_done:
                work.place()
                work.look()
                time.sleep(POLL_SECONDS)
        finally:
            work.end()
        return work.outcomes

    def start(self, cell: Cell, group: str, placed: PlacementGroup, job: Job, limits: Limits) -> Any:
        """Starts a cell in its placement group, and returns its actor."""
        assert cell.run is not None
        spread = cell.run.nodes > 1
        prepare(cell, job, OnRay(address=self._address, namespace=self._namespace, group=group) if spread else None)
        options: dict[str, Any] = {"max_restarts": 0, "max_concurrency": 2}
        if spread:
            place: Any = NodeAffinitySchedulingStrategy(self._here, soft=True)
            options |= {"num_cpus": 0, "scheduling_strategy": place}
        else:
            place = PlacementGroupSchedulingStrategy(placed, placement_group_bundle_index=0)
            options |= {**as_options(needs(cell.run, _devices(cell.run))), "scheduling_strategy": place}
        actor = ray.remote(CellActor).options(**options).remote()
        cores = 0 if spread else _devices(cell.run)
        actor.start.remote(str(cell.folder.absolute()), cell.key, limits, os.getcwd(), spread, cores)
        return actor


class _Work:
    """The cells that wait, the one whose devices are asked for, and those that run."""

    def __init__(self, cluster: RayCells, cells: list[Cell], job: Job, limits: Limits, listener: Listener) -> None:
        self._cluster, self._job, self._limits, self._listener = cluster, job, limits, listener
        self._waiting = deque(cells)
        self._asked: tuple[Cell, str, PlacementGroup] | None = None
        self._since = 0.0  # when devices were asked for, and nothing of ours held some
        self._running: list[Running] = []
        self._tries: dict[str, int] = {}
        self.outcomes: dict[str, Outcome] = {}

    @property
    def is_done(self) -> bool:
        return not (self._waiting or self._asked or self._running)

    def place(self) -> None:
        """Starts as many cells as there are devices for."""
        while True:
            if self._asked is None:
                if not self._waiting:
                    return
                self._ask(self._waiting.popleft())
            assert self._asked is not None
            cell, name, group = self._asked
            if not group.wait(0.1):
                self._give_up_after(PLACE_SECONDS)
                return
            self._asked = None
            self._listener.started(cell)
            actor = self._cluster.start(cell, name, group, self._job, self._limits)
            self._running.append(Running(cell, group, actor))

    def _ask(self, cell: Cell) -> None:
        assert cell.run is not None
        name = f"drivetrain-cell-{uuid.uuid4().hex}"
        strategy = "STRICT_PACK" if cell.run.nodes == 1 else "STRICT_SPREAD"
        group = placement_group(_bundles(cell.run), strategy=strategy, name=name)
        self._asked, self._since = (cell, name, group), time.monotonic()

    def _give_up_after(self, seconds: float) -> None:
        """Ends the wait for devices that the cluster has not got although nothing of ours holds any."""
        if self._running:
            self._since = time.monotonic()
        elif time.monotonic() - self._since > seconds:
            assert self._asked is not None
            cell, _, group = self._asked
            assert cell.run is not None
            self._asked = None
            remove_placement_group(group)
            self._over(cell, _written(cell, "failed", str(no_room(_bundles(cell.run)))))

    def look(self) -> None:
        """Takes note of what has become of the running cells."""
        seen = answers([each.actor.look.remote() for each in self._running])
        for each, found in zip(list(self._running), seen, strict=True):
            if isinstance(found, RankError):
                self._leave(each)
                self._lost(each.cell, str(found))
                continue
            assert isinstance(found, Seen)
            if found.outcome is not None:
                self._leave(each)
                self._over(each.cell, found.outcome)
            elif found.failure is not None:
                self._leave(each)
                self._over(each.cell, _written(each.cell, "failed", found.failure))
            elif found.glance is not None:
                self._listener.glanced(each.cell, found.glance)

    def _lost(self, cell: Cell, why: str) -> None:
        """Puts a cell whose actor or machine is gone before those that wait, a few times."""
        tries = self._tries[cell.key] = self._tries.get(cell.key, 0) + 1
        if tries < TRIES:
            self._waiting.appendleft(cell)
            self._listener.lost(cell, why)
        else:
            self._over(cell, _written(cell, "crashed", f"its machine or actor was lost {tries} times, at last: {why}"))

    def _over(self, cell: Cell, outcome: Outcome) -> None:
        self.outcomes[cell.key] = outcome
        self._listener.ended(cell, outcome, kept=False)

    def _leave(self, running: Running) -> None:
        self._running.remove(running)
        with suppress(RayError, ValueError):
            ray.kill(running.actor)
        remove_placement_group(running.group)

    def end(self) -> None:
        """Ends what still runs, and gives all devices back."""
        answers([each.actor.end.remote() for each in self._running])
        for each in list(self._running):
            self._leave(each)
        if self._asked is not None:
            remove_placement_group(self._asked[2])


def _written(cell: Cell, status: Status, reason: str) -> Outcome:
    """Writes and returns the outcome of a cell whose own machine could not."""
    outcome = Outcome(key=cell.key, status=status, reason=reason)
    cell.folder.mkdir(parents=True, exist_ok=True)
    outcome.write(cell.folder)
    return outcome


def _devices(run: RunConfig) -> int:
    """Returns the devices that a run takes of each of its machines."""
    return max(1, run.devices // run.nodes)


def _bundles(run: RunConfig) -> list[dict[str, float]]:
    return [needs(run, _devices(run))] * run.nodes


def _largest(kind: str) -> float:
    """Returns how many of a kind of device the machine that has the most of them has, busy or not."""
    return max((float(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]), default=0.0)


def _judged(cell: Cell) -> Cell:
    if cell.run is None:
        return cell
    found = _problem(cell.run)
    return cell if found is None else replace(cell, run=None, problems=(found,), key="")


def _problem(run: RunConfig) -> Problem | None:
    if run.nodes > 1 and run.micro_batch_size == AUTO:
        return Problem(
            "micro_batch_size", "auto tries sizes on one machine, and the run takes several", "give a number"
        )
    asked = needs(run, _devices(run))
    for kind, number in asked.items():
        if number > (most := _largest(kind)) > 0:
            why = f"the run takes {as_text(asked)} of a machine, and no machine of the Ray cluster has more than"
            return Problem("processes", f"{why} {most:g} {kind}", "give fewer, or more nodes")
    return None
