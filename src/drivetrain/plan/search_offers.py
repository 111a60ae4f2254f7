"""Offers what a plan never does unasked: ways that change the result, and what would make a run fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from drivetrain.config import rules
from drivetrain.config.engines import ENGINE
from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.errors import UserError
from drivetrain.plan.estimator import Estimator, NotPlanned
from drivetrain.plan.room import held_by
from drivetrain.plan.rows import Row, gib, room_for_tensors
from drivetrain.plan.search_alone import alone
from drivetrain.plan.search_space import Family, rank_samples
from drivetrain.plan.step_costs import StepCosts

STATE = ("parameters", "gradients", "optimizer")
SHARING = ENGINE.validate_python({"name": "fsdp"})  # the engine that more devices are offered with


def offers(
    base: RunConfig,
    asked: Sequence[str],
    choice: Row | None,
    one: StepCosts | None,
    estimator: Estimator,
    costs_of: Callable[[RunConfig], StepCosts],
) -> Iterator[str]:
    """Yields sentences. one: the step of one process, one sample at a time. costs_of: traces a run."""
    other = _other_precision(estimator.host)
    if choice is not None:
        if other not in asked:
            yield from _quicker(other, choice, estimator, costs_of)
        return
    if one is None:
        return
    state = sum(one.memory.parts.get(name, 0) for name in STATE)  # type: ignore[call-overload]
    beside = one.memory.allocated - state
    held = held_by(SHARING, estimator.host)
    room = room_for_tensors(alone(base, asked[0], 1), estimator) / held - beside
    count = math.ceil(state / room) if room > 0 else 0
    if count > estimator.nodes * estimator.devices_per_node:  # else more than this sum is short
        yield (
            f"{count:,} such devices each hold their share of {gib(state)} of parameters, gradients and optimizer "
            f"state beside {gib(beside)} of one sample's step (engine=fsdp), by the sum alone, at {held:g} bytes in "
            "the allocator for each of a tensor"
        )
    if estimator.host.device == "cuda" and not base.engine.keeps_elsewhere:
        yield (
            f"engine={{name: fsdp, offload: true}} keeps the {gib(state)} in the memory of the hosts, which also "
            "update it: that takes longer, and is planned where you name it"
        )
    if other not in asked:
        yield f"precision={other} halves most activations; it changes the result, within the rounding of 16 bits"
    if base.adapter is None and base.workload.base is not None:
        weights = one.memory.parts.get("parameters", 0)
        yield (
            f"adapter=lora trains little beside the {gib(weights)} of weights, and quantised_base=nf4 keeps those "
            "in an eighth; that is another training"
        )


def _other_precision(host: Machine) -> str:
    return "bf16-mixed" if "bfloat16" in host.native_dtypes else "fp16-mixed"


def _quicker(
    precision: str, choice: Row, estimator: Estimator, costs_of: Callable[[RunConfig], StepCosts]
) -> Iterator[str]:
    """Yields the choice's figures in another precision, if those are better by a tenth."""
    assert choice.costs is not None
    assert choice.seconds is not None
    run = choice.run.model_copy(update={"precision": precision})
    if precision not in _native(estimator.host) or rules.judged(run, [], estimator.host)[1]:
        return
    samples = rank_samples(run)
    size = min(run.micro_batch_limit or samples, samples)
    family, same = (Family(each, samples, (size,)) for each in (run, choice.run))
    part = family.own_cut(size)
    try:
        there, here = costs_of(family.traced_as(part)), costs_of(same.traced_as(part))
    except (UserError, NotPlanned):
        return
    seconds = choice.seconds * estimator.time(run, there).seconds / estimator.time(choice.run, here).seconds
    if seconds < 0.9 * choice.seconds:
        memory = f"{gib(there.memory.allocated)} instead of {gib(here.memory.allocated)} of tensors"
        yield (
            f"precision={precision}: {seconds:.3g} s a step instead of {choice.seconds:.3g} s, {memory}; it changes "
            "the result, within the rounding of 16 bits (drivetrain compare shows by how much)"
        )


def _native(host: Machine) -> set[str]:
    """Returns the mixed precisions that the machine has instructions for."""
    names = {"bfloat16": "bf16-mixed", "float16": "fp16-mixed"}
    return {mixed for dtype, mixed in names.items() if dtype in host.native_dtypes}
