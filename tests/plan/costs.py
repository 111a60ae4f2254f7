"""Costs of a step that tests of planning write down."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from drivetrain.plan.step_costs import Messages, Operations, StepCosts, StepMemory
from drivetrain.plan.timeline import PARTS, MemoryPart, Timeline


def costs(*parts: Operations | Messages, parameters: int = 1000, tokens: int | None = None) -> StepCosts:
    return StepCosts(
        memory=StepMemory(0, 0, {}),
        operations=tuple(part for part in parts if isinstance(part, Operations)),
        messages=tuple(part for part in parts if isinstance(part, Messages)),
        trained_parameters=parameters,
        tokens=tokens,
        origin="derived",
        seconds_taken=0.0,
    )


def made_timeline(*moments: tuple[str, Mapping[MemoryPart, int]]) -> Timeline:
    """moments: phase and bytes of each part."""
    parts = np.array([[sizes.get(part, 0) for part in PARTS] for _, sizes in moments], dtype=np.int64)
    return Timeline(tuple(phase for phase, _ in moments), parts)


def of_activations(*moments: tuple[str, int]) -> Timeline:
    """Returns a timeline of activations alone. moments: phase and bytes of each."""
    return made_timeline(*((phase, {"activations": size}) for phase, size in moments))
