"""Costs that are derived from few traces are those of a step whose parts grow each in its own way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drivetrain.plan.derive import Cut, Derivation, cuts_to_trace
from drivetrain.plan.memory import memory_of
from drivetrain.plan.step_costs import Operations, StepCosts, StepMemory
from tests.plan.costs import of_activations


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


def test_what_the_host_holds_lies_on_a_line_too() -> None:
    """State of 5,000 bytes, and activations of 7 bytes a sample of the micro-batch."""

    def costs(cut: Cut) -> StepCosts:
        return replace(step(cut), memory=replace(step(cut).memory, host=5000 + 7 * cut.size))

    derivation = Derivation({cut: costs(cut) for cut in cuts_to_trace(32, 1)})
    assert [derivation.at(Cut.of(32, size)).memory.host for size in (1, 4, 32)] == [5007, 5028, 5224]


def stage(fixed: int, each: int, cut: Cut) -> StepMemory:
    """The memory of a rank that holds `fixed` bytes in its update and `each` for a sample in its backward pass."""
    backward = [("backward", each * cut.size)] * min(2, cut.size)  # more calls, where there is more than one sample
    return memory_of(of_activations(*backward, ("optimizer", fixed)))


def test_the_fullest_rank_of_a_pipeline_may_be_another_one_at_another_micro_batch() -> None:
    """One stage holds 1,000 bytes whatever the micro-batch, the other 100 for each of its samples."""

    def costs(cut: Cut) -> StepCosts:
        ranks = {0: stage(1000, 1, cut), 4: stage(10, 100, cut)}
        return of_ranks(*(replace(step(cut), memory=memory) for memory in ranks.values()))

    derivation = Derivation({cut: costs(cut) for cut in cuts_to_trace(64, 2)}, stages=2)
    assert [derivation.at(Cut.of(64, size)).memory.allocated for size in (2, 8, 16, 32)] == [1000, 1000, 1600, 3200]


def of_ranks(*each: StepCosts) -> StepCosts:
    """Returns the costs of the fullest of these ranks, with those of all."""
    fullest = max(each, key=lambda costs: costs.memory.allocated)
    return replace(fullest, by_rank=dict(enumerate(each)))


def test_each_rank_has_work_of_its_own() -> None:
    """The first stage holds more, the second one computes twice as much."""

    def costs(cut: Cut) -> StepCosts:
        small, large = (replace(step(cut), memory=stage(fixed, 1, cut)) for fixed in (1000, 100))
        double = [replace(each, flops=2 * each.flops, calls=2 * each.calls) for each in large.operations]
        return of_ranks(small, replace(large, operations=tuple(double)))

    derived = Derivation({cut: costs(cut) for cut in cuts_to_trace(64, 2)}, stages=2).at(Cut.of(64, 16))
    first, second = derived.ranks
    assert (first.memory, first.operations) == (derived.memory, derived.operations)
    assert second.operations[0].calls == pytest.approx(2 * first.operations[0].calls, abs=2)


def test_steps_of_other_numbers_of_calls_are_compared_phase_by_phase() -> None:
    """On the chord between the peaks 1,000 (an update) and 3,200 a micro-batch of 4 would have 1,213 bytes."""
    derivation = Derivation(
        {cut: replace(step(cut), memory=stage(1000, 100, cut)) for cut in (Cut(1, 2, 2), Cut(32, 2, 64))}
    )
    assert derivation.at(Cut.of(64, 4)).memory.allocated == 1000
