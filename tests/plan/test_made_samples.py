"""A micro-batch of a run whose model makes its samples counts these, and traces are of whole prompts."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from drivetrain.config.load import validate
from drivetrain.config.run import RunConfig
from drivetrain.plan.derive import Cut, Derivation, cuts_to_trace
from drivetrain.plan.estimate import Traced
from drivetrain.plan.machines import cluster
from drivetrain.plan.search_space import Family, Space, families
from drivetrain.plan.small_batches import measured_costs
from drivetrain.plan.whole_prompts import Prompts
from drivetrain.runtime.hardware import detect
from drivetrain.training.assemble import read_workload
from tests.plan.invented import machine
from tests.plan.test_search import as_exhaustive
from tests.test_waits import compared

REWARDED: dict[str, Any] = {"rewards": ["exact_match"], "answers": 8, "max_new_tokens": 8}
H100 = cluster("4xH100-80GB")


def run(folder: Path, batch: int = 16, stage: str = "grpo", **learning: Any) -> RunConfig:
    workload = {**compared(folder, "grpo", reinforcement={**REWARDED, **learning}), "stage": stage}
    found, problems = validate({"workload": workload, "batch_size": batch, "loop": {"steps": 1}}, [])
    assert found is not None, problems
    return found


def test_micro_batches_of_answers_are_searched_up_to_all_answers_of_a_rank(tmp_path: Path) -> None:
    found = families(run(tmp_path), Space(("fp32",)), H100.host, 1, 4).possible
    sizes = {each.run.engine.label: each.sizes for each in found if not each.run.recompute}
    assert sizes["single"] == (1, 2, 4, 8, 16, 32, 64, 128)
    assert sizes["ddp"] == (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize("seed", range(0, 20, 3))
def test_the_choice_among_micro_batches_of_answers_is_the_exhaustive_one(tmp_path: Path, seed: int) -> None:
    as_exhaustive(run(tmp_path), machine(seed))


@pytest.mark.parametrize(("answers", "updates", "batch"), [(8, 1, 4), (6, 5, 12), (7, 1, 5), (8, 16, 16)])
def test_every_trace_is_of_whole_prompts_and_has_the_samples_of_its_cut(
    tmp_path: Path, answers: int, updates: int, batch: int
) -> None:
    base = run(tmp_path, batch, answers=answers, updates=updates)
    for family in families(base, Space(("fp32",)), H100.host, 1, 4).possible:
        for cut in (*family.cuts, *map(family.own_cut, family.sizes)):
            traced = family.traced_as(cut)
            assert cut.samples == math.ceil(traced.step_samples / traced.data_parallel_size)
            assert cut.count == math.ceil(cut.samples / cut.size)
        assert len({*family.cuts}) == len(family.cuts)


def test_a_shorter_trace_has_micro_batches_of_the_size_that_it_stands_for() -> None:
    """Micro-batches are of near-equal sizes: 36 answers in three of at most 16 would be three of 12."""
    prompts = Prompts(Fraction(6), ranks=1, most=40)
    assert prompts.with_size(Cut(16, 2, 32)) == Cut(16, 3, 48)
    assert prompts.with_size(Cut(4, 2, 8)) == Cut(4, 3, 12)


def test_cuts_of_data_are_left_as_they_are() -> None:
    for samples, stages, least, ranks in itertools.product((1, 2, 3, 5, 8, 50), (1, 2, 4), (1, 2), (1, 3, 8)):
        asked = cuts_to_trace(samples, stages, least)
        assert Prompts(Fraction(1), ranks, samples * ranks).cuts(asked, least) == asked


@pytest.mark.parametrize(("stage", "answers"), [("grpo", 6), ("ppo", 1)])
def test_memory_and_work_of_answers_are_derived_as_they_are_traced(tmp_path: Path, stage: str, answers: int) -> None:
    base, estimator = run(tmp_path, 8, stage, answers=answers), Traced(cluster("this machine"))
    family = Family(base, base.step_samples, (1, 4, base.step_samples // 2, base.step_samples))
    derivation = Derivation({cut: estimator.costs(family.traced_as(cut)) for cut in family.cuts})
    for size in family.sizes:
        whole, cut = family.at(size)
        derived, own = derivation.at(cut), estimator.costs(whole)
        assert derived.tokens == pytest.approx(own.tokens, rel=0.05)
        if math.ceil(cut.samples / cut.count) == size:  # else its micro-batches are smaller
            assert derived.memory.allocated == pytest.approx(own.memory.allocated, rel=0.02), size
        flops = [sum(each.flops for each in costs.operations) for costs in (derived, own)]
        assert flops[0] == pytest.approx(flops[1], rel=0.03), size


def test_a_model_that_is_measured_takes_the_micro_batches_of_its_answers(tmp_path: Path) -> None:
    base = run(tmp_path, 4).model_copy(update={"micro_batch_size": 16})
    found = measured_costs(base, detect(), read_workload(base, training=True))
    own = Traced(cluster("this machine")).costs(base)
    assert found.tokens == pytest.approx(own.tokens, rel=0.05), "answers beside each other share a prompt"
    flops = [sum(each.flops for each in costs.operations) for costs in (found, own)]
    assert flops[0] == pytest.approx(flops[1], rel=0.05)
