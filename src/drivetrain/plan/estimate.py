"""The estimator of the product: it traces a run, and asks the calibration or the table of devices for its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.errors import RunError, UserError, last_line
from drivetrain.plan.calibration import kept
from drivetrain.plan.deep_trace import IRRELEVANT, Tracer
from drivetrain.plan.estimator import NotPlanned
from drivetrain.plan.machines import Cluster
from drivetrain.plan.overrides import way_in_words
from drivetrain.plan.room import room_of_a_rank, unseen_bytes, with_held
from drivetrain.plan.run_time import time_of
from drivetrain.plan.samples import Samples, stands_for
from drivetrain.plan.small_batches import measured_costs
from drivetrain.plan.speeds import speeds_of
from drivetrain.plan.step_costs import StepCosts
from drivetrain.plan.step_time import StepTime
from drivetrain.plan.trace import Untraceable
from drivetrain.plan.trace_processes import Answer, Asked, TraceProcesses
from drivetrain.training.auto_settings import compiling, order_of, total_steps_of

PAYS = 8.0  # seconds of traces after which more are likely: a process takes about as long until its first trace begins
QUICKLY_READ = 10.0  # seconds in which the data were read, which each process reads again


class Traced:
    """Costs by tracing. Data are read once, and costs are kept by run.

    processes: where given, they trace ahead what is expected, as soon as traces have taken so long that it pays. say:
    takes the way that is traced, in words, once its data are read.
    """

    def __init__(
        self, cluster: Cluster, processes: TraceProcesses | None = None, say: Callable[[str], None] | None = None
    ) -> None:
        self.cluster = cluster
        self.samples = Samples()
        self._costs: dict[str, StepCosts] = {}
        self._tracer = Tracer()
        self._processes, self._spent = processes, 0.0  # seconds of traces
        self._ahead: dict[str, Future[Answer | None]] = {}
        self._say = say
        self.failures: dict[str, Exception] = {}  # by message, of runs whose costs were asked for

    @property
    def nodes(self) -> int:
        return self.cluster.nodes

    @property
    def devices_per_node(self) -> int:
        return self.cluster.devices_per_node

    @property
    def host(self) -> Machine:
        return self.cluster.host

    @property
    def host_memory(self) -> int | None:
        return self.cluster.host_memory

    @property
    def title(self) -> str:
        return str(self.cluster)

    @property
    def no_speed(self) -> str | None:
        """Why times are not known: the machine is neither calibrated nor in the catalogue. None where they are."""
        try:
            speeds_of(self.cluster, 1)
        except UserError as error:
            return f"times are not known: {error.problems[0].why}; {error.problems[0].fix}"
        return None

    @property
    def notes(self) -> list[str]:
        """How the costs were found out: with all blocks of a model, or with a few."""
        return [*self._tracer.notes]

    @property
    def at_once(self) -> int:
        """How many traces are taken beside each other now."""
        pays = self._processes is not None and self._spent > PAYS and self.samples.seconds < QUICKLY_READ
        return self._processes.count + 1 if self._processes is not None and pays else 1

    def expect(self, runs: Iterable[RunConfig], quick: bool = False) -> None:
        if self._processes is None or self.at_once == 1:
            return
        for run in runs:
            key = _key(run, quick)
            if key not in self._costs and key not in self._ahead:
                asked = Asked(run, self.host, quick and run.world_size > 1, dict(self._tracer.pairs), stands_for())
                self._ahead[key] = self._processes.ask(asked)

    def costs(self, run: RunConfig, quick: bool = False) -> StepCosts:
        key = _key(run, quick)
        if key not in self._costs:
            start = time.perf_counter()
            try:
                found = self._from_ahead(run, key) or self._traced(run, quick and run.world_size > 1)
            except (UserError, NotPlanned) as error:
                self.failures[str(error)] = error
                raise
            self._costs[key] = with_held(found, run, self.host)
            self._spent += time.perf_counter() - start
        return self._costs[key]

    def _from_ahead(self, run: RunConfig, key: str) -> StepCosts | None:
        """Returns what a process found; None where none has traced it."""
        future = self._ahead.pop(key, None)
        if future is None or self._processes is None:
            return None
        self._tell(run)
        while not future.done() and (waiting := self._processes.not_begun()) is not None:
            self._trace_meanwhile(waiting)
        answer = self._processes.answer(future)
        if answer is None:
            return None
        self._tracer.learn(self.samples.of(run), answer.by_rank, answer.pairs, answer.notes)
        return answer.costs

    def _trace_meanwhile(self, asked: Asked) -> None:
        """Traces what was expected of a process. Where that fails, it is traced again once its costs are asked for."""
        key = _key(asked.run, asked.quick)
        self._ahead.pop(key, None)
        with suppress(UserError, NotPlanned):
            self._costs[key] = with_held(self._traced(asked.run, asked.quick), asked.run, self.host)

    def _traced(self, run: RunConfig, quick: bool) -> StepCosts:
        try:
            workload = self.samples.of(run)
            self._tell(run)
            return self._tracer.fullest_step_costs(run, self.host, workload, quick)
        except UserError:
            raise
        except Untraceable as error:
            if not self._can_measure(run):
                raise NotPlanned(str(error)) from error
            return self._measured(run)
        except RunError as error:
            raise NotPlanned(str(error)) from error
        except Exception as error:  # code of models and engines that was never meant to run without numbers
            raise NotPlanned(f"it cannot be traced: {last_line(error)}; measure it with train or compare") from error

    def _tell(self, run: RunConfig) -> None:
        if self._say is not None:
            self._say(f"trace {len(self._costs) + 1}, of {way_in_words(run)}")

    def _measured(self, run: RunConfig) -> StepCosts:
        try:
            return measured_costs(run, self.host, self.samples.of(run))
        except UserError:
            raise
        except Exception as error:  # code of models
            raise NotPlanned(f"a step of it fails: {last_line(error)}") from error

    def _can_measure(self, run: RunConfig) -> bool:
        return self.cluster.is_here and self.host.device == "cpu" and run.world_size == 1

    def time(self, run: RunConfig, costs: StepCosts) -> StepTime:
        compiles = compiling(run, self.host, self.samples.of(run), True, elsewhere=not self.cluster.is_here)
        return time_of(run, costs, self.cluster, bool(compiles.what))

    def capacity(self, run: RunConfig) -> int:
        return room_of_a_rank(run, self.host)

    def unseen(self, run: RunConfig) -> tuple[int, int]:
        known = kept(self.host) if self.cluster.is_here else None
        return unseen_bytes(self.host, None if known is None else known.of(run.world_size))

    def steps(self, run: RunConfig) -> int:
        """Returns the steps of the whole run."""
        return total_steps_of(run, order_of(run, self.samples.of(run)))


def _key(run: RunConfig, quick: bool) -> str:
    """quick: makes no difference to one process."""
    return f"{quick and run.world_size > 1} {run.model_dump_json(exclude=IRRELEVANT)}"
