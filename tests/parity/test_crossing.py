"""Checkpoints cross engines and worlds: each engine writes what plain PyTorch comes to, takes up what another wrote to
the last bit, and goes on from it on plain PyTorch's curve.

AdamW under a warm-up and a cosine, fp32, clipping active. `make parity` runs all and writes the table of
docs/reference/checkpoints.md.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.checkpoint.directory import load
from tests.parity import crossing
from tests.parity.cases import largest
from tests.parity.crossing import CUBE, DDP, FSDP, LAYOUTS, SAVED, SINGLE, Layout, Plain, add_row, mesh, zero
from tests.ranks import RankPool

Pools = Callable[[int], RankPool]
TOLERANCE = 1e-5
FREQUENT = ("single", "ddp", "fsdp", "zero2", "zero3", "mesh tp=2", "mesh pp=2", "mesh cp=2")


def in_the_subset(*layouts: Layout) -> bool:
    """Returns whether make test runs it, on two ranks and in this process: all engines alone, and frequent ones in
    pairs."""
    small = all(layout.processes == 2 or layout == SINGLE for layout in layouts)
    return small and (len(layouts) == 1 or all(layout.shown in FREQUENT for layout in layouts))


def marked(*layouts: Layout) -> Any:
    marks = [] if in_the_subset(*layouts) else [pytest.mark.slow]
    return pytest.param(*layouts, id="-to-".join(layout.name for layout in layouts), marks=marks)


def sampled() -> list[tuple[Layout, Layout]]:
    """Twelve pairs of different engines: one from each world of 1, 2 and 4 into each, and three more."""
    dice, found = random.Random(2), list[tuple[Layout, Layout]]()
    worlds = [*itertools.product((1, 2, 4), repeat=2), (2, 4), (4, 2), (4, 4)]
    for before, after in worlds:
        pairs = [
            (one, other)
            for one, other in itertools.product(LAYOUTS, LAYOUTS)
            if (one.world, other.world) == (before, after) and one.shown != other.shown and (one, other) not in found
        ]
        found.append(dice.choice(pairs))
    return found


OTHERS = [FSDP, zero(3, 2), mesh(tp=2), mesh(pp=2), CUBE, SINGLE]
NAMED = [*((DDP, other) for other in OTHERS), *((other, DDP) for other in OTHERS)]
PAIRS = list(dict.fromkeys([*NAMED, *sampled()]))


def on_ranks(layout: Layout, pools: Pools, work: Callable[..., Any], *args: Any) -> Any:
    alone = layout.shown in ("single", "dp")
    return work(layout, *args) if alone else pools(layout.processes).run(work, layout, *args)[0]


@pytest.fixture(scope="module")
def reference() -> Plain:
    return crossing.plain()


@pytest.fixture(scope="module")
def written(ranks: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Path]:
    """Returns what an engine saved after three steps."""
    root = tmp_path_factory.mktemp("written")

    @functools.cache
    def of(layout: Layout) -> Path:
        path: Path = on_ranks(layout, ranks, crossing.written, root / layout.name)
        return path

    return of


@pytest.mark.parametrize("layout", [marked(layout) for layout in LAYOUTS])
def test_what_an_engine_saves_is_what_plain_pytorch_comes_to(
    layout: Layout, written: Callable[[Layout], Path], reference: Plain
) -> None:
    saved = load(written(layout))
    assert saved["model"].keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        # a weight with next to no gradient moves as far as the others: of those, Adam magnifies what is mere rounding
        moved = float((weight - reference.start[name]).norm())
        close(saved["model"][name], weight, name, 1e-3 * moved)
    moments = saved["optimizer"]["state"]
    assert moments.keys() == reference.moments.keys()
    for name, expected in reference.moments.items():
        assert moments[name]["step"] == SAVED
        for key in ("exp_avg", "exp_avg_sq"):
            close(moments[name][key], expected[key], f"{key} of {name}", 2e-4 * float(expected[key].norm()))


def close(found: Tensor, expected: Tensor, name: str, near: float) -> None:
    assert found.dtype == expected.dtype == torch.float32, name
    assert found.shape == expected.shape, name
    differs = float((found - expected).norm())
    assert differs < near, f"{name} differs by {differs:.1e}, of which {near:.1e} is allowed"


@pytest.mark.parametrize("layout", [marked(layout) for layout in LAYOUTS])
def test_what_an_engine_loads_it_saves_again_to_the_bit(
    layout: Layout, written: Callable[[Layout], Path], ranks: Pools, tmp_path: Path
) -> None:
    canonical = written(SINGLE)
    again = on_ranks(layout, ranks, crossing.written_again, canonical, tmp_path)
    for part in ("model", "optimizer"):
        name = f"{part}.safetensors"
        assert (again / name).read_bytes() == (canonical / name).read_bytes(), name


@pytest.mark.parametrize(("saved", "resumed"), [marked(*pair) for pair in PAIRS])
def test_another_engine_goes_on_with_the_same_losses(
    saved: Layout, resumed: Layout, written: Callable[[Layout], Path], ranks: Pools, reference: Plain
) -> None:
    losses = on_ranks(resumed, ranks, crossing.gone_on, written(saved))
    add_row(saved, resumed, largest(losses, reference.losses[SAVED:]))
    assert losses == pytest.approx(reference.losses[SAVED:], rel=TOLERANCE)


def test_the_sampled_pairs_are_twelve_of_all_worlds() -> None:
    pairs = sampled()
    assert len(set(pairs)) == 12
    assert {(one.world, other.world) for one, other in pairs} == {*itertools.product((1, 2, 4), repeat=2)}
