"""Gradients summed over replicas, against DistributedDataParallel and sums by hand."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from drivetrain.engines import gradient_sum
from drivetrain.engines.gradient_sum import GradientSum
from tests.ranks import RankPool


class Branches(nn.Module):
    """Two layers of which a rank may use one; a third nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.idle = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4)

    def forward(self, inputs: Tensor, left: bool, right: bool) -> Tensor:
        found = inputs.sum() * 0
        found = found + self.left(inputs).square().sum() if left else found
        return found + self.right(inputs.double()).square().sum().float() if right else found


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def three_backwards(bytes_of_a_bucket: int) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Of a small network: ours, and DistributedDataParallel's times the ranks over which it averages."""
    with (
        mock.patch.object(gradient_sum, "BUCKET_BYTES", bytes_of_a_bucket),
        mock.patch.object(gradient_sum, "FIRST_BUCKET_BYTES", bytes_of_a_bucket),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        summing = GradientSum(model.parameters(), dist.group.WORLD)
        inputs = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
        summing.expect(3)
        for part in inputs:
            model(part).square().sum().backward()
        summing.finish()
        ours = gradients(model)
        model.zero_grad()
        replica = DistributedDataParallel(model)  # its own sum comes after the hooks, which expect nothing now
        with replica.no_sync():
            for part in inputs[:-1]:
                replica(part).square().sum().backward()
        replica(inputs[-1]).square().sum().backward()
        return ours, {name: g * dist.get_world_size() for name, g in gradients(model).items() if g is not None}


def used_apart() -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """The first rank uses the left layer in one of two backwards, the second the right one in both: sums, own."""
    torch.manual_seed(0)
    model, rank = Branches(), dist.get_rank()
    summing = GradientSum(model.parameters(), dist.group.WORLD)
    inputs = torch.ones(2, 4) * (rank + 1)
    uses = [(True, False), (False, False)] if rank == 0 else [(False, True), (False, True)]
    for left, right in uses:
        model(inputs.requires_grad_(), left, right).backward()
    own = gradients(model)
    model.zero_grad()
    summing.expect(2)
    for left, right in uses:
        model(inputs, left, right).backward()
    summing.finish()
    return gradients(model), own


def test_sums_are_those_of_distributed_data_parallel_whatever_the_buckets(ranks: Callable[[int], RankPool]) -> None:
    for size in (1, 200, 2**20):
        for ours, expected in ranks(2).run(three_backwards, size):
            assert ours.keys() == expected.keys()
            for name in expected:
                torch.testing.assert_close(ours[name], expected[name], msg=name)


def test_a_parameter_that_some_ranks_use_gets_its_gradient_on_all_and_one_that_none_uses_gets_none(
    ranks: Callable[[int], RankPool],
) -> None:
    (sums, first), (sums_of_second, second) = ranks(2).run(used_apart)
    for name, expected in {**first, **{n: g for n, g in second.items() if g is not None}}.items():
        for found in (sums[name], sums_of_second[name]):
            torch.testing.assert_close(found, expected, msg=name)
    assert sums["idle.weight"] is None
    assert sums["left.weight"].abs().sum() > 0
    assert sums["right.weight"].dtype == torch.float64


class Work:
    """An exchange that is over at once."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def test_what_is_exchanged_already_is_let_go_while_backward_goes_on() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(5)))
    held: list[int] = []
    with (
        mock.patch.object(gradient_sum, "BUCKET_BYTES", 1),
        mock.patch.object(gradient_sum, "FIRST_BUCKET_BYTES", 1),
        mock.patch.object(dist, "all_reduce", return_value=Work()),
    ):
        summing = GradientSum(model.parameters(), mock.Mock())
        for layer in model:  # after the sum's own hook
            layer.weight.register_post_accumulate_grad_hook(
                lambda _: held.append(sum(bucket._sums is not None for bucket in summing._buckets))
            )
        summing.expect(1)
        model(torch.ones(2, 4)).sum().backward()
        summing.finish()
    assert held == [0] * 5
