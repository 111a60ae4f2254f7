"""Costs that are derived from few traces are those of a step whose parts grow each in its own way."""

from __future__ import annotations

import pytest

from drivetrain.plan.derive import Cut, Derivation, cuts_to_trace
from drivetrain.plan.step_costs import Operations, StepCosts, StepMemory


def step(cut: Cut) -> StepCosts:
    """A step with an update, weights that each micro-batch reads, samples, and a fused loss that reads all samples of a
    micro-batch once for each of as many slabs as it has samples."""
    moved = 7e9 + 5e9 * cut.count + 3e9 * cut.samples + 2e9 * cut.samples * cut.size
    operations = Operations("memory", "float32", calls=100 * cut.samples, flops=0.0, bytes=moved)
    size = 1000 + 100 * cut.size
    memory = StepMemory(size, size, {"activations": size})
    return StepCosts(memory, (operations,), (), trained_parameters=1, tokens=None, origin="traced", seconds_taken=0.0)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32])
def test_slabs_of_a_loss_that_each_read_all_samples_are_derived_for_every_micro_batch(size: int) -> None:
    derivation = Derivation({cut: step(cut) for cut in cuts_to_trace(32, 1)})
    cut = Cut.of(32, size)
    [derived], [own] = derivation.at(cut).operations, step(cut).operations
    assert derived.bytes == pytest.approx(own.bytes)
    assert derived.calls == pytest.approx(own.calls, abs=1)


@pytest.mark.parametrize("samples", [2, 3, 4])
def test_few_samples_give_as_many_shares_as_their_traces_tell_apart(samples: int) -> None:
    traced = {cut: step(cut) for cut in cuts_to_trace(samples, 1)}
    derived = Derivation(traced).at(Cut.of(samples, 1))
    assert derived.operations[0].calls == pytest.approx(100 * samples, rel=0.2)
