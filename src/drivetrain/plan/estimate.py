"""The estimator of the product: it traces a run, and asks the calibration or the table of devices for its time."""

from __future__ import annotations

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.errors import RunError, UserError, last_line
from drivetrain.plan.deep_trace import IRRELEVANT, Tracer
from drivetrain.plan.estimator import NotPlanned
from drivetrain.plan.machines import Cluster
from drivetrain.plan.room import UNSEEN, room_of_a_rank
from drivetrain.plan.run_time import time_of
from drivetrain.plan.samples import Samples
from drivetrain.plan.small_batches import measured_costs
from drivetrain.plan.speeds import speeds_of
from drivetrain.plan.step_costs import StepCosts
from drivetrain.plan.step_time import StepTime
from drivetrain.plan.trace import Untraceable
from drivetrain.training.auto_settings import compiling, order_of, total_steps_of


def refuse_offload(run: RunConfig, host: Machine) -> None:
    """Raises NotPlanned for an engine that keeps parameters or optimizer state of a GPU in its host's memory or on a
    disk: a trace takes them for the GPU's, and knows nothing of the time of their copies."""
    if host.device == "cuda" and run.engine.keeps_elsewhere:
        why = "parameters and optimizer state that an engine offloads from a GPU are not planned yet"
        raise NotPlanned(f"{why}; measure it with train or compare")


class Traced:
    """Costs by tracing. Data are read once, and costs are kept by run."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.samples = Samples()
        self._costs: dict[str, StepCosts] = {}
        self._tracer = Tracer()

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

    def costs(self, run: RunConfig, quick: bool = False) -> StepCosts:
        quick = quick and run.world_size > 1
        refuse_offload(run, self.host)
        key = f"{quick} {run.model_dump_json(exclude=IRRELEVANT)}"
        if key not in self._costs:
            try:
                self._costs[key] = self._tracer.fullest_step_costs(run, self.host, self.samples.of(run), quick)
            except UserError:
                raise
            except Untraceable as error:
                if not self._can_measure(run):
                    raise NotPlanned(str(error)) from error
                self._costs[key] = measured_costs(run, self.host, self.samples.of(run))
            except RunError as error:
                raise NotPlanned(str(error)) from error
            except Exception as error:  # code of models and engines that was never meant to run without numbers
                raise NotPlanned(
                    f"it cannot be traced: {last_line(error)}; measure it with train or compare"
                ) from error
        return self._costs[key]

    def _can_measure(self, run: RunConfig) -> bool:
        return self.cluster.is_here and self.host.device == "cpu" and run.world_size == 1

    def time(self, run: RunConfig, costs: StepCosts) -> StepTime:
        compiles = compiling(run, self.host, self.samples.of(run), True, elsewhere=not self.cluster.is_here)
        return time_of(run, costs, self.cluster, bool(compiles.what))

    def capacity(self, run: RunConfig) -> int:
        return room_of_a_rank(run, self.host)

    def unseen(self, run: RunConfig) -> tuple[int, int]:
        del run
        return UNSEEN[self.host.device]

    def steps(self, run: RunConfig) -> int:
        """Returns the steps of the whole run."""
        return total_steps_of(run, order_of(run, self.samples.of(run)))
