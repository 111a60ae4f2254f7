"""The machine that a plan is for: this one, or one that is written as nodes x devices x kind, such as 8x8xH100-80GB."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from drivetrain.config.machine import Machine
from drivetrain.errors import Problem, UserError, problem, shown
from drivetrain.plan.catalogue import Catalogue, Device, Network, catalogue

FIELD = "--machine"
HERE = ("this machine", "this", "here")
FORM = "write DEVICES x KIND or NODES x DEVICES x KIND: 8xH100-80GB, 8x8xH100-80GB, 4xP40, 2x8xA100-80GB@ethernet-100"
MOST_NODES, MOST_DEVICES = 100_000, 1_024
CORES_A_DEVICE = 8  # assumed of a machine that is not here; a DGX H100 has 14, a g4dn instance 6 to 12


@dataclass(frozen=True)
class Cluster:
    """Nodes of one kind, with devices of one kind.

    A machine without GPUs is a cluster of one node and one device, whose memory and cores its ranks share.
    """

    nodes: int
    devices_per_node: int
    name: str  # of the kind, as in the catalogue
    device: Device | None  # None: a processor, or a device that is not in the catalogue
    network: Network | None  # None: there is one node
    host: Machine  # one node, as the rules see it
    is_here: bool = False

    def __str__(self) -> str:
        if self.is_here:
            return f"this machine ({self.host.device_count} x {self.name})"
        nodes = f"{self.nodes} x " if self.nodes > 1 else ""
        network = f", {self.network.title} between nodes" if self.network else ""
        return f"{nodes}{self.devices_per_node} x {self.name}{network}"

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def host_memory(self) -> int | None:
        """The bytes of a node's own memory, beside its GPUs'; None where neither the machine nor the catalogue says."""
        if self.is_here:
            from drivetrain.runtime.hardware import detect

            return detect("cpu").memory_bytes
        known = None if self.device is None else self.device.host_memory_mib
        return None if known is None else known * 2**20

    def over(self, nodes: int) -> Cluster:
        """Returns so many nodes of this kind. Several of a device of the catalogue have the network of this cluster, or
        the one that nodes with such devices usually have."""
        network = self.network if nodes > 1 else None
        if nodes > 1 and network is None and self.device is not None:
            network = catalogue().network(self.device.network)
        return replace(self, nodes=nodes, network=network)

    def memory_bytes(self, ranks: int) -> int:
        """Returns the memory that one of `ranks` ranks has, of this cluster: a device's, or its share of a host's."""
        if self.host.device != "cpu":
            return self.host.memory_bytes
        return self.host.memory_bytes // max(1, -(-ranks // self.nodes))


def cluster(text: str, known: Catalogue | None = None) -> Cluster:
    """Returns the machine that a text describes; "this machine" is the one here. Raises UserError with every
    problem."""
    known = known or catalogue()
    if " ".join(text.lower().split()) in HERE:
        return this_machine(known)
    counts, kind, between = _parts(text)
    nodes, devices = counts if len(counts) == 2 else (1, counts[0])
    problems = [*_too_many(nodes, devices)]
    try:
        name, device = known.device(kind)
    except UserError as error:
        raise UserError([*problems, *error.problems, *_network_problems(known, between)]) from None
    problems += [*_network_problems(known, between)]
    if between is not None and nodes == 1:
        problems.append(Problem(FIELD, f"@{between} names a network, and there is one node", "leave it out"))
    if problems:
        raise UserError(problems)
    network = known.network(between or device.network) if nodes > 1 else None
    return Cluster(nodes, devices, name, device, network, _host(name, device, devices))


def this_machine(known: Catalogue) -> Cluster:
    """Returns the machine here: its GPUs, or its processor."""
    from drivetrain.runtime.hardware import detect

    host = detect()
    found = known.named_by_driver(host.device_name) if host.device == "cuda" else None
    name, device = found or (host.device_name, None)
    return Cluster(1, host.device_count, name, device, None, host, is_here=True)


def too_many_nodes(wanted: int, there: int) -> list[Problem]:
    """Returns the problem of a run on more nodes than the machine of a plan has."""
    if wanted <= there:
        return []
    fix = f"name a machine with as many, as in --machine {wanted}x8xH100-80GB, or give fewer nodes"
    return [Problem("nodes", f"{wanted} were given, but the machine has {there} node{'s' * (there > 1)}", fix)]


def beyond_link(machine: Cluster) -> str | None:
    """Returns a note on nodes of more devices than their link joins, which is seldom what is meant; else None."""
    link = None if machine.device is None else machine.device.link
    if link is None or machine.devices_per_node <= link.reaches:
        return None
    each = machine.devices_per_node
    note = f"{link.kind} joins {link.reaches} of {machine.name}: among the {each} of a node messages take PCIe"
    if each % link.reaches or link.reaches == 2:
        return note
    nodes = machine.nodes * each // link.reaches
    return f"{note}; {nodes}x{link.reaches}x{machine.name} is as many in nodes of {link.reaches}"


def too_many_devices(wanted: int, there: Cluster) -> list[Problem]:
    """Returns the problem of a run that takes more devices of a node than it has; ranks of a processor share it."""
    if wanted <= there.devices_per_node or there.host.device == "cpu":
        return []
    has = f"{there.devices_per_node} device{'s' * (there.devices_per_node > 1)}"
    fix = "name a machine with as many, or give fewer processes"
    return [Problem("processes", f"{wanted} were given, but a node of the machine has {has}", fix)]


def _parts(text: str) -> tuple[list[int], str, str | None]:
    """Returns the counts, the kind and the network (None if the text names none)."""
    written, at, between = text.strip().partition("@")
    found = re.fullmatch(r"\s*(\d+)\s*[xX×*]\s*(?:(\d+)\s*[xX×*]\s*)?(\S.*?)\s*", written)
    if found is None or (at and not between.strip()):
        bare = re.fullmatch(r"[A-Za-z][\w .+-]*", written.strip())
        turned = re.fullmatch(r"([A-Za-z][\w .+-]*?)\s*[xX×*]\s*(\d+)", written.strip())
        first = f"{turned[2]}x{turned[1]}" if turned else f"1x{written.strip()} for one"
        fix = f"write {first}. Else {FORM}" if bare and not at else FORM
        raise problem(FIELD, f"{shown(text)} is no machine", fix)
    counts = [count for count in found.groups()[:2] if count is not None]
    if any(len(count) > 9 for count in counts):
        raise problem(FIELD, f"{shown(text)} has more devices than a plan takes", FORM)
    return [int(count) for count in counts], found.group(3), between.strip() if at else None


def _too_many(nodes: int, devices: int) -> list[Problem]:
    bounds = ((nodes, MOST_NODES, "nodes"), (devices, MOST_DEVICES, "devices in a node"))
    return [
        Problem(FIELD, f"{count:,} {noun} were given", f"give 1 to {most:,}")
        for count, most, noun in bounds
        if not 1 <= count <= most
    ]


def _network_problems(known: Catalogue, name: str | None) -> list[Problem]:
    try:
        if name is not None:
            known.network(name)
    except UserError as error:
        return list(error.problems)
    return []


def _host(name: str, device: Device, count: int) -> Machine:
    return Machine(
        device="cuda",
        device_name=name,
        device_count=count,
        memory_bytes=device.memory_bytes,
        cpu_cores=CORES_A_DEVICE * count,
        compute_capability=device.compute_capability,
        native_dtypes=device.native_dtypes,
    )
