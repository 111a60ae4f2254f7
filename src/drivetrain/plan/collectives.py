"""The time of collectives between the devices of a machine, by kind, group and links.

A ring sends 2 (n - 1) / n of the tensor for an all-reduce, (n - 1) / n for a gather or a scatter (Thakur et al. 2005,
Optimization of Collective Communication Operations in MPICH). A ring over several nodes leaves each node through the
adapters of its members, all at once, so that it is as quick as the slower of the link and these adapters together.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from drivetrain.plan.catalogue import PCIE_GB_PER_SECOND
from drivetrain.plan.machines import Cluster
from drivetrain.plan.step_costs import Collective, Messages

# shares of a link's rate that large collectives reach: all-gather over NVLink 4 of eight H200 80 to 82 %, all-reduce
# over NVLink 3 of eight A100 78 %; all-reduce of 32 H200 over eight adapters of 400 Gb/s 91 %
# (S. Bekman, Machine Learning Engineering, Network: github.com/stas00/ml-engineering/tree/master/network)
LINK_EFFICIENCY = 0.80
NETWORK_EFFICIENCY = 0.90
PCIE_EFFICIENCY = 0.80
# there, all-reduce of 32 KiB: 40 us between eight H200, 44 us between eight A100
START_SECONDS = 40e-6
HOP_SECONDS = 5e-6  # assumed for each doubling of the nodes

# what each of n ranks sends for each byte of the whole tensor
SENT: dict[Collective, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda _: 1.0,
    "send": lambda _: 1.0,
}


def sent_bytes(messages: Messages) -> float:
    """Returns the bytes that a rank sends in all these calls."""
    return messages.bytes * SENT[messages.collective](messages.ranks) if messages.ranks > 1 else 0.0


def seconds(messages: Messages, cluster: Cluster) -> float:
    """Returns the seconds of all these calls between GPUs of a cluster, one after another."""
    if messages.ranks <= 1:
        return 0.0
    rate, nodes = _bytes_a_second(messages, cluster), _nodes(messages, cluster)
    start = START_SECONDS + (HOP_SECONDS * math.log2(nodes) if nodes > 1 else 0.0)
    return messages.calls * start + sent_bytes(messages) / rate


def leaves_node(messages: Messages, cluster: Cluster) -> bool:
    """Returns whether the ranks of these calls lie on several nodes."""
    return messages.ranks > 1 and _nodes(messages, cluster) > 1


def _members_a_node(messages: Messages, cluster: Cluster) -> int:
    return max(1, min(messages.ranks, cluster.devices_per_node // messages.stride))


def _nodes(messages: Messages, cluster: Cluster) -> int:
    return -(-messages.ranks // _members_a_node(messages, cluster))


def _bytes_a_second(messages: Messages, cluster: Cluster) -> float:
    """Returns the rate at which each rank of the ring sends to the next one, in bytes a second."""
    members = _members_a_node(messages, cluster)
    rates = []
    if members > 1:
        rates.append(_within_node(cluster, messages.stride * members))
    if _nodes(messages, cluster) > 1:
        assert cluster.network is not None, "ranks do not exceed the devices"
        shared = cluster.devices_per_node if cluster.network.adapters == "node" else 1
        per_device = 1e9 * cluster.network.gb_per_second / shared
        rates.append(NETWORK_EFFICIENCY * members * per_device)
    return min(rates)


def _within_node(cluster: Cluster, extent: int) -> float:
    """Returns the rate between devices of a node. extent: how many neighbours a group lies across; beyond the devices
    that a link reaches, tensors pass over PCIe."""
    device = cluster.device
    assert device is not None, "a machine that is here is measured"
    if device.link is not None and extent <= device.link.reaches:
        return LINK_EFFICIENCY * 1e9 * device.link.gb_per_second
    return PCIE_EFFICIENCY * 1e9 * PCIE_GB_PER_SECOND[device.pcie]
