"""The speed of a machine's devices: from its calibration where there is one, else from the catalogue.

A call takes the longer of computing and moving bytes (the roofline model: Williams, Waterman and Patterson 2009), and
no less than it takes to start.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from drivetrain.errors import problem
from drivetrain.plan import collectives
from drivetrain.plan.calibration import Calibration, Curve, kept, seconds_of
from drivetrain.plan.catalogue import Device
from drivetrain.plan.machines import Cluster
from drivetrain.plan.step_costs import Messages, Operations

# --- shares of a device's rates that kernels reach, where the catalogue has no measured one ---
BEST_MATMUL = 0.80  # median of the measured ones in devices.yaml
# products of a model against the best product of a device: fitted to MPT 7b on A100 in bench/results/published.md
USUAL_MATMUL = 0.88
# FlashAttention-2 forward and backward: 50 to 73 % of an A100 (Dao 2023, figures 4 to 6), 35 % of an H100 (Shah et al.
# 2024, FlashAttention-3, section 1)
ATTENTION, ATTENTION_HOPPER = 0.60, 0.35
# an implicit matrix product reads an input once for each place of the filter, of which caches save most: fitted to
# ResNet-50 on an A100 in bench/results/published.md
CONVOLUTION_READS = 3.4
MEMORY = 0.85  # element-wise kernels against the data sheet's bandwidth
# GB/s of 16 lanes of each generation of PCI Express, one way, and the share of it that copies from pinned memory reach
# (about 12 of 15.75 in generation 3; of newer ones not measured here)
PCIE = {3: 15.75, 4: 31.5, 5: 63.0, 6: 121.0}
PCIE_SHARE = 0.8
# bytes of tensors that the processors of a node work on in a second, each tensor counted once a call, as traces count
# them: DeepSpeed's Adam updates 10 billion parameters, each of 16 bytes with its gradient and moments, in 2.57 s on two
# Xeon Platinum 8168 (Ren et al. 2021, ZeRO-Offload, table 4). PyTorch's own Adam and other processors may differ
PROCESSOR_BYTES = 10e9 * 16 / 2.57
KERNEL_SECONDS = 4e-6  # of the smallest kernel on a GPU
# the program needs from one operator of a model to the next, PyTorch without compiling: a Llama of 0.5B on an H200 took
# 117 ms for a step of 4,115 of them, and 143 ms for 5,363 (bench/results/planned-gpu.md); other hosts differ
LAUNCH_SECONDS = 27e-6
# bytes of element-wise operations that are left after compiling: fitted to the second row of bench/results/published.md
FUSED = 0.5
# ranks on one CPU, against the same operations in two processes without any order: they wait for one another, and share
# the cores with gloo's threads. Fitted to bench/results/planned.md
BESIDE_EACH_OTHER = 1.12
HOPPER = (9, 0)


@dataclass(frozen=True)
class CallTime:
    """Seconds of some calls, by what they wait for."""

    compute: float
    memory: float
    start: float  # of the program, between kernels; a GPU works meanwhile

    def __add__(self, other: CallTime) -> CallTime:
        return CallTime(self.compute + other.compute, self.memory + other.memory, self.start + other.start)


class Speeds(ABC):
    """The answers of a machine to a plan: the time of operations, and of messages."""

    sends_beside_computing: bool  # the device computes while it sends
    starts_ahead: bool  # the program starts kernels while the device works
    call_seconds: float  # from one operation's start to the next one's

    @abstractmethod
    def operation(self, operations: Operations) -> CallTime: ...

    @abstractmethod
    def to_host(self, copies: Operations) -> float:
        """Returns the seconds of copies between a GPU and its host, one after another."""

    @abstractmethod
    def processor(self, operations: Operations) -> float:
        """Returns the seconds of operations of a GPU's host on tensors in its memory; ranks of a node share it."""

    @abstractmethod
    def messages(self, messages: Messages) -> float:
        """Returns the seconds of all the calls, one after another."""

    @abstractmethod
    def peak_flops(self, dtype: str) -> float:
        """Returns the FLOP/s against which a model's FLOP/s are put (MFU)."""


def speeds_of(cluster: Cluster, ranks: int) -> Speeds:
    """Returns the speeds of each of `ranks` ranks. Raises UserError for a machine whose speed is not known."""
    found = kept(cluster.host) if cluster.is_here else None
    if found is not None and cluster.nodes == 1:
        return MeasuredSpeeds(found, ranks, device=cluster.device)
    if found is not None and cluster.network is not None:
        return MeasuredSpeeds(found, ranks, cluster, cluster.device)
    if found is not None and cluster.device is None:
        why = f"the network between several of {cluster.name} is not known"
        raise problem("--machine", why, "name a machine of the catalogue, or the engine itself")
    if cluster.device is None:
        why = f"the speed of {cluster.name} is not known"
        raise problem("--machine", why, "run drivetrain calibrate here once, or name a machine of the catalogue")
    return PublishedSpeeds(cluster, cluster.device, ranks)


class PublishedSpeeds(Speeds):
    """GPUs by their makers' figures, and the shares of them that were published."""

    sends_beside_computing = True
    starts_ahead = True
    call_seconds = LAUNCH_SECONDS

    def __init__(self, cluster: Cluster, device: Device, ranks: int) -> None:
        self._cluster, self._device, self._ranks = cluster, device, ranks

    def operation(self, operations: Operations) -> CallTime:
        reads = CONVOLUTION_READS if operations.kind == "convolution" else 1.0
        moved = reads * operations.bytes / (MEMORY * 1e9 * self._device.memory_gb_per_second)
        computed = operations.flops / self._rate(operations) if operations.flops else 0.0
        least = operations.calls * KERNEL_SECONDS
        start = operations.calls * self.call_seconds
        if computed > moved:
            return CallTime(max(computed, least), 0.0, start)
        return CallTime(0.0, max(moved, least), start)

    def to_host(self, copies: Operations) -> float:
        return _over_pcie(copies, self._device)

    def processor(self, operations: Operations) -> float:
        return _shared_processor(operations, min(self._ranks, self._cluster.devices_per_node))

    def messages(self, messages: Messages) -> float:
        return collectives.seconds(messages, self._cluster)

    def peak_flops(self, dtype: str) -> float:
        return self._device.peak_flops(dtype)

    def _rate(self, operations: Operations) -> float:
        return self._share(operations.kind, operations.dtype) * self._device.peak_flops(operations.dtype)

    def _share(self, kind: str, dtype: str) -> float:
        if kind == "attention":
            return ATTENTION_HOPPER if (self._device.compute_capability or HOPPER) >= HOPPER else ATTENTION
        measured = {str(name): share for name, share in self._device.matmul_efficiency.items()}
        return USUAL_MATMUL * measured.get(dtype, measured.get("bfloat16", BEST_MATMUL))


class MeasuredSpeeds(Speeds):
    """This machine, as `drivetrain calibrate` measured it; between several of them, the published speed of the
    network."""

    def __init__(
        self, calibration: Calibration, ranks: int, cluster: Cluster | None = None, device: Device | None = None
    ) -> None:
        """cluster: several machines like this one; None: there is one. device: its kind, where the catalogue has it."""
        self._calibration, self._ranks, self._cluster, self._device = calibration, ranks, cluster, device
        self._speeds = calibration.of(ranks)
        is_gpu = calibration.device == "cuda"
        self.sends_beside_computing = self.starts_ahead = is_gpu
        # two at once were measured; more share the cores that two have
        shared = BESIDE_EACH_OTHER * max(1.0, ranks / max(2, calibration.cores))
        self._slower = 1.0 if is_gpu or ranks == 1 else shared
        self.call_seconds = self._speeds.call_seconds * self._slower

    def operation(self, operations: Operations) -> CallTime:
        calls, found = operations.calls, self._speeds
        curves = {"memory": found.memory, "optimizer": found.optimizer, "random": found.random}
        start = calls * self.call_seconds
        moved = seconds_of(curves.get(operations.kind, found.memory), operations.bytes / calls)
        if operations.kind in curves:
            return CallTime(0.0, calls * moved * self._slower, start)
        computed = seconds_of(self._products(operations), operations.flops / calls)
        if computed > moved:
            return CallTime(calls * computed * self._slower, 0.0, start)
        return CallTime(0.0, calls * moved * self._slower, start)

    def to_host(self, copies: Operations) -> float:
        return _over_pcie(copies, self._device)

    def processor(self, operations: Operations) -> float:
        return _shared_processor(operations, min(self._ranks, self._calibration.device_count))

    def messages(self, messages: Messages) -> float:
        if self._cluster is not None and collectives.leaves_node(messages, self._cluster):
            return collectives.seconds(messages, self._cluster)
        curve = self._calibration.collectives.get(messages.collective)
        if curve is None or messages.ranks <= 1 or not messages.calls:
            return 0.0
        sent = collectives.SENT[messages.collective]
        more = sent(messages.ranks) / sent(2)
        return messages.calls * seconds_of(curve, messages.bytes / messages.calls) * more * self._slower

    def peak_flops(self, dtype: str) -> float:
        curve = self._of_dtype(self._speeds.matmul, dtype)
        return max(size / took for size, took in curve)

    def _products(self, operations: Operations) -> Curve:
        found = self._speeds
        by_kind = {"matmul": found.matmul, "attention": found.attention, "convolution": found.convolution}
        return self._of_dtype(by_kind[operations.kind], operations.dtype)

    def _of_dtype(self, curves: dict[str, Curve], dtype: str) -> Curve:
        """Returns the curve of a type, or float32's for one that the device emulates by it. Products in 8 bits are not
        measured: they are taken for as quick as bfloat16's, which is too slow."""
        if dtype == "float8" and dtype not in curves:
            dtype = "bfloat16"
        return curves.get(dtype) or curves["float32"]


def _over_pcie(copies: Operations, device: Device | None) -> float:
    """Returns the seconds of copies over the lanes to the host; of a device that is not known, over the slowest."""
    return copies.bytes / (PCIE_SHARE * 1e9 * PCIE[3 if device is None else device.pcie])


def _shared_processor(operations: Operations, ranks: int) -> float:
    """Returns the seconds that each of so many ranks of a node waits, which update at the same time."""
    return operations.bytes * ranks / PROCESSOR_BYTES
