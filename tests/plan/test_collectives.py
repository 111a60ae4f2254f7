"""Planned times of collectives, beside published measurements of nccl-tests, and beside the formulas of a ring."""

from __future__ import annotations

import pytest

from drivetrain.plan.collectives import LINK_EFFICIENCY, NETWORK_EFFICIENCY, seconds, sent_bytes
from drivetrain.plan.machines import cluster
from drivetrain.plan.step_costs import Collective, Messages

# S. Bekman, Machine Learning Engineering, Network: bytes of an all-reduce between eight A100 → its microseconds
EIGHT_A100 = {32_768: 43.83, 134_217_728: 1327.6, 1_073_741_824: 8203.9, 17_179_869_184: 127_997}
# there, between eight H200 with NCCL_NVLS_ENABLE=0, GB/s of the bus at 16 GiB
EIGHT_H200 = {"all_reduce": 367.2, "all_gather": 365.0}


def messages(size: float, kind: Collective = "all_reduce", ranks: int = 8, stride: int = 1, calls: int = 1) -> Messages:
    return Messages(kind, "dp", ranks, stride, calls, size)


@pytest.mark.parametrize("size", EIGHT_A100)
def test_an_all_reduce_takes_about_what_was_measured_between_eight_a100(size: int) -> None:
    assert seconds(messages(size), cluster("8xA100-80GB")) == pytest.approx(EIGHT_A100[size] / 1e6, rel=0.25)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_large_collectives_reach_the_rate_that_was_measured_between_eight_h200(kind: Collective) -> None:
    found = messages(2**34, kind)
    rate = sent_bytes(found) / seconds(found, cluster("8xH200-141GB")) / 1e9
    assert rate == pytest.approx(EIGHT_H200[kind], rel=0.05)


def test_32_h200_over_eight_adapters_each_reach_what_was_measured() -> None:
    found = messages(2**32, ranks=32)
    rate = sent_bytes(found) / seconds(found, cluster("4x8xH200-141GB")) / 1e9
    assert rate == pytest.approx(364.87, rel=0.10), "the same source, all-reduce of 4 GiB over EFA of 8 x 400 Gb/s"


def test_a_ring_sends_what_its_formula_says() -> None:
    assert sent_bytes(messages(8e9)) == pytest.approx(2 * 7 / 8 * 8e9)
    assert sent_bytes(messages(8e9, "all_gather")) == pytest.approx(7 / 8 * 8e9)
    assert sent_bytes(messages(8e9, "reduce_scatter")) == pytest.approx(7 / 8 * 8e9)
    assert sent_bytes(messages(8e9, "send", ranks=2)) == 8e9
    assert sent_bytes(messages(8e9, ranks=1)) == 0


def test_a_group_with_one_member_a_node_has_one_adapter() -> None:
    """Ranks 0, 8, 16, ...: each node's member sends through its own adapter of 50 GB/s."""
    found = messages(1e11, ranks=4, stride=8)
    rate = sent_bytes(found) / seconds(found, cluster("4x8xH100"))
    assert rate == pytest.approx(NETWORK_EFFICIENCY * 50e9, rel=0.01)


def test_devices_that_share_an_adapter_share_its_rate() -> None:
    found = messages(1e11, ranks=4, stride=8)
    rate = sent_bytes(found) / seconds(found, cluster("4x8xH100@ethernet-100"))
    assert rate == pytest.approx(NETWORK_EFFICIENCY * 12.5e9 / 8, rel=0.01)


def test_a_link_that_joins_two_cards_does_not_carry_four() -> None:
    machine = cluster("4xA6000")
    pair, four = messages(1e10, ranks=2), messages(1e10, ranks=4)
    assert sent_bytes(pair) / seconds(pair, machine) == pytest.approx(LINK_EFFICIENCY * 56.25e9, rel=0.01)
    assert sent_bytes(four) / seconds(four, machine) < 31.5e9, "PCIe 4"


def test_calls_take_their_start_each() -> None:
    machine = cluster("8xH100")
    once, often = messages(1e6), messages(1e6, calls=100)
    assert seconds(often, machine) - seconds(once, machine) == pytest.approx(99 * 40e-6)
    assert seconds(messages(1e9, ranks=1), machine) == 0
