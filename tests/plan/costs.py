"""Costs of a step that tests of planning write down."""

from __future__ import annotations

from drivetrain.plan.step_costs import Messages, Operations, StepCosts, StepMemory


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
