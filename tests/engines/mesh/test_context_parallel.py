"""Attention over context ranks, next to plain attention; and what must be an engine's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig

from drivetrain.config.engines.mesh import MeshEngine
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.mesh.context_parallel import Ulysses
from drivetrain.engines.mesh.topology import MeshPosition
from drivetrain.errors import UserError
from tests.parity.mesh_cases import MeshCase, engine_of, workload
from tests.parity.mesh_promises import steps
from tests.ranks import RankPool

LENGTH, HEADS = 12, 4


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, HEADS, LENGTH, 8, generator=generator) for _ in range(3)]


class Causal(nn.Module):
    is_causal = True


def attended(window: int | None) -> Tensor:
    """This rank's part of the positions: (B, T / ranks, heads, width)."""
    mine = slice(dist.get_rank() * LENGTH // 2, (dist.get_rank() + 1) * LENGTH // 2)
    query, key, value = (tensor[:, :, mine] for tensor in inputs())
    assert dist.group.WORLD is not None
    how = {"dropout": 0.0, "scaling": None, "sliding_window": window, "use_cache": False}
    found, _ = Ulysses(dist.group.WORLD)(Causal(), query, key, value, None, **how)
    return found


def test_attention_looks_back_as_far_as_its_window(ranks: Callable[[int], RankPool]) -> None:
    back = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    for window in (None, 1, 5, LENGTH, 99):
        allowed = (back >= 0) & (back < (window or LENGTH))
        expected = F.scaled_dot_product_attention(*inputs(), attn_mask=allowed).transpose(1, 2)
        found = torch.cat(ranks(2).run(attended, window), dim=1)
        torch.testing.assert_close(found, expected, msg=f"window {window}")


WINDOW = 4
UNLIKE = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}


@pytest.mark.parametrize(
    ("kind", "fields", "windows", "refused"),
    [
        ("mistral", {}, (WINDOW, WINDOW), None),
        ("mistral", {}, (WINDOW, None), 1),
        ("mistral", {}, (WINDOW + 1, WINDOW), 0),
        ("mistral", {"sliding_window": None}, (None, None), None),
        ("qwen2", {"use_sliding_window": False}, (None, None), None),
        ("qwen2", UNLIKE, (WINDOW, None), None),
        ("qwen2", UNLIKE, (None, None), 0),
    ],
)
def test_a_window_that_attention_does_not_hear_of_is_refused(
    kind: str, fields: dict[str, Any], windows: tuple[int | None, ...], refused: int | None
) -> None:
    """Masks are not cut into parts, so that a window kept by the mask alone would be lost."""
    config = AutoConfig.for_model(kind, **{"sliding_window": WINDOW, "num_hidden_layers": 2, **fields})
    attention = Ulysses(cast(Any, None))  # whole sequences are not exchanged

    def called() -> None:
        with attention.called_by(2, config), attention.whole_sequences():
            for layer, window in enumerate(windows):
                module = Causal()
                module.layer_idx = layer  # type: ignore[assignment]
                attention(module, *inputs(), None, dropout=0.0, scaling=None, sliding_window=window)

    if refused is None:
        called()
        return
    with pytest.raises(UserError, match=rf"attention of layer {refused} does not get its window \({WINDOW}\)"):
        called()


def side_by_side() -> tuple[list[float], list[float]]:
    """Losses of an engine alone, and of one that shares its process with another, which is in the midst of something
    else."""
    case = MeshCase({"cp": 2})
    work = workload(case)
    alone = steps(engine_of(case, work), work, range(2))
    engine, other = engine_of(case, work), engine_of(case, work)
    with other._attention.whole_sequences():  # type: ignore[attr-defined]
        return alone, steps(engine, work, range(2))


def test_two_engines_of_a_process_have_an_attention_each(ranks: Callable[[int], RankPool]) -> None:
    for alone, beside in ranks(2).run(side_by_side):
        assert alone == beside


def groups(degrees: dict[str, Any]) -> tuple[bool, int, int]:
    """Returns whether gradients and attention have a group each, and their sizes."""
    place = MeshPosition(MeshEngine(**degrees), Communicator(), "cpu")
    data, context = place.group("data"), place.group("cp")
    return data is not context, dist.get_world_size(data), dist.get_world_size(context)


def test_gradients_are_summed_apart_from_attentions_exchanges(ranks: Callable[[int], RankPool]) -> None:
    """In one group a rank that leaves a parameter out would take the one for the other."""
    assert ranks(2).run(groups, {"cp": 2}) == [(True, 2, 2)] * 2


@pytest.mark.slow
def test_so_they_are_beside_other_axes(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(4).run(groups, {"cp": 2, "dp": 2}) == [(True, 4, 2)] * 4
    assert ranks(4).run(groups, {"cp": 2, "tp": 2}) == [(True, 2, 2)] * 4
