"""Traces on several ranks: what their processes import."""

from __future__ import annotations

from drivetrain.config.run import RunConfig
from drivetrain.prove.trace import Trace, trace
from tests.parity.promises import MUTATIONS
from tests.tiny_workload import CPU


def traced_on_ranks(run: RunConfig, steps: int) -> Trace:
    return trace(run, CPU, steps, resume=True)


def mutated_traces(run: RunConfig, steps: int) -> dict[str, Trace]:
    found = {}
    for name, mutation in MUTATIONS.items():
        with mutation():
            found[name] = trace(run, CPU, steps, resume=False)
    return found
