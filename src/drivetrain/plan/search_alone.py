"""Traces of one process, from which a search has its bounds: all of a step's work, before it is spread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from drivetrain.config.engines import SINGLE
from drivetrain.config.run import RunConfig
from drivetrain.plan.derive import Cut, Derivation, cuts_to_trace
from drivetrain.plan.estimator import Estimator
from drivetrain.plan.rows import Row
from drivetrain.plan.search_bounds import NOTHING, Extra
from drivetrain.plan.search_space import Family, with_global_batch
from drivetrain.plan.step_costs import StepCosts

SAMPLES = 8  # enough to see how one process's work grows


@dataclass
class Looked:
    """A family that was looked at: its traces, and a row for each micro-batch."""

    family: Family
    traced: dict[Cut, StepCosts] = field(default_factory=dict)
    sure: set[Cut] = field(default_factory=set)  # those of which the fullest rank was traced
    rows: dict[int, Row] = field(default_factory=dict)

    @property
    def derivation(self) -> Derivation:
        return Derivation(self.traced, self.family.run.engine.stages)


class OneProcess:
    """Knows what one process does in each precision, and with recompute or offload; traced when it is first asked for.

    trace: adds the trace of a cut. Returns False where there can be none.
    """

    def __init__(self, base: RunConfig, estimator: Estimator, trace: Callable[[Looked, Cut], bool]) -> None:
        self._base, self._trace = base, trace
        self._batch = with_global_batch(base, estimator.nodes * estimator.devices_per_node).global_batch
        self._found: dict[str, Derivation | None] = {}  # by precision
        self._extras: dict[tuple[str, object, bool], Extra] = {}

    @property
    def first(self) -> Derivation | None:
        """The traces in the first precision in which there are any."""
        return next((each for each in self._found.values() if each is not None), None)

    def at_any_cut(self, precision: str) -> Derivation | None:
        """Returns one process's traces in a precision; None where it cannot be traced so."""
        if precision not in self._found:
            samples = min(self._batch, SAMPLES)
            looked = Looked(Family(self._run(precision), samples, (1,)))
            done = [self._trace(looked, cut) for cut in cuts_to_trace(samples, 1)]
            self._found[precision] = looked.derivation if all(done) else None
        return self._found[precision]

    def extra(self, run: RunConfig) -> Extra:
        """Returns what recompute and offload of the run add to one process's work."""
        key = run.precision, run.recompute, run.offload_activations
        if key not in self._extras:
            plain = not run.recompute and not run.offload_activations
            self._extras[key] = NOTHING if plain else self._measured_extra(run)
        return self._extras[key]

    def _measured_extra(self, run: RunConfig) -> Extra:
        one = self.at_any_cut(run.precision)
        options = {"recompute": run.recompute, "offload_activations": run.offload_activations}
        cut = cuts_to_trace(min(self._batch, SAMPLES), 1)[0]
        looked = Looked(Family(self._run(run.precision).model_copy(update=options), cut.samples, (1,)))
        if one is None or not self._trace(looked, cut):
            return NOTHING
        return Extra.of(one.at(cut), looked.traced[cut])

    def _run(self, precision: str) -> RunConfig:
        update = {"engine": SINGLE, "processes": None, "nodes": 1, "precision": precision, "micro_batch_size": None}
        plain = {"recompute": False, "offload_activations": False}
        return self._base.model_copy(
            update={**update, **plain, "batch_size": self._batch, "batch_size_per_device": None}
        )
