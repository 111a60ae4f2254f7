"""Tests that a plan knows what activation offload leaves on a GPU, what travels, and when it is waited for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drivetrain.plan.machines import Cluster, cluster
from drivetrain.plan.speeds import PCIE, PCIE_SHARE, speeds_of
from drivetrain.plan.step_costs import StepCosts
from drivetrain.plan.step_time import step_time
from drivetrain.plan.trace import step_costs
from drivetrain.training.assemble import read_workload
from tests.plan.measured import read_run, write_run

H100 = cluster("1xH100-80GB")
OFFLOAD = "offload_activations=true"


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("offloaded")
    (folder / "text.txt").write_text("All the world's a stage, and all the men and women merely players.\n" * 400)
    return write_run(folder, train=str(folder / "text.txt"), length=64)


def planned(run_file: str, blocks: int, *more: str, machine: Cluster = H100) -> StepCosts:
    sizes = ["workload.model.config.hidden_size=64", f"workload.model.config.num_hidden_layers={blocks}"]
    run = read_run(run_file, [*sizes, "batch_size=32", "processes=1", *more])
    return step_costs(run, machine.host, read_workload(run, training=True))


def copied(costs: StepCosts) -> float:
    return sum(each.bytes for each in costs.operations if each.kind == "host")


def test_a_gpu_holds_the_activations_of_few_blocks_whatever_their_number(run_file: str) -> None:
    """Each block more adds at most its weights, its gradients and AdamW's state: 16 bytes a parameter."""
    with_four, with_eight = (planned(run_file, blocks, OFFLOAD) for blocks in (4, 8))
    state = 16 * (with_eight.trained_parameters - with_four.trained_parameters)
    assert 0 < with_eight.memory.allocated - with_four.memory.allocated <= state
    kept = planned(run_file, 8).memory.allocated
    assert with_eight.memory.allocated < 0.7 * kept


def test_what_leaves_comes_back_and_is_what_the_device_no_longer_holds(run_file: str) -> None:
    without, given = planned(run_file, 8), planned(run_file, 8, OFFLOAD)
    assert not copied(without)
    four = copied(planned(run_file, 4, OFFLOAD))
    assert copied(given) == pytest.approx(2 * four)
    assert copied(given) / 2 > without.memory.allocated - given.memory.allocated


def test_on_a_processor_nothing_leaves_the_memory(run_file: str) -> None:
    here = Cluster(1, 1, "a processor", None, None, replace(H100.host, device="cpu", compute_capability=None))
    assert not copied(planned(run_file, 4, OFFLOAD, machine=here))


def test_copies_are_waited_for_where_they_take_longer_than_the_computation(run_file: str) -> None:
    costs, speeds = planned(run_file, 8, OFFLOAD), speeds_of(H100, 1)
    found = step_time(costs, speeds)
    assert (found.host, found.bound_by) == (0.0, "start"), "so small a model waits for the program"
    many = tuple(replace(each, bytes=each.bytes * 1e6) if each.kind == "host" else each for each in costs.operations)
    slow = step_time(replace(costs, operations=many), speeds)
    assert slow.bound_by == "host"
    assert slow.seconds == pytest.approx(copied(costs) * 1e6 / (PCIE_SHARE * PCIE[5] * 1e9))
