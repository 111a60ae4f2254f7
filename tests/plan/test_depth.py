"""The costs of a deep model that follow from a few of its blocks are those of its whole trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain.config import rules
from drivetrain.config.load import load
from drivetrain.config.run import RunConfig
from drivetrain.plan import deep_trace
from drivetrain.plan.catalogue import catalogue
from drivetrain.plan.deep_trace import Tracer
from drivetrain.plan.depth import DepthTrace, NotLinear, check_linear, extrapolated
from drivetrain.plan.derive import Derivation
from drivetrain.plan.estimate import Traced
from drivetrain.plan.machines import cluster
from drivetrain.plan.run_time import time_of
from drivetrain.plan.search_space import Family
from drivetrain.plan.step_costs import Messages, StepCosts, StepMemory
from drivetrain.plan.timeline import PARTS, MemoryPart
from drivetrain.plan.trace import step_costs
from drivetrain.plan.trace_model import container_of_alike
from drivetrain.training.assemble import read_workload
from tests.plan.costs import of_activations
from tests.plan.measured import LLAMA

BLOCKS = 12
MACHINE = cluster("4xH100-80GB", catalogue())
EVEN = "traced with 2, 3 and 4 of {}, in even steps of which its costs grow"
PIPELINE = ["engine={name: mesh, pp: 2, dp: 2, shard: true}", "micro_batch_size=1"]
WAYS = [
    ["engine=single", "micro_batch_size=4"],
    ["engine=fsdp", "recompute=true", "precision=bf16-mixed"],
    ["engine={name: mesh, dp: 2, tp: 2, shard: true}"],
]


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deep")
    (folder / "text.txt").write_text("All the world's a stage, and all the men and women merely players.\n" * 40)
    config = {**LLAMA, "num_hidden_layers": BLOCKS}
    data = {"train": str(folder / "text.txt"), "length": 32}
    workload = {"type": "language_model", "model": {"config": config}, "data": data}
    (folder / "run.yaml").write_text(json.dumps({"workload": workload, "batch_size": 8, "loop": {"steps": 2}}))
    return folder / "run.yaml"


def read(run_file: Path, overrides: list[str]) -> RunConfig:
    run, problems = load(run_file, overrides)
    assert run is not None, problems
    run, problems = rules.judged(run, problems, MACHINE.host)
    assert not problems, problems
    return run


def both(run: RunConfig, rank: int = 0) -> tuple[StepCosts, StepCosts, list[str]]:
    """Returns the costs by a trace of the whole model and by traces of a few blocks, with the notes on these."""
    workload, tracer = read_workload(run, training=True), Tracer(few=1)
    whole = step_costs(run, MACHINE.host, workload, rank)
    return whole, tracer.step_costs(run, MACHINE.host, workload, rank), [*tracer.notes]


def highest(costs: StepCosts) -> dict[str, dict[MemoryPart, int]]:
    """Returns what is alive where each phase holds most."""
    found = costs.memory.timeline.highest_of_phases()
    return {phase: found.parts_at(moment) for moment, phase in enumerate(found.phases)}


@pytest.mark.long
@pytest.mark.parametrize("overrides", WAYS, ids=" ".join)
def test_a_few_blocks_show_the_costs_of_all(run_file: Path, overrides: list[str]) -> None:
    run = read(run_file, overrides)
    whole, found, notes = both(run)
    assert EVEN.format("the model's 12 blocks") in notes
    check_same(run, whole, found)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 2])
def test_a_few_blocks_of_a_stage_show_the_costs_of_all_of_it(run_file: Path, rank: int) -> None:
    """The first and the last one, of four micro-batches that are under way at once."""
    run = read(run_file, PIPELINE)
    whole, found, notes = both(run, rank)
    assert EVEN.format("a stage's 6 blocks") in notes
    check_same(run, whole, found)


def test_a_step_of_a_pipeline_takes_as_long_as_its_slowest_stage(run_file: Path) -> None:
    run = read(run_file, ["engine={name: mesh, pp: 4}", "processes=4", "workload.model.config.num_hidden_layers=13"])
    workload = read_workload(run, training=True)
    stages = [step_costs(run, MACHINE.host, workload, rank) for rank in range(4)]
    blocks = stages[0].stage_depths
    assert sum(blocks) == 13
    assert blocks[0] == blocks[1] < blocks[2], "another stage than the first inner one has most to do"
    whole, quick = (Traced(MACHINE).costs(run, quick=quick) for quick in (False, True))
    slowest = max(time_of(run, each, MACHINE).seconds for each in stages)
    assert slowest > time_of(run, stages[0], MACHINE).seconds
    assert {time_of(run, each, MACHINE).seconds for each in (whole, quick)} == {slowest}
    assert whole.memory.allocated == max(each.memory.allocated for each in stages)
    assert [*quick.by_rank] == [0, 2, 3]


@pytest.mark.long
def test_a_few_micro_batches_of_a_pipeline_show_the_memory_of_many(run_file: Path) -> None:
    """The third forward pass of two stages is the first at which gradients are there already, and each micro-batch has
    a buffer of its own. With two there is no such pass."""
    run = read(run_file, ["engine={name: mesh, pp: 2, dp: 2}", "batch_size=32", "processes=4"])
    family = Family(run, 16, (1, 4, 8))
    estimator = Traced(MACHINE)
    derivation = Derivation({cut: estimator.costs(family.traced_as(cut), quick=True) for cut in family.cuts}, stages=2)
    for size in family.sizes:
        _, cut = family.at(size)
        whole = estimator.costs(family.traced_as(cut), quick=True)
        assert derivation.at(cut).memory.allocated == pytest.approx(whole.memory.allocated, rel=0.005), size


def check_same(run: RunConfig, whole: StepCosts, found: StepCosts) -> None:
    assert found.memory.allocated == whole.memory.allocated
    assert {name: found.memory.parts.get(name, 0) for name in PARTS} == {
        name: whole.memory.parts.get(name, 0) for name in PARTS
    }
    assert highest(found) == highest(whole)
    assert found.trained_parameters == whole.trained_parameters
    for one, other in ((whole.operations, found.operations), (whole.messages, found.messages)):
        for name in ("calls", "bytes"):
            assert sum(getattr(each, name) for each in other) == sum(getattr(each, name) for each in one)
    assert time_of(run, found, MACHINE).seconds == pytest.approx(time_of(run, whole, MACHINE).seconds, rel=0.005)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["zero3", "ddp"])
def test_buckets_that_do_not_repeat_are_within_half_a_percent_or_traced_whole(run_file: Path, engine: str) -> None:
    whole, found, notes = both(read(run_file, [f"engine={engine}"]))
    assert found.memory.allocated == pytest.approx(whole.memory.allocated, rel=0.005)
    assert notes


def test_where_the_costs_do_not_grow_evenly_all_blocks_are_traced(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = deep_trace.step_trace

    def growing(*args: object) -> object:
        found = trace(*args)  # type: ignore[arg-type]
        more = found.timeline.with_more("activations", args[-1] ** 2 * 10**6)  # type: ignore[operator]
        return replace(found, timeline=more)

    monkeypatch.setattr(deep_trace, "step_trace", growing)
    whole, found, notes = both(read(run_file, ["engine=single"]))
    assert found.memory == whole.memory
    short = "its figures are of all 12 blocks; a few blocks, tried first as a short cut, did not predict its memory ("
    assert any(short in note and note.endswith("% off) and were not used") for note in notes), notes


def test_blocks_that_differ_are_not_left_out() -> None:
    def block(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))

    alike = nn.Sequential(nn.Linear(4, 4), nn.ModuleList(block(8) for _ in range(3)))
    assert container_of_alike(alike) is alike[1]
    assert container_of_alike(nn.ModuleList([block(8), block(8), block(16)])) is None
    half_frozen = nn.ModuleList(block(8) for _ in range(3))
    half_frozen[0].requires_grad_(False)
    assert container_of_alike(half_frozen) is None
    assert container_of_alike(nn.Linear(4, 4)) is None
    assert torch.is_grad_enabled()


def test_the_host_holds_as_much_more_with_each_block() -> None:
    def trace(depth: int) -> DepthTrace:
        costs = StepCosts(StepMemory(8, 8, {}, host=100 + 30 * depth), (), (), depth, None, "traced", 0.0)
        return DepthTrace(depth, costs, of_activations(("backward", 8)), 12)

    assert extrapolated(trace(2), trace(3), 40).memory.host == 100 + 30 * 40


@pytest.mark.parametrize(("bucket", "is_even"), [(4 * 10**9, True), (10**4, False)])
def test_a_bucket_more_now_and_then_says_nothing_where_buckets_are_large(bucket: int, is_even: bool) -> None:
    """A block's gradients fill half a bucket: two of four depths send one more."""

    def trace(depth: int) -> DepthTrace:
        sent = Messages("all_reduce", "dp", 8, 1, depth // 2, bucket * depth / 2)
        memory = StepMemory(depth * bucket, depth * bucket, {"activations": depth * bucket})
        costs = StepCosts(memory, (), (sent,), depth, None, "traced", 0.0)
        return DepthTrace(depth, costs, of_activations(("backward", depth * bucket)), 32)

    if is_even:
        check_linear(trace(3), trace(4), trace(5))
    else:
        with pytest.raises(NotLinear, match="its messages"):
            check_linear(trace(3), trace(4), trace(5))
