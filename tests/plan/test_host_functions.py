"""Tests that a trace shows what engines keep in the memory of a GPU's host, by arithmetic on a small model.

Two ranks train P parameters. Where the copies lie is DeepSpeed's source: zero/stage_1_and_2.py keeps masters, moments,
gradients and a 16-bit copy of its partition on the host; zero/stage3.py without the copy, but with gradients twice.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.optim import optimizer

from drivetrain.models.planned_device import PLANNED_DEVICE
from drivetrain.plan.fake_mode import QuickFakeMode
from drivetrain.plan.host_functions import HOST, on_host
from drivetrain.plan.machines import cluster
from drivetrain.plan.step_costs import StepCosts
from drivetrain.plan.trace import step_costs
from drivetrain.training.assemble import read_workload
from tests.plan.measured import read_run, write_run

H100 = cluster("2xH100-80GB")
RANKS = 2
NEAR = 0.01  # partitions are aligned and the allocator rounds up; scalars and small parameters lie apart


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("kept")
    (folder / "text.txt").write_text("All the world's a stage, and all the men and women merely players.\n" * 40)
    return write_run(folder, train=str(folder / "text.txt"), length=32)


def planned(run_file: str, engine: str, *more: str) -> StepCosts:
    size = "workload.model.config.hidden_size=64"
    run = read_run(run_file, [f"engine={engine}", f"processes={RANKS}", size, *more])
    return step_costs(run, H100.host, read_workload(run, training=True))


def bytes_of(costs: StepCosts, kind: str) -> float:
    return sum(each.bytes for each in costs.operations if each.kind == kind)


def held(costs: StepCosts, *parts: str) -> int:
    return sum(size for part, size in costs.memory.parts.items() if part in parts)


def test_zero2_moves_twelve_bytes_a_parameter_over_the_ranks_from_the_device(run_file: str) -> None:
    """Masters and two moments of fp32. The host has them, gradients of 4 bytes and parameters of 2."""
    without = planned(run_file, "zero2", "precision=bf16-master")
    given = planned(run_file, "{name: deepspeed, stage: 2, offload_optimizer: cpu}", "precision=bf16-master")
    share = given.trained_parameters / RANKS
    state = [held(each, "parameters", "optimizer") for each in (without, given)]
    assert state[0] - state[1] == pytest.approx(12 * share, rel=NEAR)
    assert state[1] == pytest.approx(2 * given.trained_parameters, rel=NEAR)
    assert (without.memory.host, given.memory.host) == (0, pytest.approx((12 + 4 + 2) * share, rel=0.2))
    assert given.memory.host >= 18 * share
    assert bytes_of(given, "host") == pytest.approx(4 * share, rel=0.2), "gradients leave as fp32"
    assert bytes_of(given, "update_copy") == pytest.approx(2 * share, rel=NEAR), "parameters come back"
    assert bytes_of(given, "processor") > 16 * share
    assert bytes_of(given, "optimizer") < 0.1 * bytes_of(without, "optimizer")


def test_shards_of_fsdp_lie_on_the_host_and_travel_as_often_as_they_are_gathered(run_file: str) -> None:
    without, given = planned(run_file, "fsdp"), planned(run_file, "{name: fsdp, offload: true}")
    share = given.trained_parameters / RANKS
    assert held(without, "parameters", "optimizer") == pytest.approx(12 * share, rel=0.1)
    assert held(given, "parameters", "gradients", "optimizer") == 0
    assert held(given, "engine") == held(without, "engine"), "what is gathered is still the device's"
    assert given.memory.host == pytest.approx((4 + 4 + 8) * share, rel=NEAR)
    exchanged = [each for each in given.messages if each.collective in ("all_gather", "reduce_scatter")]
    assert bytes_of(given, "host") == sum(each.bytes for each in exchanged) / RANKS
    # AdamW is given four tensors of 4 bytes; the norm is of the gradients
    assert bytes_of(given, "processor") == pytest.approx((16 + 4) * share, rel=NEAR)
    assert bytes_of(given, "optimizer") == 0


def test_through_accelerate_it_is_the_same(run_file: str) -> None:
    own = planned(run_file, "{name: fsdp, offload: true}")
    driven = planned(run_file, "{name: accelerate, driver: {name: fsdp, offload: true}}")
    assert (driven.memory, driven.operations) == (own.memory, own.operations)


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_zero3_keeps_no_shards_on_the_device_and_copies_them_for_each_pass(run_file: str, place: str) -> None:
    """A disk takes what the host does in between; its own time is another question."""
    disk = ", nvme_path: nowhere" if place == "nvme" else ""
    both = f"offload_optimizer: {place}, offload_parameters: {place}{disk}"
    without = planned(run_file, "zero3", "precision=bf16-master")
    given = planned(run_file, f"{{name: deepspeed, stage: 3, {both}}}", "precision=bf16-master")
    share = given.trained_parameters / RANKS
    # parameters, masters, moments and gradients; it keeps a bucket of gradients and small parameters
    assert without.memory.allocated - given.memory.allocated == pytest.approx((2 + 4 + 8 + 4) * share, rel=NEAR)
    assert held(given, "parameters", "optimizer") < 0.1 * share
    assert given.memory.host == pytest.approx((2 + 12 + 4 + 4) * share, rel=NEAR)
    gathered = sum(each.bytes for each in given.messages if each.collective == "all_gather") / RANKS
    # gradients leave, come back to be added to, and leave once more for the update
    assert bytes_of(given, "host") == pytest.approx(gathered + 3 * 4 * share, rel=NEAR)
    assert bytes_of(given, "processor") > 16 * share


def test_parameters_alone_may_lie_on_the_host(run_file: str) -> None:
    given = planned(run_file, "{name: deepspeed, stage: 3, offload_parameters: cpu}", "precision=bf16-master")
    share = given.trained_parameters / RANKS
    assert held(given, "optimizer") == pytest.approx(8 * share, rel=0.1)
    assert given.memory.host == pytest.approx(2 * share, rel=NEAR)
    assert bytes_of(given, "processor") == 0


def test_gradients_of_several_micro_batches_leave_fsdp_once_a_step(run_file: str) -> None:
    """Parameters come for each pass; gradients are added up on the device, so that the processor has no more to do."""
    more = [("micro_batch_size=4", "batch_size=8"), ("micro_batch_size=2", "batch_size=8")]
    one, two = (planned(run_file, "{name: fsdp, offload: true}", *each) for each in more)
    assert bytes_of(one, "processor") == bytes_of(two, "processor")
    gathered = [sum(each.bytes for each in of.messages if each.collective == "all_gather") for of in (one, two)]
    assert bytes_of(two, "host") - bytes_of(one, "host") == (gathered[1] - gathered[0]) / RANKS > 0


def test_stand_ins_of_a_pipeline_for_other_stages_are_nothing_that_a_host_holds(run_file: str) -> None:
    costs = planned(run_file, "{name: mesh, pp: 2}", "micro_batch_size=4")
    assert costs.memory.host == 0
    assert not any(bytes_of(costs, kind) for kind in ("host", "update_copy", "processor"))


def test_a_text_names_the_host_and_a_device_is_what_it_is() -> None:
    with QuickFakeMode(allow_non_fake_inputs=True), on_host():
        here = torch.ones(4, device=torch.device("cpu"))
        kinds = [each.device for each in (torch.ones(4, device="cpu"), here.to("cpu"), here.cpu())]
        assert kinds == [HOST] * 3
        assert torch.ones(4, device=PLANNED_DEVICE).device == here.to(here.device).device == torch.device("cpu")
        moved = torch.ones(2, device="cpu")
        here.data = moved
        assert (here.device, here.shape, here.untyped_storage()._cdata) == (
            *(HOST, torch.Size([2])),
            moved.untyped_storage()._cdata,
        )
        with pytest.raises(RuntimeError, match="same device"):
            _ = moved + torch.ones(2, device=moved.device).to(torch.device("cpu"))


def test_nothing_of_it_stays(run_file: str) -> None:
    from deepspeed.accelerator import get_accelerator

    before = optimizer._get_fused_kernels_supported_devices
    planned(run_file, "{name: deepspeed, stage: 2, offload_optimizer: cpu}")
    assert optimizer._get_fused_kernels_supported_devices is before
    assert _fsdp_collectives.torch is torch
    assert get_accelerator().current_device_name() is not PLANNED_DEVICE
    assert Tensor.cpu(torch.ones(1)).device == torch.device("cpu")
