"""The parts that a training is put together from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.measure.meters import Meters
from drivetrain.runtime.attempt import Attempt
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.runtime.signals import StopRequest
from drivetrain.tracking.build import EventStream
from drivetrain.training.auto_settings import chosen
from drivetrain.training.mirroring import Mirroring
from drivetrain.workloads.base import Workload


@dataclass(frozen=True)
class TrainingContext:
    """Holds the parts of a training that its functions use."""

    config: RunConfig
    machine: Machine
    ranks: Communicator
    workload: Workload
    engine: Engine
    meters: Meters
    folder: RunFolder
    events: EventStream
    stop: StopRequest
    attempt: Attempt
    mirror: Mirroring
    given: RunConfig  # before micro-batches were made smaller for want of memory

    @property
    def chosen(self) -> dict[str, Any]:
        return chosen(self.config, self.machine, self.workload, self.engine.compiled)
