"""Gradients of tied weights over the first and the last stage."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain.engines.mesh import tied_embeddings
from drivetrain.engines.mesh.tied_embeddings import TiedEnds
from drivetrain.errors import UserError
from tests.ranks import RankPool


class Ends(nn.Module):
    def __init__(self, rows: int = 7) -> None:
        super().__init__()
        self.words = nn.Embedding(rows, 3)
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)


def summed(chunk: int) -> list[Tensor]:
    """On two ranks: gradients in fp32 and bf16 whose last rows lie apart in memory, and one that this rank lacks."""
    with mock.patch.object(tied_embeddings, "CHUNK", chunk):
        return _summed()


def _summed() -> list[Tensor]:
    rank, found = dist.get_rank(), []
    for dtype in (torch.float32, torch.bfloat16):
        model = Ends().to(dtype)
        ends = TiedEnds(model, ["words.weight", "frozen.weight"], dist.group.WORLD)
        generator = torch.Generator().manual_seed(rank)
        model.words.weight.grad = torch.randn(3, 7, generator=generator).to(dtype).t()
        ends.sum_gradients()
        found.append(model.words.weight.grad)
        assert model.frozen.weight.grad is None
    model = Ends()
    if rank == 0:
        model.words.weight.grad = torch.ones(7, 3)
    TiedEnds(model, ["words.weight"], dist.group.WORLD).sum_gradients()
    assert model.words.weight.grad is not None
    return [*found, model.words.weight.grad]


def refusal() -> str:
    try:
        TiedEnds(Ends(rows=7 + dist.get_rank()), ["words.weight"], dist.group.WORLD)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("chunk", [2, 6, 2**20])
def test_both_ends_have_the_sum_to_the_bit_whatever_is_exchanged_at_once(
    chunk: int, ranks: Callable[[int], RankPool]
) -> None:
    first, last = ranks(2).run(summed, chunk)
    parts = [torch.randn(3, 7, generator=torch.Generator().manual_seed(rank)) for rank in (0, 1)]
    for dtype, mine, theirs in zip((torch.float32, torch.bfloat16), first, last, strict=False):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine, (parts[0].to(dtype) + parts[1].to(dtype)).t())
    assert torch.equal(first[2], torch.ones(7, 3)), "an end without a gradient counts as zeros"
    assert torch.equal(last[2], torch.ones(7, 3))


def test_a_weight_that_is_in_other_pieces_on_the_other_end_is_refused_on_both(ranks: Callable[[int], RankPool]) -> None:
    for reported in ranks(2).run(refusal):
        assert "words.weight is tied over the first and the last stage" in reported
        assert "leave pp or tp out" in reported


def test_without_tied_weights_there_is_nothing_to_do() -> None:
    ends = TiedEnds(Ends(), [], None)
    ends.sum_gradients()
    assert nn.Parameter(torch.ones(1)) not in ends
