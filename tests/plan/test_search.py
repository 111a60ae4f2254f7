"""The search finds what an exhaustive evaluation finds, with a small part of its traces."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from drivetrain.config.load import load, validate
from drivetrain.config.run import RunConfig
from drivetrain.plan.derive import Derivation, cuts_to_trace
from drivetrain.plan.estimator import NotPlanned
from drivetrain.plan.overrides import overrides_of
from drivetrain.plan.rows import Plan, Row, chosen, row
from drivetrain.plan.search import search
from drivetrain.plan.search_space import Space, families
from drivetrain.plan.step_costs import StepCosts
from tests.cli.test_cli import DIGITS
from tests.plan.invented import Invented, Model, machine
from tests.test_waits import language

SPACE = Space(("fp32",))


@pytest.fixture
def base(tmp_path: Path) -> RunConfig:
    return run(tmp_path)


def run(folder: Path, *settings: str) -> RunConfig:
    (folder / "run.yaml").write_text(DIGITS)
    config, problems = load(folder / "run.yaml", ["batch_size=256", *settings])
    assert config is not None
    assert not problems
    return config


def exhaustive(base: RunConfig, space: Space, estimator: Invented) -> list[Row]:
    """A row for each candidate, each evaluated by itself."""
    ways = families(base, space, estimator.host, estimator.nodes, estimator.devices_per_node).possible
    rows = []
    for family in ways:
        for size in family.sizes:
            candidate, _ = family.at(size)
            try:
                costs = estimator.costs(candidate)
            except ValueError:
                continue
            rows.append(row(candidate, base, costs, estimator, family.rank))
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_that_of_an_exhaustive_evaluation(base: RunConfig, seed: int) -> None:
    estimator = machine(seed)
    plan, candidates = as_exhaustive(base, estimator)
    assert plan.traces == len(estimator.asked)
    if plan.choice is not None:
        assert plan.choice.costs is not None
        assert plan.choice.costs.origin == "traced"
    assert plan.traces <= max(20, candidates / 5)  # four traces a family


@pytest.mark.parametrize(("seed", "batch"), [(10, 50), (3, 50), (7, 72), (14, 72)])
def test_a_batch_that_is_no_power_of_two_has_that_choice_too(tmp_path: Path, seed: int, batch: int) -> None:
    as_exhaustive(run(tmp_path, f"batch_size={batch}"), machine(seed))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_batch_that_fits_only_as_one_micro_batch_is_found(tmp_path: Path, devices: int) -> None:
    """With two, the gradients of the first are there in the forward pass of the second."""
    gradients = 2**33
    model = Model(parameters=gradients, layers=80, activations=gradients / 170, flops=2**45)
    for share in (4.5, 4.6, 4.65, 4.7, 4.75, 4.8, 4.85):  # of parameters, gradients and two moments: 4
        machine = Invented(model, nodes=1, devices_per_node=devices, memory=round(share * gradients) + 2**29)
        as_exhaustive(run(tmp_path, f"batch_size={2 * devices}"), machine)


@pytest.mark.parametrize("seed", range(12))
def test_among_precisions_the_choice_is_the_exhaustive_one_too(base: RunConfig, seed: int) -> None:
    """In bfloat16 products are four times as quick there, and all else as slow."""
    as_exhaustive(base, machine(seed), Space(("fp32", "bf16-mixed")))


def as_exhaustive(base: RunConfig, estimator: Invented, space: Space = SPACE) -> tuple[Plan, int]:
    """Returns the plan, whose choice was seen to be that of all candidates, and their number."""
    best = chosen(exhaustive(base, space, estimator))
    candidates = len(estimator.asked)
    estimator.asked.clear()
    plan = search(base, space, estimator)
    assert (best is None) == (plan.choice is None)
    if best is not None and plan.choice is not None:
        assert plan.choice.overrides == best.overrides
        assert plan.choice.seconds == pytest.approx(best.seconds, rel=0.01)
    return plan, candidates


@pytest.mark.parametrize("seed", range(3))
def test_thirty_random_candidates_are_derived_within_two_percent(base: RunConfig, seed: int) -> None:
    estimator, chance = machine(seed), random.Random(seed)
    ways = families(base, SPACE, estimator.host, estimator.nodes, estimator.devices_per_node).possible
    for family in chance.sample(ways, min(30, len(ways))):
        stages = family.run.engine.stages
        traced = {cut: estimator.costs(family.traced_as(cut)) for cut in cuts_to_trace(family.samples, stages)}
        candidate, cut = family.at(chance.choice(family.sizes))
        derived, measured = Derivation(traced, stages).at(cut), estimator.costs(candidate)
        assert derived.memory.allocated == pytest.approx(measured.memory.allocated, rel=0.02)
        assert sum(derived.memory.parts.values()) == pytest.approx(derived.memory.allocated, rel=1e-6)
        assert estimator.time(candidate, derived).seconds == pytest.approx(
            estimator.time(candidate, measured).seconds, rel=0.02
        )
        assert derived.tokens == measured.tokens


LARGE = Model(parameters=4 * 8e9, layers=32, activations=2**27, flops=2**45)  # 8 billion in fp32


def large(**machine: int) -> Invented:
    return Invented(LARGE, **{"nodes": 1, "devices_per_node": 8, "memory": 80 * 2**30, **machine})


def test_the_best_five_and_the_choice_are_traced_and_the_rows_are_in_order(base: RunConfig) -> None:
    plan = search(base, SPACE, large())
    fitting = [each for each in plan.rows if each.fits == "yes"]
    assert all(each.costs is not None and each.costs.origin == "traced" for each in fitting[:5])
    times = [each.seconds for each in fitting]
    assert times == sorted(times)  # type: ignore[type-var]
    assert plan.choice is not None
    assert plan.choice.costs is not None
    assert plan.choice.costs.origin == "traced"


def reasons(plan: Plan, engine: str) -> set[str]:
    return {each.verdict for each in plan.rows if each.run.engine.label == engine}


def test_what_is_rejected_says_by_how_much_and_of_what(base: RunConfig) -> None:
    plan = search(base, SPACE, large())
    (single,) = reasons(plan, "single")
    assert single == (
        "short of at least 39.2 GiB: a device would hold 29.8 GiB of parameters, 29.8 GiB of gradients, "
        "59.6 GiB of optimizer"
    )
    short = [each.verdict for each in plan.rows if each.fits == "no"]
    assert any("GiB, most of it activations" in each for each in short)


def test_what_a_rule_refuses_keeps_its_reason(tmp_path: Path) -> None:
    base = run(tmp_path, "batch_size=4")
    plan = search(base, SPACE, large())
    assert any("the batch (4) < the devices that share it (8)" in reason for reason in reasons(plan, "ddp"))


def test_nothing_that_changes_the_result_is_changed(base: RunConfig) -> None:
    for row_ in search(base, SPACE, large()).rows:
        assert row_.run.global_batch == 256
        assert row_.run.precision == "fp32"
        assert not any(each.startswith(("batch_size", "precision")) for each in row_.overrides)


def test_a_batch_for_each_device_stays_the_global_batch_that_it_was(tmp_path: Path) -> None:
    base = run(tmp_path, "batch_size=null", "batch_size_per_device=8", "engine=ddp")
    plan = search(base, SPACE, large())
    assert {each.run.global_batch for each in plan.rows} == {64}
    assert all("batch_size=64" in each.overrides for each in plan.rows)


@pytest.mark.parametrize(("nodes", "devices"), [(1, 1), (1, 8), (2, 8)])
def test_a_batch_for_each_device_is_that_of_the_runs_own_devices(tmp_path: Path, nodes: int, devices: int) -> None:
    """Whatever machine is searched: a run of two processes has two."""
    base = run(tmp_path, "batch_size=null", "batch_size_per_device=8", "engine=ddp", "processes=2")
    machine = large(nodes=nodes, devices_per_node=devices, memory=400 * 2**30)
    plan = search(base, Space(("fp32",), fixed=frozenset({"processes"})), machine)
    assert {each.run.global_batch for each in plan.rows} == {16}


def test_nodes_that_the_user_sets_are_kept(tmp_path: Path) -> None:
    space, four = Space(("fp32",), fixed=frozenset({"nodes"})), large(nodes=4, devices_per_node=2)
    one, two = (families(run(tmp_path, f"nodes={nodes}"), space, four.host, 4, 2) for nodes in (1, 2))
    assert {(each.run.nodes, each.run.world_size) for each in one.possible} == {(1, 1), (1, 2)}
    assert {(each.run.nodes, each.run.world_size) for each in two.possible} == {(2, 4)}
    (alone,) = {each.reason for each in two.refused if each.run.engine.label == "single"}
    assert "engine=single runs in one process" in alone
    found = search(run(tmp_path, "nodes=1"), space, four)
    assert not any(word.startswith("nodes=") for each in found.rows for word in each.overrides)


def test_what_the_user_sets_is_kept(tmp_path: Path) -> None:
    base = run(tmp_path, "recompute=true", "micro_batch_size=4")
    fixed = frozenset({"recompute", "micro_batch_size"})
    for each in search(base, Space(("fp32",), fixed=fixed), large()).rows:
        assert each.run.recompute is True
        assert each.run.micro_batch_limit in (4, None)


def test_a_way_that_cannot_be_traced_is_a_row_with_the_reason(base: RunConfig) -> None:
    plan = search(base, SPACE, large(devices_per_node=32))
    assert any("the model has 16 heads" in each.verdict for each in plan.rows)


def test_a_step_time_that_an_estimator_falsifies_changes_the_choice(base: RunConfig) -> None:
    slow, quick = large(link=10**6), large(link=10**12)
    assert search(base, SPACE, slow).choice != search(base, SPACE, quick).choice


class NeedsTwo(Invented):
    """Its model takes no micro-batch of one sample, as one with BatchNorm may."""

    def costs(self, run: RunConfig, quick: bool = False) -> StepCosts:
        samples = math.ceil(run.global_batch / run.data_parallel_size)
        size = min(run.micro_batch_limit or samples, samples)
        if size == 1 or samples % size == 1:
            raise NotPlanned("more than 1 value per channel")
        return super().costs(run, quick)


@pytest.mark.parametrize("memory", [20, 80])
def test_a_model_that_takes_no_single_sample_is_searched_from_two(tmp_path: Path, memory: int) -> None:
    base = run(tmp_path, "batch_size=72")
    estimator = NeedsTwo(LARGE, nodes=1, devices_per_node=8, memory=memory * 2**30)
    ways = families(base, SPACE, estimator.host, 1, 8).possible
    candidates = [(*family.at(size), family) for family in ways for size in family.sizes]
    sound = [
        row(candidate, base, estimator.costs(candidate), estimator, family.rank)
        for candidate, cut, family in candidates
        if cut.size > 1 and cut.samples % cut.size != 1
    ]
    best, plan = chosen(sound), search(base, SPACE, estimator)
    assert best is not None
    assert plan.choice is not None
    assert plan.choice.overrides == best.overrides
    assert all(each.run.micro_batch_limit != 1 for each in plan.rows if each.costs is not None)


def test_a_way_whose_ranks_have_fewer_samples_than_the_model_takes_is_refused(tmp_path: Path) -> None:
    plan = search(run(tmp_path, "batch_size=8"), SPACE, NeedsTwo(LARGE, nodes=1, devices_per_node=8, memory=80 * 2**30))
    assert reasons(plan, "ddp") == {"the model takes no fewer than 2 samples at once"}


def test_words_without_effect_are_not_offered(tmp_path: Path) -> None:
    base = run(tmp_path)

    def words(*settings: str, base: RunConfig = base) -> tuple[str, ...]:
        return overrides_of(run(tmp_path, *settings), base)

    assert words("micro_batch_size=256") == ("engine=single",), "the whole batch, as without it"
    assert words("micro_batch_size=255") == ("engine=single", "micro_batch_size=255")
    spread = ("engine=ddp", "processes=4")
    assert words(*spread, "micro_batch_size=64") == spread, "a rank's whole share"
    staged = words("engine={name: mesh, pp: 2}", "processes=2", "micro_batch_size=256")
    assert staged[-1] == "micro_batch_size=256", "stages cut the batch without it"
    smaller = run(tmp_path, "micro_batch_size=4")
    assert words("micro_batch_size=256", base=smaller)[-1] == "micro_batch_size=256", "it replaces the run file's"


def test_the_size_of_packed_samples_is_offered_only_where_nothing_else_bounds_them(tmp_path: Path) -> None:
    raw = {"workload": language(tmp_path), "batch_size": 8, "loop": {"steps": 1}}

    def words(**settings: Any) -> tuple[str, ...]:
        base, problems = validate(raw | settings, [])
        assert base is not None, problems
        return overrides_of(base.model_copy(update={"micro_batch_size": 8}), base)

    assert words(micro_batch_tokens=64) == ("engine=single",)
    assert words()[-1] == "micro_batch_size=8", "on a CPU packed samples have a bound in tokens else"
