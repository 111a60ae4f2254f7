"""A rank's position on the mesh (pp, dp, cp, tp), and the ranks it works with."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from drivetrain.config.engines.mesh import MeshEngine
from drivetrain.distributed.communicator import Communicator
from drivetrain.distributed.real_numbers import real_numbers
from drivetrain.errors import RunError


@functools.cache
def _axes(world: dist.ProcessGroup, device_type: str, degrees: tuple[tuple[str, int], ...]) -> dict[str, DeviceMesh]:
    """Makes the axes once for a world: each is a process group, which keeps threads busy. Axes of one rank have none.

    "data" is what parameters are sharded or replicated over: dp and cp together.
    """
    names, sizes = zip(*degrees, strict=True)
    # attention's exchanges need a group of their own: gradients of the same ranks are summed when they arrive, which a
    # parameter that one rank leaves out may shift
    own: dict[int | str, Any] | None = {"cp": _backend(world, device_type)} if "cp" in names else None
    with real_numbers():
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names, backend_override=own)
        axes = {name: mesh[name] for name in names}
        if "cp" in axes:
            axes["data"] = mesh[tuple(name for name in names if name in ("dp", "cp"))]._flatten("data")
        elif "dp" in axes:
            axes["data"] = axes["dp"]
    return axes


def _backend(world: dist.ProcessGroup, device_type: str) -> str:
    """Returns the backend of a group of its own; a plan's ranks are not there, and exchange by none that is real."""
    return "fake" if dist.get_backend(world) == "fake" else "nccl" if device_type == "cuda" else "gloo"


class MeshPosition:
    """Tensor ranks are neighbours, stages stand furthest apart: the more ranks exchange, the nearer they are.

    An axis (pp, dp, cp, tp; data: dp and cp together) is a mesh of one dimension, or None where it has one rank.
    """

    def __init__(self, config: MeshEngine, ranks: Communicator, device_type: str) -> None:
        self._cuts_sequences = config.sequence_parallel
        self.pp, self.cp, self.tp, self.dp = config.pp, config.cp, config.tp, config.data_degree(ranks.world)
        self.degrees = {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}
        if self.pp * self.dp * self.cp * self.tp != ranks.world:
            shape = " x ".join(map(str, self.degrees.values()))
            raise RunError(f"a mesh of {shape} ranks was asked for, but there are {ranks.world}")
        wide = tuple((name, degree) for name, degree in self.degrees.items() if degree > 1)
        self._axes = _axes(dist.group.WORLD, device_type, wide) if wide else {}
        self.at = {name: self._axes[name].get_local_rank() if name in self._axes else 0 for name in self.degrees}

    def axis(self, name: str) -> DeviceMesh | None:
        return self._axes.get(name)

    def required(self, name: str) -> DeviceMesh:
        axis = self.axis(name)
        assert axis is not None, f"{name} has one rank"
        return axis

    def group(self, name: str) -> dist.ProcessGroup | None:
        axis = self.axis(name)
        return None if axis is None else axis.get_group()

    def sum(self, tensor: Tensor, axis: str) -> Tensor:
        """Sums over an axis, in place."""
        group = self.group(axis)
        if group is not None:
            dist.all_reduce(tensor, group=group)
        return tensor

    def __str__(self) -> str:
        wide = [f"{name}={degree}" for name, degree in self.degrees.items() if degree > 1]
        return " x ".join(wide) or "one rank"

    @property
    def leads_samples(self) -> bool:
        """Whether this rank is the one that counts samples, among the ranks that work on the same ones."""
        return self.at["pp"] == self.at["cp"] == self.at["tp"] == 0

    @property
    def runs_own_batches(self) -> bool:
        """Whether ranks run whole sequences through the whole model, of batches of their own (tensor ranks: alike)."""
        return self.pp == self.cp == 1 and not self._cuts_sequences

    @property
    def leads(self) -> bool:
        """Whether this rank is the one that sends the stage's state, among the ranks that hold it."""
        return self.at["dp"] == self.at["cp"] == self.at["tp"] == 0

    @property
    def tells_loss(self) -> bool:
        """Whether this rank is the one that reports the loss, among the ranks that compute the same one; each context
        rank has its own."""
        return self.at["tp"] == 0 and self.at["pp"] == self.pp - 1


class MeshScaler(torch.amp.GradScaler):
    """Skips a step that overflows on one rank on all: stages and shards would otherwise diverge for good."""

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(*args, **kwargs)
        inv_scale = args[1]
        infinite = sum(found.values(), torch.zeros_like(inv_scale))
        if dist.is_initialized():
            dist.all_reduce(infinite, op=dist.ReduceOp.MAX)  # also by a rank that has no gradient at all
        return {infinite.device: infinite}
