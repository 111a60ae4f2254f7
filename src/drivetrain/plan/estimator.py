"""The interface between the search and what it asks: the costs of a run's step, and the seconds they take.

The product traces the run and asks the table of devices (estimate.py); tests of the search compute both by formulas.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.errors import RunError
from drivetrain.plan.step_costs import StepCosts


class NotPlanned(RunError):
    """The costs of a run cannot be found out; the message says why."""


class Timing(Protocol):
    """The seconds of one step, and what bounds it: compute, memory, network or data."""

    @property
    def seconds(self) -> float: ...

    @property
    def bound_by(self) -> str: ...


class Estimator(Protocol):
    @property
    def nodes(self) -> int:
        """Machines of the cluster."""

    @property
    def devices_per_node(self) -> int: ...

    @property
    def host(self) -> Machine:
        """One machine of the cluster, as the rules see it."""

    @property
    def host_memory(self) -> int | None:
        """The bytes of one machine's own memory, beside its GPUs'; None where they are not known."""

    @property
    def title(self) -> str:
        """The cluster in words."""

    @property
    def no_speed(self) -> str | None:
        """Why times are not known; None where they are."""

    @property
    def at_once(self) -> int:
        """How many runs' costs can be found out beside each other."""

    def expect(self, runs: Iterable[RunConfig], quick: bool = False) -> None:
        """Takes runs whose costs will probably be asked for after the next one's, to find them out meanwhile."""

    def costs(self, run: RunConfig, quick: bool = False) -> StepCosts:
        """Returns the costs of a step. Takes seconds to a minute. Raises UserError where the run cannot be set up, and
        NotPlanned where its costs cannot be found out.

        quick: of fewer ranks, so that the fullest one may be missed if its samples are longer than others'.
        """

    def time(self, run: RunConfig, costs: StepCosts) -> Timing:
        """Returns the time of a step with these costs on the cluster. Takes no time itself."""

    def capacity(self, run: RunConfig) -> int:
        """Returns the bytes that a rank of the run has."""

    def unseen(self, run: RunConfig) -> tuple[int, int]:
        """Returns the least and the most bytes of a rank beside its tensors, which no trace sees."""
