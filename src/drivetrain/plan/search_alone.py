"""Traces of one process, from which a search has its bounds: all of a step's work, before it is spread."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from drivetrain.config.engines import SINGLE
from drivetrain.config.run import RunConfig
from drivetrain.errors import UserError
from drivetrain.plan.derive import Cut, Derivation
from drivetrain.plan.estimator import Estimator, NotPlanned
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
    def tells_rates(self) -> bool:
        """Whether there are traces enough to tell the work of a sample from that of a micro-batch."""
        return len(self.traced) > 2

    @property
    def derivation(self) -> Derivation:
        return Derivation(self.traced, self.family.run.engine.stages)


class OneProcess:
    """Knows what one process does in each precision, and with recompute or offload; traced when it is first asked for.

    least: samples that the model takes at once. trace: adds the trace of a cut. Returns False where there can be none.
    """

    def __init__(self, base: RunConfig, estimator: Estimator, least: int, trace: Callable[[Looked, Cut], bool]) -> None:
        self._base, self._least, self._trace = base, least, trace
        whole = with_global_batch(base, estimator.host)
        self._batch, made = whole.global_batch, math.ceil(whole.workload.samples_made)
        self._samples = min(whole.step_samples, max(SAMPLES, 2 * made))  # two prompts' tell a sample from a step
        self._found: dict[str, Derivation | None] = {}  # by precision
        self._extras: dict[tuple[str, object, bool], Extra] = {}

    @property
    def first(self) -> Derivation | None:
        """The traces in the first precision in which there are any."""
        return next((each for each in self._found.values() if each is not None), None)

    def at_any_cut(self, precision: str) -> Derivation | None:
        """Returns one process's traces in a precision; None where it cannot be traced so."""
        if precision not in self._found:
            looked = Looked(self._family(self._run(precision)))
            done = [self._trace(looked, cut) for cut in looked.family.cuts]
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
        looked = Looked(self._family(self._run(run.precision).model_copy(update=options)))
        cut = looked.family.cuts[0]
        if one is None or not self._trace(looked, cut):
            return NOTHING
        return Extra.of(one.at(cut), looked.traced[cut])

    def _family(self, run: RunConfig) -> Family:
        return Family(run, self._samples, (self._least,), least=self._least)

    def _run(self, precision: str) -> RunConfig:
        return alone(self._base, precision, self._batch)


def alone(base: RunConfig, precision: str, batch: int) -> RunConfig:
    """Returns the run of one process with a batch, without recompute and offload."""
    update = {"engine": SINGLE, "processes": None, "nodes": 1, "precision": precision, "micro_batch_size": None}
    plain = {"recompute": False, "offload_activations": False, "batch_size_per_device": None}
    return base.model_copy(update={**update, **plain, "batch_size": batch})


def least_samples(base: RunConfig, precision: str, costs_of: Callable[[RunConfig], StepCosts]) -> int:
    """Returns how many samples the model takes at once at least: 2 of one that fails with one and not with two, as
    BatchNorm does where a channel has one value. A model that fails with both has another reason: 1."""
    for samples in (1, 2):
        try:
            costs_of(alone(base, precision, samples))
        except (UserError, NotPlanned):
            continue
        return samples
    return 1
