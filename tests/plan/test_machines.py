"""Machines as texts: nodes x devices x kind, and what cannot be one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.errors import Problem, UserError
from drivetrain.plan.catalogue import catalogue
from drivetrain.plan.machines import MOST_DEVICES, MOST_NODES, beyond_link, cluster
from drivetrain.runtime.hardware import detect
from tests.properties import examples

KNOWN = catalogue()
SPELLINGS = [name for name, device in KNOWN.devices.items() for name in (name, *device.aliases)]


def refused(text: str) -> str:
    with pytest.raises(UserError) as error:
        cluster(text)
    return str(error.value)


@settings(max_examples=examples(200))
@given(
    nodes=st.integers(1, MOST_NODES),
    devices=st.integers(1, MOST_DEVICES),
    kind=st.sampled_from(SPELLINGS),
    network=st.none() | st.sampled_from(sorted(KNOWN.networks)),
    times=st.sampled_from(["x", "X", " x ", "×", "*"]),
)
def test_a_machine_is_what_its_text_says(nodes: int, devices: int, kind: str, network: str | None, times: str) -> None:
    between = f"@{network}" if network and nodes > 1 else ""
    found = cluster(f"{nodes}{times}{devices}{times}{kind.lower()}{between}")
    device = KNOWN.device(kind)[1]
    assert (found.nodes, found.devices_per_node, found.devices) == (nodes, devices, nodes * devices)
    assert found.device == device
    assert found.network == (None if nodes == 1 else KNOWN.networks[network or device.network])
    assert (found.host.device_count, found.host.memory_bytes) == (devices, device.memory_mib * 2**20)
    assert cluster(f"{devices}x{kind}").nodes == 1


@settings(max_examples=examples(300))
@given(
    text=st.text(max_size=30)
    | st.from_regex(r"\d{0,12}[xX@]?\d{0,12}[xX@ ]?[A-Z]?\d{0,4}(@[a-z-]{0,6})?", fullmatch=True)
)
def test_any_text_is_a_machine_or_a_users_error(text: str) -> None:
    problems: tuple[Problem, ...] = ()
    try:
        assert cluster(text).devices >= 1
    except UserError as error:
        problems = error.problems
    assert all(each.field == "--machine" and each.fix for each in problems)


def test_this_machine_is_the_one_here() -> None:
    found = cluster("this machine")
    assert found.is_here
    assert found.host == detect()
    assert found.memory_bytes(ranks=2) * 2 == pytest.approx(found.host.memory_bytes), "a host's ranks share its memory"


def test_devices_of_another_machine_each_have_their_memory() -> None:
    found = cluster("2x8xA100-40GB")
    assert found.memory_bytes(ranks=16) == 40960 * 2**20
    assert found.host.native_dtypes == {"float32", "float16", "bfloat16"}
    assert cluster("8xV100").host.native_dtypes == {"float32", "float16"}


def test_what_is_wrong_with_a_machine_is_named_all_at_once() -> None:
    found = refused("0x9999xH10@nrd")
    assert "0 nodes" in found
    assert "9,999 devices in a node" in found
    assert "did you mean H100-80GB" in found
    assert "did you mean ndr?" in found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("H100", "write 1xH100 for one"),
        ("H100x8", "write 8xH100. Else"),
        ("8x", "write DEVICES x KIND"),
        ("", "write DEVICES x KIND"),
        ("8xT5", "did you mean T4?"),
        ("8xH100@ndr", "there is one node"),
        ("2x8xH100@", "write DEVICES x KIND"),
    ],
)
def test_a_text_that_is_no_machine_is_refused_with_the_way_to_write_one(text: str, words: str) -> None:
    assert words in refused(text)


def test_several_nodes_of_a_kind_have_the_network_that_such_nodes_usually_have() -> None:
    two = cluster("8xH100-80GB").over(2)
    assert (two.devices, two.network) == (16, KNOWN.networks[KNOWN.device("H100-80GB")[1].network])
    assert two.over(1).network is None
    ethernet = cluster("2x8xA100-80GB@ethernet-100")
    assert ethernet.over(4).network == ethernet.network


@pytest.mark.parametrize(
    ("text", "offered"),
    [("16xH100-80GB", "; 2x8xH100-80GB"), ("2x16xH100-80GB", "; 4x8xH100-80GB"), ("12xH100-80GB", "PCIe")],
)
def test_a_node_of_more_devices_than_its_link_joins_is_noted(text: str, offered: str) -> None:
    note = beyond_link(cluster(text))
    assert note is not None
    assert "NVLink 4 joins 8 of H100-80GB" in note
    assert offered in note


@pytest.mark.parametrize("text", ["8xH100-80GB", "2x8xH100-80GB", "16xA100-80GB", "16xP40"])
def test_others_are_not(text: str) -> None:
    assert beyond_link(cluster(text)) is None
