"""The table of planned against measured: what misses is named, and a wrong plan turns it red."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    sys.path.insert(0, str(BENCH))
    try:
        from planned_page import page as made  # type: ignore[import-not-found]

        yield made
    finally:
        sys.path.remove(str(BENCH))


def row(engine: str, tensor: float = 1.0, seconds: float = 1.0, foreign: float = 0.0) -> dict[str, Any]:
    """A row whose plan is off by these factors."""
    size = 100 * 2**20
    planned = {"tensor": int(size * tensor), "seconds": 0.02 * seconds}
    measured = {"tensor": size, "resident": size, "seconds": 0.02, "foreign_cores": foreign}
    return {"recipe": "digits", "engine": engine, "ranks": 2, "planned": planned, "measured": measured}


def test_a_true_plan_reaches_the_goals(page: Any) -> None:
    text = page([row("ddp"), row("fsdp")])
    assert "| peak of tensors | 2 | 0.0% | 0.0% | median 1%, worst 3%: reached |" in text
    assert "Beyond the goals" not in text


def test_one_wrong_plan_misses_and_is_named(page: Any) -> None:
    text = page([row("ddp"), row("fsdp"), row("zero2", tensor=1.1)])
    assert "| peak of tensors | 3 | 0.0% | 10.0% | median 1%, worst 3%: missed |" in text
    assert "- digits zero2 2: peak of tensors +10%" in text


def test_small_peaks_may_be_off_by_two_mebibytes(page: Any) -> None:
    small = row("ddp")
    small["planned"]["tensor"], small["measured"]["tensor"] = 2**20, 2**21
    assert "median 1%, worst 3%: reached" in page([small])


def test_a_disturbed_time_does_not_count(page: Any) -> None:
    text = page([row("ddp", seconds=2.0, foreign=0.5), row("fsdp", seconds=1.1)])
    assert "| time of a step | 1 | 10.0% | 10.0% | median 15%, worst 40%: reached |" in text


def test_refusals_and_failures_have_their_reason(page: Any) -> None:
    refused = {"recipe": "digits", "engine": "mesh.tp2", "ranks": 2, "planned": {"refused": "why"}, "measured": {}}
    assert "- digits mesh.tp2 2: why" in page([row("ddp"), refused])
