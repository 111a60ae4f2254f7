"""The bench of rank 0's work at many ranks refuses what grows faster than linearly, and drives every part."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.scale import RANKS, RESULTS, Measured, exponent, page, too_steep
from bench.scale_parts import PARTS, hang_rows
from drivetrain.launch.diagnostics.hang_report import blame


def measured_as(seconds: Callable[[int], float], size: Callable[[int], float]) -> dict[str, list[Measured]]:
    return {"manifests": [Measured(ranks, seconds(ranks), int(size(ranks))) for ranks in RANKS]}


def test_what_grows_linearly_passes_and_a_square_is_refused() -> None:
    def linear(ranks: int) -> float:
        return 0.1 + ranks * 1e-4

    def square(ranks: int) -> float:
        return ranks**2 * 1e-6

    assert too_steep(measured_as(linear, lambda ranks: 100 + 90 * ranks)) == []
    assert too_steep(measured_as(lambda ranks: 1e-5 * ranks * math.log(ranks), lambda _: 5)) == []
    [slow] = too_steep(measured_as(square, lambda _: 5))
    assert "seconds grow with the number of ranks to the power 2.00" in slow
    [large] = too_steep(measured_as(linear, lambda ranks: ranks**1.5))
    assert "bytes grow" in large
    assert slow in page(measured_as(square, lambda _: 5), [slow])


def test_the_exponent_is_that_of_the_formula() -> None:
    assert exponent(RANKS, [3.0 * ranks**1.5 for ranks in RANKS]) == pytest.approx(1.5)


@pytest.mark.parametrize("name", PARTS)
def test_each_part_does_the_work_of_rank_0_and_counts_its_bytes(name: str, tmp_path: Path) -> None:
    """Each asserts within that the project's function found what the fake ranks had put there."""
    sizes = []
    for ranks in (8, 32):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        sizes.append(PARTS[name].make(ranks, folder)())
    assert 0 < sizes[0] <= sizes[1]


def test_a_hang_of_ten_thousand_ranks_in_the_same_collective_is_described_at_once() -> None:
    """Looking for late ranks once for each waiting one took a square of them."""
    looked = 0

    class Counted(dict[str, int]):
        def __getitem__(self, key: str) -> int:
            nonlocal looked
            looked += 1
            return super().__getitem__(key)

    rows = hang_rows(2001)[:-1]
    for row in rows:
        object.__setattr__(row.standing, "begun", Counted(row.standing.begun))
    assert blame(rows).startswith("ranks 0-1999 wait in the same place")
    assert 0 < looked <= 4 * len(rows)


def test_the_page_has_every_part() -> None:
    text = RESULTS.read_text()
    assert all(f"| {name} |" in text for name in PARTS)
    assert "Nothing grows faster than linearly" in text
