"""Bytes sent, against closed forms of the usual ring algorithms."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from drivetrain.measure.traffic import Traffic
from tests.ranks import RankPool


def exchanged() -> dict[str, int]:
    tensor, halves = torch.ones(6, 4), [torch.ones(6, 4) for _ in range(2)]
    with Traffic() as traffic:
        dist.all_reduce(tensor)
        dist.all_gather(halves, tensor)
        dist.all_to_all_single(torch.empty(6, 4), tensor)
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
    return traffic.sent


def redistributed() -> dict[str, int]:
    mesh = init_device_mesh("cpu", (2,))
    part = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)])
    with Traffic() as traffic:
        part.redistribute(placements=[Replicate()]).to_local()
    return traffic.sent


def nothing() -> dict[str, int]:
    with Traffic() as traffic:
        (torch.ones(6, 4) @ torch.ones(4, 2)).sum()
    return traffic.sent


def test_each_exchange_counts_what_a_ring_sends_for_it(ranks: Callable[[int], RankPool]) -> None:
    first, second = ranks(2).run(exchanged)
    whole = 6 * 4 * 4  # bytes
    assert first == {"all_reduce": whole, "all_gather": whole, "all_to_all": whole // 2, "send": whole}
    assert second == {"all_reduce": whole, "all_gather": whole, "all_to_all": whole // 2}


def test_what_dtensor_exchanges_is_seen(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(redistributed) == [{"all_gather": 3 * 4 * 4}] * 2


def test_work_of_one_rank_sends_nothing() -> None:
    assert nothing() == {}
