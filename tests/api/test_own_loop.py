"""drivetrain.engine: a loop of the user's own over our engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drivetrain
from drivetrain.errors import RunError, UserError
from tests.ranks import RankPool

X = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
LOSS = nn.CrossEntropyLoss()
SIZES = (7, 16, 12)  # of global batches


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def shares(step: int, rank: int, world: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """A rank's batches of a step: of uneven sizes, and not equally many on each rank."""
    rows = torch.arange(step * 8, step * 8 + size) % len(X)
    mine = rows[rank::world]
    pieces = mine.split(3) if rank == 0 else [mine]
    return [(X[piece], Y[piece]) for piece in pieces if len(piece)]


def looped(engine: Any, steps: range) -> list[tuple[float, float]]:
    found = []
    for step in steps:
        batches = shares(step, engine.data_rank, engine.data_world, SIZES[step % len(SIZES)])
        loss = engine.forward_backward(batches)
        found.append((loss.item(), engine.optimizer_step().grad_norm.item()))
    return found


def by_hand(steps: int) -> tuple[list[tuple[float, float]], nn.Module]:
    """Plain PyTorch over whole global batches."""
    net, found = network(), []
    optimizer = sgd(net.parameters())
    for step in range(steps):
        rows = torch.arange(step * 8, step * 8 + SIZES[step % len(SIZES)]) % len(X)
        optimizer.zero_grad()
        loss = LOSS(net(X[rows]), Y[rows])
        loss.backward()
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found, net


def test_one_process_gives_what_plain_pytorch_gives() -> None:
    expected, net = by_hand(6)
    with drivetrain.engine("single", network(), loss=LOSS, optimizer=sgd) as engine:
        assert looped(engine, range(6)) == [pytest.approx(each, rel=1e-5) for each in expected]
        weights = engine.weights()
        values = engine.evaluate([(X[:50], Y[:50]), (X[50:], Y[50:])])
    for name, weight in net.state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)
    assert values["loss"] == pytest.approx(LOSS(net(X), Y).item(), rel=1e-5)
    assert values["accuracy"] == pytest.approx((net(X).argmax(1) == Y).float().mean().item())


def over_ranks(
    name: Any, folder: Path
) -> tuple[list[tuple[float, float]], list[tuple[float, float]], dict[str, float]]:
    """Six steps; then the last three again, from a checkpoint after the third."""
    import torch.distributed as dist

    from drivetrain.launch.external_launcher import OuterLauncher

    world = dist.get_world_size()
    own = OuterLauncher(dist.get_rank(), world, world)
    before = OuterLauncher.here
    OuterLauncher.here = classmethod(lambda _: own)  # type: ignore[assignment,method-assign]
    try:
        engine = drivetrain.engine(name, network(), loss=LOSS, optimizer=sgd)
        first = looped(engine, range(3))
        engine.save(folder)
        whole = first + looped(engine, range(3, 6))
        values = engine.evaluate([(X[engine.data_rank :: engine.data_world], Y[engine.data_rank :: engine.data_world])])
        engine.close()
        again = drivetrain.engine(name, network(), loss=LOSS, optimizer=sgd)
        assert again.load(folder) == 3
        return whole, looped(again, range(3, 6)), values
    finally:
        OuterLauncher.here = before  # type: ignore[method-assign]


@pytest.mark.long
def test_ranks_with_uneven_batches_give_the_curve_of_one_process_and_go_on_exactly(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    expected, net = by_hand(6)
    for number, name in enumerate(("ddp", "fsdp", {"engine": {"name": "mesh", "dp": 2}})):
        for whole, again, values in ranks(2).run(over_ranks, name, tmp_path / str(number)):
            assert whole == [pytest.approx(each, rel=1e-5) for each in expected], name
            assert again == whole[3:]
            assert values["loss"] == pytest.approx(LOSS(net(X), Y).item(), rel=1e-4)


def test_a_checkpoint_of_several_ranks_goes_on_in_one_process(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    expected, _ = by_hand(6)
    ranks(2).run(over_ranks, "fsdp", tmp_path)
    with drivetrain.engine("single", network(), loss=LOSS, optimizer=sgd) as engine:
        assert engine.load(tmp_path) == 3
        assert looped(engine, range(3, 6)) == [pytest.approx(each, rel=1e-5) for each in expected[3:]]


def test_a_made_optimizer_is_refused_with_the_line_that_works() -> None:
    net = network()
    with pytest.raises(UserError, match=r"optimizer=lambda parameters: SGD\(parameters, lr=0.5\)"):
        drivetrain.engine("fsdp", net, loss=LOSS, optimizer=sgd(net.parameters()))


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(UserError, match=r"torchrun --nproc-per-node 2 script\.py"):
        drivetrain.engine("ddp", network(), loss=LOSS, optimizer=sgd, processes=2)
    with pytest.raises(UserError, match="did you mean fsdp"):
        drivetrain.engine("fsdpp", network(), loss=LOSS, optimizer=sgd)
    engine = drivetrain.engine("single", network(), loss=LOSS)
    with pytest.raises(RunError, match="call forward_backward first"):
        engine.optimizer_step()
    with pytest.raises(UserError, match="as a batch"):
        engine.evaluate(["a text"])
    assert engine.evaluate([(X, Y)])["accuracy"] >= 0
    with pytest.raises(UserError, match="only evaluates"):
        engine.forward_backward([(X, Y)])
    engine.close()


def test_a_closed_engine_and_a_step_without_a_batch_are_refused() -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    with drivetrain.engine("single", nn.Linear(4, 2), loss=LOSS, optimizer=sgd) as engine:
        for _ in range(2):
            engine.forward_backward([(X, Y)])
            engine.optimizer_step()
            for call in (engine.forward_backward, engine.evaluate):
                with pytest.raises(UserError, match="no process gave a batch"):
                    call([])
    for call in (engine.forward_backward, engine.evaluate):  # not of a new copy of the untrained model
        with pytest.raises(RunError, match="closed"):
            call([(X, Y)])


def test_a_weighted_loss_is_refused_when_the_engine_is_made() -> None:
    with pytest.raises(UserError, match=r"(?s)class weights make .* divide the weights by their mean"):
        drivetrain.engine("single", network(), loss=nn.CrossEntropyLoss(weight=torch.ones(2)))
