"""The time of a step: the roofline, what hides what, the pipeline's bubble, and a machine that was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drivetrain.errors import UserError
from drivetrain.plan.calibration import Calibration, Curve, DeviceSpeeds
from drivetrain.plan.machines import Cluster, cluster
from drivetrain.plan.speeds import (
    BESIDE_EACH_OTHER,
    CONVOLUTION_READS,
    LAUNCH_SECONDS,
    MEMORY,
    PCIE,
    PCIE_SHARE,
    PROCESSOR_BYTES,
    USUAL_MATMUL,
    MeasuredSpeeds,
    PublishedSpeeds,
    speeds_of,
)
from drivetrain.plan.step_costs import Messages, Operations
from drivetrain.plan.step_time import BESIDE, SLOWED, Circumstances, StepTime, step_time
from tests.plan.costs import costs

H100 = cluster("8xH100")
MATMUL = Operations("matmul", "bfloat16", 10, 1e15, 1e9)
BYTES = Operations("memory", "bfloat16", 10, 0.0, 1e12)


def planned(*parts: Operations | Messages, machine: Cluster = H100, given: Circumstances | None = None) -> StepTime:
    return step_time(costs(*parts), speeds_of(machine, machine.devices), given)


def test_a_product_takes_its_flops_at_the_measured_share_of_the_peak() -> None:
    found = planned(MATMUL)
    assert found.seconds == pytest.approx(1e15 / (USUAL_MATMUL * 0.803 * 989e12))
    assert found.bound_by == "compute"
    assert found.mfu is None or found.mfu > 1, "in fp32, which MFU was not told about, the peak is lower"


def test_mfu_is_the_models_own_flops_over_the_peak() -> None:
    plain = planned(MATMUL, given=Circumstances(dtype="bfloat16"))
    assert plain.mfu == pytest.approx(USUAL_MATMUL * 0.803)
    again = planned(MATMUL, given=Circumstances(dtype="bfloat16", recomputes=True))
    assert again.mfu == pytest.approx(0.75 * USUAL_MATMUL * 0.803), "what is computed again is no use of the model"


def test_what_moves_bytes_takes_the_bandwidth() -> None:
    found = planned(BYTES)
    assert found.seconds == pytest.approx(1e12 / (MEMORY * 3.35e12))
    assert found.bound_by == "memory"
    compiled = planned(BYTES, given=Circumstances(fused=0.5))
    assert compiled.seconds == pytest.approx(found.seconds / 2)


def test_a_device_waits_for_an_update_by_its_host_and_for_the_copies_of_it() -> None:
    """The eight ranks of a node share its processors; each has lanes of its own, which gradients cross meanwhile."""
    update = Operations("processor", "float32", 2, 0.0, PROCESSOR_BYTES / 8)
    back = Operations("update_copy", "bfloat16", 1, 0.0, PCIE_SHARE * PCIE[5] * 1e9)
    gradients = Operations("host", "float32", 1, 0.0, 0.01 * back.bytes)
    found = planned(MATMUL, update, back, gradients)
    assert found.host == pytest.approx(1.0 + 1.0)
    assert found.seconds == pytest.approx(planned(MATMUL).seconds + 2.0)
    assert (found.bound_by, found.compute) == ("host", planned(MATMUL).compute)
    assert planned(MATMUL, gradients).host == 0.0


def test_ten_billion_parameters_take_the_published_time_of_an_update() -> None:
    """ZeRO-Offload, table 4. One rank has a node's processors; its tensors are parameters, gradients and moments."""
    one = step_time(costs(Operations("processor", "float32", 1, 0.0, 16 * 10e9)), speeds_of(cluster("1xV100"), 1))
    assert one.host == pytest.approx(2.57)


def test_a_product_of_little_work_for_its_bytes_is_bound_by_memory() -> None:
    assert planned(Operations("matmul", "bfloat16", 10, 1e10, 1e12)).bound_by == "memory"


def test_a_convolution_reads_its_bytes_several_times() -> None:
    found = planned(Operations("convolution", "bfloat16", 10, 1e12, 1e12))
    assert found.memory == pytest.approx(CONVOLUTION_READS * 1e12 / (MEMORY * 3.35e12))


def test_a_type_that_a_device_has_no_rate_for_takes_float32s() -> None:
    found = planned(Operations("matmul", "float16", 10, 1e15, 1e9), machine=cluster("1xP40"))
    assert found.seconds == pytest.approx(1e15 / (USUAL_MATMUL * 0.8 * 12e12))


def test_masked_pairs_of_positions_are_half_of_attention() -> None:
    attention = Operations("attention", "bfloat16", 10, 1e15, 1e9)
    assert planned(attention, given=Circumstances(causal=True)).seconds == pytest.approx(planned(attention).seconds / 2)


def test_products_in_tf32_take_its_rate() -> None:
    in_fp32 = replace(MATMUL, dtype="float32")
    quick = planned(in_fp32, given=Circumstances(products={"float32": "tfloat32"}))
    assert quick.seconds == pytest.approx(planned(in_fp32).seconds * 67 / 494.5)


def test_many_small_operations_wait_for_the_program() -> None:
    found = planned(Operations("memory", "bfloat16", 100_000, 0.0, 1e3))
    assert found.seconds == pytest.approx(100_000 * LAUNCH_SECONDS)
    assert found.bound_by == "start"


def test_the_engines_own_program_takes_its_time_at_each_message() -> None:
    sent = Messages("all_gather", "shard", 8, 1, 100, 1e3)
    moved = Operations("memory", "bfloat16", 1000, 0.0, 1e3)
    found = planned(moved, sent, given=Circumstances(program=20.0))
    assert found.start == pytest.approx((1000 + 20 * 100) * LAUNCH_SECONDS, rel=0.06)
    hidden = planned(MATMUL, sent, given=Circumstances(program=20.0))
    assert hidden.seconds == planned(MATMUL, sent).seconds, "a GPU computes meanwhile"


@pytest.mark.parametrize("axis", ["shard", "dp"])
def test_messages_hide_behind_computing_and_slow_it(axis: str) -> None:
    sent = Messages("all_gather", axis, 8, 1, 100, 1e11)
    alone, both = planned(MATMUL), planned(MATMUL, sent)
    assert both.network < BESIDE[axis] * alone.seconds, "all of it can be hidden"
    assert both.seconds == pytest.approx(alone.seconds + SLOWED * both.network)


def test_more_messages_than_computing_hides_are_waited_for() -> None:
    sent = Messages("all_reduce", "dp", 8, 1, 10, 1e13)
    alone, both = planned(MATMUL), planned(MATMUL, sent)
    hidden = BESIDE["dp"] * alone.seconds
    assert both.seconds == pytest.approx(alone.seconds + both.network - hidden + SLOWED * hidden)
    assert both.bound_by == "network"


def test_tensor_parallel_messages_are_waited_for() -> None:
    sent = Messages("all_reduce", "tp", 8, 1, 100, 1e11)
    assert planned(MATMUL, sent).seconds == pytest.approx(planned(MATMUL).seconds + planned(sent).network)
    assert planned(MATMUL, sent).sent_by_axis == {"tp": pytest.approx(2 * 7 / 8 * 1e11)}


def test_an_engine_that_does_not_overlap_waits_for_all_messages() -> None:
    sent = Messages("all_reduce", "dp", 8, 1, 100, 1e11)
    found = planned(MATMUL, sent, given=Circumstances(overlaps=False))
    assert found.seconds == pytest.approx(planned(MATMUL).seconds + found.network)


def test_a_pipelines_stages_idle_while_it_fills_and_drains() -> None:
    """Narayanan et al. 2021 (Megatron-LM), section 2.2: the bubble is (p - 1) / m of the ideal time."""
    found = planned(MATMUL, given=Circumstances(stages=4, micro_batches=8))
    assert found.bubble == pytest.approx(3 / 8 * planned(MATMUL).seconds)
    assert planned(MATMUL, given=Circumstances(stages=4, micro_batches=1)).bound_by == "bubble"


def test_data_bound_a_step_only_where_loading_takes_longer() -> None:
    alone = planned(MATMUL).seconds
    assert planned(MATMUL, given=Circumstances(data_seconds=alone / 2)).seconds == alone
    slow = planned(MATMUL, given=Circumstances(data_seconds=3 * alone))
    assert slow.seconds == pytest.approx(3 * alone)
    assert slow.bound_by == "data"


# --- a machine that was measured ---


def speeds(scale: float) -> DeviceSpeeds:
    products: dict[str, Curve] = {"float32": ((1e6, scale * 1e-5), (1e9, scale * 1e-2))}  # 100 GFLOP/s
    moved: Curve = ((1e3, scale * 1e-7), (1e8, scale * 1e-2))  # 10 GB/s
    return DeviceSpeeds(
        matmul=products, attention=products, convolution=products, memory=moved, optimizer=moved, random=moved,
        call_seconds=1e-6,
    )  # fmt: skip


def measured(ranks: int, cores: int = 2) -> MeasuredSpeeds:
    found = Calibration(
        device="cpu", device_name="one", device_count=1, cores=cores, torch="2.13", made_at="", took_seconds=1.0,
        alone=speeds(1.0), together=speeds(1.5), collectives={"all_reduce": ((1e5, 1e-4), (1e9, 1.0))},
        picture_seconds=0.01, disk_write_bytes=1e9,
    )  # fmt: skip
    return MeasuredSpeeds(found, ranks)


def test_a_measured_machine_takes_what_it_took_and_the_start_of_each_call() -> None:
    product = Operations("matmul", "float32", 4, 4e8, 4.0)
    moved = Operations("memory", "float32", 5, 0.0, 5e7)
    found = step_time(costs(product, moved), measured(1))
    assert found.compute == pytest.approx(4 * 1e-3, rel=0.01)
    assert found.memory == pytest.approx(5 * 1e-3, rel=0.01)
    assert found.start == pytest.approx(9e-6), "a processor does nothing else while it starts an operation"
    assert found.seconds == pytest.approx(found.compute + found.memory + found.start)


def test_processes_that_share_the_cores_are_as_slow_as_two_were_and_wait_for_one_another() -> None:
    product = Operations("matmul", "float32", 4, 4e8, 4.0)
    one, two, four = (step_time(costs(product), measured(ranks)).compute for ranks in (1, 2, 4))
    assert two == pytest.approx(1.5 * BESIDE_EACH_OTHER * one)
    assert four == pytest.approx(2 * two), "four on two cores"


def test_messages_of_a_processor_are_not_hidden() -> None:
    product = Operations("matmul", "float32", 1, 1e9, 4.0)
    sent = Messages("all_reduce", "dp", 2, 1, 10, 1e9)
    found = step_time(costs(product, sent), measured(2))
    assert found.waited == found.network == pytest.approx(10 * 0.1, rel=0.2)


def test_a_machine_of_unknown_speed_is_refused_with_the_command_to_measure_it() -> None:
    unknown = replace(cluster("this machine"), device=None, is_here=False, name="a new processor")
    with pytest.raises(UserError, match="drivetrain calibrate"):
        speeds_of(unknown, 1)


def test_a_machine_that_is_not_here_has_published_speeds() -> None:
    assert isinstance(speeds_of(H100, 8), PublishedSpeeds)
