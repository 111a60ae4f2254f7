"""Tests that ranks which are not there leave nothing behind for those of a later trace."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from drivetrain.plan.trace_ranks import fake_ranks


def summed_behind(groups: int) -> torch.Size:
    """Sums products over two of four ranks, whose groups are made after so many others."""
    with fake_ranks(0, 4):
        for _ in range(groups):
            dist.new_group([0, 1])
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        rows = distribute_tensor(torch.ones(4, 6), mesh["tp"], [Shard(0)], src_data_rank=None)
        return (rows.T @ rows).full_tensor().shape


def test_groups_of_an_earlier_trace_are_not_asked_in_a_later_one() -> None:
    """A mesh of the same shape counts as the same one in the caches of distributed tensors, with the groups it had."""
    for groups in (5, 0, 3):
        assert summed_behind(groups) == torch.Size([6, 6])


def test_the_process_is_left_as_it_was() -> None:
    hook, variables = sys.excepthook, dict(os.environ)
    with fake_ranks(3, 4) as ranks:
        assert (ranks.rank, ranks.world, dist.get_world_size()) == (3, 4, 4)
        assert ranks.all_gather("x") == ["x"] * 4
    assert not dist.is_initialized()
    assert (sys.excepthook, dict(os.environ)) == (hook, variables)
