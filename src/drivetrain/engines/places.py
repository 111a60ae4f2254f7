"""Where a rank stands on the mesh (pp, dp, cp, tp), and with whom it does what."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from drivetrain.config.mesh import MeshEngine
from drivetrain.errors import RunError
from drivetrain.ranks import Ranks


class Place:
    """Tensor ranks are neighbours, stages stand furthest apart: the more is exchanged, the nearer."""

    def __init__(self, config: MeshEngine, ranks: Ranks, device_type: str) -> None:
        self.pp, self.cp, self.tp, self.dp = config.pp, config.cp, config.tp, config.data_degree(ranks.world)
        self.degrees = {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}
        if self.pp * self.dp * self.cp * self.tp != ranks.world:
            shape = " x ".join(map(str, self.degrees.values()))
            raise RunError(f"a mesh of {shape} ranks was asked for, but there are {ranks.world}")
        sizes = (self.pp, self.dp * self.cp, self.tp)
        self.wide = init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "data", "tp"))
        self.fine = init_device_mesh(device_type, tuple(self.degrees.values()), mesh_dim_names=tuple(self.degrees))
        self.at = {name: self.fine.get_local_rank(name) for name in self.degrees}
        self.data_group, self.stages = self.wide.get_group("data"), self.wide.get_group("pp")

    def __str__(self) -> str:
        return " x ".join(f"{name}={degree}" for name, degree in self.degrees.items() if degree > 1)

    @property
    def leads_samples(self) -> bool:
        """Of the ranks that work on the same samples, the one that counts them."""
        return self.at["pp"] == self.at["cp"] == self.at["tp"] == 0

    @property
    def leads(self) -> bool:
        """Of the ranks that hold a stage, the one that speaks for it."""
        return self.at["dp"] == self.at["cp"] == self.at["tp"] == 0

    @property
    def tells_loss(self) -> bool:
        """Of the ranks that compute the same loss, one; each context rank has a loss of its own."""
        return self.at["tp"] == 0 and self.at["pp"] == self.pp - 1


class MeshScaler(torch.amp.GradScaler):
    """A step that overflows on one rank is skipped on all: stages and shards would else part for good."""

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(*args, **kwargs)
        inv_scale = args[1]
        infinite = sum(found.values(), torch.zeros_like(inv_scale))
        dist.all_reduce(infinite, op=dist.ReduceOp.MAX)  # also by a rank that has no gradient at all
        return {infinite.device: infinite}
