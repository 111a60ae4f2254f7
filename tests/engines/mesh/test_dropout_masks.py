"""Dropout under tensor parallelism: ranks share the masks of what they hold copies of, and only those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.data.loader import MicroBatch
from drivetrain.workloads.base import few
from tests.parity.mesh_cases import Columns, Declared, MeshCase, engine_of, workload
from tests.ranks import RankPool
from tests.tiny_workload import Rows


class Dropping(Columns):
    """Between the layers of each pair, and after its blocks, where ranks hold copies."""

    def __init__(self) -> None:
        super().__init__(rate=0.5)
        self.last = nn.Dropout(0.5)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.inner(features)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.last(hidden))


def dropping() -> nn.Module:
    torch.manual_seed(5)
    return Dropping()


Masks = dict[str, list[Tensor]]


def drawn(recompute: Any) -> tuple[Masks, dict[str, Tensor]]:
    """Returns where each dropout of a window dropped, every time that it ran, and the window's gradients."""
    work = Declared(dropping, Rows(62), Rows(10))
    engine: Any = engine_of(MeshCase({"tp": 2}, recompute=recompute), work)
    masks: Masks = {}
    for name, module in engine._model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(
                lambda _m, args, out, name=name: masks.setdefault(name, []).append((out == 0) & (args[0] != 0))
            )
    torch.manual_seed(3)
    engine.forward_backward([Rows(62).micro(*range(8)), Rows(62).micro(*range(8, 16))])
    return masks, engine.gradients()


def test_ranks_drop_other_features_of_their_own_and_the_same_of_their_copies(ranks: Callable[[int], RankPool]) -> None:
    (first, _), (second, _) = ranks(2).run(drawn, False)
    assert len(first) == 5
    for name, masks in first.items():
        for mine, theirs in zip(masks, second[name], strict=True):
            assert torch.equal(mine, theirs) == (name == "last"), name


@pytest.mark.parametrize("recompute", [True, "selective"])
def test_recomputing_draws_the_same_masks_again(ranks: Callable[[int], RankPool], recompute: Any) -> None:
    expected = ranks(2).run(drawn, False)
    for (masks, gradients), (own, own_gradients) in zip(expected, ranks(2).run(drawn, recompute), strict=True):
        assert all(len(own[name]) == 4 for name in masks if name != "last"), "two micro-batches, forward and again"
        for name, found in own.items():
            assert all(any(torch.equal(mask, one) for one in masks[name]) for mask in found), name
        for name, gradient in gradients.items():
            torch.testing.assert_close(own_gradients[name], gradient)


def streams(sequence_parallel: bool) -> tuple[float, int]:
    """A number of the shared stream after a window with attention dropout, and the stream's."""
    case = MeshCase({"tp": 2, "sequence_parallel": sequence_parallel}, model="dropout")
    work = workload(case)
    engine = engine_of(case, work)
    torch.manual_seed(3)
    engine.forward_backward([MicroBatch(few(work))])
    return torch.rand(()).item(), engine.random_stream


def test_the_shared_stream_goes_on_where_it_was_and_parts_of_sequences_have_none(
    ranks: Callable[[int], RankPool],
) -> None:
    (first, number), (second, other) = ranks(2).run(streams, False)
    assert (first, number) == (second, other)
    (_, number), (_, other) = ranks(2).run(streams, True)
    assert number != other
