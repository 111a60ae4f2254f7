"""Tests one file of whole tensors, of which each rank writes its pieces."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardPlacement

from drivetrain.checkpoint.manifest import ManifestPart, Outline, merged, plan_of
from drivetrain.checkpoint.tensor_file import DTYPES, create, differing, fill, kind_of, lay_out
from drivetrain.distributed.shard import Shard, piece_of
from tests.properties import examples
from tests.ranks import RankPool

Pools = Callable[[int], RankPool]

NAMES = ["float32", "float64", "bfloat16", "float16", "int64", "uint8", "bool", "float8_e4m3fn"]


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bytes, of which some are no numbers."""
    values = np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, size=(*shape, dtype.itemsize))
    return torch.from_numpy(values.astype(np.uint8)).flatten().view(dtype).reshape(shape)


@st.composite
def wholes(draw: st.DrawFn) -> tuple[Tensor, list[Shard]]:
    """A tensor and pieces of it that are all of it: boxes, or stretches of the flat tensor."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    whole = numbers(shape, getattr(torch, draw(st.sampled_from(NAMES))), draw(st.integers(0, 99)))
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, whole.numel()), max_size=3)))
        ends = [0, *cuts, whole.numel()]
        flat = whole.flatten()
        return whole, [Shard(flat[a:b], whole.shape, (a,)) for a, b in itertools.pairwise(ends)]
    grid = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    boxes = itertools.product(*(list(itertools.pairwise(ends)) for ends in grid))
    return whole, [
        Shard(whole[tuple(slice(a, b) for a, b in box)], whole.shape, tuple(a for a, _ in box)) for box in boxes
    ]


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=st.lists(wholes(), min_size=1, max_size=3), order=st.randoms(use_true_random=False))
def test_pieces_become_the_file_that_safetensors_reads(made: Any, order: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.unlink(missing_ok=True)
    wholes = {f"w{number}": whole for number, (whole, _) in enumerate(made)}
    layout = lay_out({name: kind_of(whole) for name, whole in wholes.items()})
    create(file, layout)
    pieces = [(f"w{number}", piece) for number, (_, several) in enumerate(made) for piece in several]
    order.shuffle(pieces)
    for name, piece in pieces:
        fill(file, layout, {name: piece})
        assert differing(file, layout, {name: piece}) == []
    found = load_file(file)
    assert found.keys() == wholes.keys()
    for name, whole in wholes.items():
        assert found[name].dtype == whole.dtype
        assert torch.equal(found[name].view(-1).view(torch.uint8), whole.view(-1).view(torch.uint8))


def test_every_dtype_has_the_name_that_safetensors_gives_it(tmp_path: Path) -> None:
    for dtype in DTYPES:
        whole = {"": numbers((2, 3), dtype, 1), "scalar": numbers((), dtype, 2), "none": numbers((0, 4), dtype, 3)}
        layout = lay_out({name: kind_of(tensor) for name, tensor in whole.items()})
        create(tmp_path / f"{dtype}", layout)
        fill(tmp_path / f"{dtype}", layout, whole)
        save_file(whole, tmp_path / f"{dtype}.theirs", {"format": "pt"})
        ours, theirs = load_file(tmp_path / f"{dtype}"), load_file(tmp_path / f"{dtype}.theirs")
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype
            assert ours[name].shape == tensor.shape
            assert torch.equal(ours[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_a_byte_that_was_lost_is_noticed(tmp_path: Path) -> None:
    whole = {"a": torch.arange(10.0), "b": torch.arange(6.0).view(2, 3)}
    layout = lay_out({name: kind_of(tensor) for name, tensor in whole.items()})
    create(tmp_path / "file", layout)
    fill(tmp_path / "file", layout, whole)
    with (tmp_path / "file").open("r+b") as opened:
        opened.seek(layout.starts["b"] + 23)
        opened.write(b"\xff")
    assert differing(tmp_path / "file", layout, whole) == ["b"]
    column = Shard(whole["b"][:, 2:], whole["b"].shape, (0, 2))
    assert differing(tmp_path / "file", layout, {"b": column}) == ["b"]
    assert differing(tmp_path / "file", layout, {"b": Shard(whole["b"][:, :2], whole["b"].shape, (0, 0))}) == []


# --- who writes what -------------------------------------------------------------------------------------------------


def outlines(*states: Any) -> list[Outline]:
    return [ManifestPart.of(state).outline() for state in states]


def test_what_several_ranks_have_the_first_one_writes() -> None:
    whole, half = torch.arange(4.0), torch.arange(2.0)
    pieces = [{"w": whole, "p": Shard(half, whole.shape, (start,))} for start in (0, 2, 0)]
    plan = plan_of(outlines(*pieces))
    assert plan.writes == [["w", "p"], ["p"], []]


def test_a_part_that_no_rank_has_is_reported() -> None:
    half = Shard(torch.arange(2.0), torch.Size([4]), (0,))
    with pytest.raises(TypeError, match="the ranks hold 2 of 4 numbers of w"):
        plan_of(outlines({"w": half}, {"w": half}))
    with pytest.raises(TypeError, match=r"w is .* on one rank and .* on rank 1"):
        plan_of(outlines({"w": torch.zeros(2)}, {"w": torch.zeros(3)}))


def test_the_states_of_ranks_are_joined_by_name() -> None:
    first, second = {"state": {"a": {"step": 1}}, "groups": [1]}, {"state": {"b": {"step": 2}}, "groups": [2]}
    assert merged([first, {}, second]) == {"state": {"a": {"step": 1}, "b": {"step": 2}}, "groups": [1]}


# --- PyTorch's own shards --------------------------------------------------------------------------------------------

PLACEMENTS: list[tuple[Placement, ...]] = [
    (ShardPlacement(0), ShardPlacement(1)),
    (ShardPlacement(1), ShardPlacement(0)),
    (ShardPlacement(0), ShardPlacement(0)),
    (Replicate(), ShardPlacement(1)),
    (ShardPlacement(2), Replicate()),
]


def pieces_of_dtensors() -> list[tuple[tuple[int, ...], Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(5 * 3 * 4.0).view(5, 3, 4)
    found = [piece_of(distribute_tensor(whole, mesh, placements)) for placements in PLACEMENTS]
    return [(piece.offset, piece.tensor) for piece in found if isinstance(piece, Shard)]


def test_a_shard_of_pytorch_lies_where_it_says(ranks: Pools) -> None:
    whole = torch.arange(5 * 3 * 4.0).view(5, 3, 4)
    for each in zip(*ranks(4).run(pieces_of_dtensors), strict=True):
        found = torch.full_like(whole, -1)
        for offset, local in each:
            found[tuple(slice(a, a + n) for a, n in zip(offset, local.shape, strict=True))] = local
        assert torch.equal(found, whole)
