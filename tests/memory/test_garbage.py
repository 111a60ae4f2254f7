"""Full collections come at fixed steps, and nothing is left behind."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from drivetrain.memory import garbage
from drivetrain.memory.garbage import collecting, importing, rarer


class Circle:
    def __init__(self) -> None:
        self.tensor = torch.zeros(1000)
        self.own = self


@pytest.fixture(autouse=True)
def nothing_apart() -> None:
    gc.unfreeze()  # conftest.py sets all modules apart


@pytest.fixture
def full() -> Iterator[list[int]]:
    """One entry for each full collection."""
    seen: list[int] = []

    def words(phase: str, how: dict[str, Any]) -> None:
        if phase == "stop" and how["generation"] == 2:
            seen.append(how["collected"])

    gc.callbacks.append(words)
    try:
        yield seen
    finally:
        gc.callbacks.remove(words)


def objects(count: int) -> list[list[int]]:
    return [[] for _ in range(count)]


def test_full_collections_come_at_the_steps_and_at_no_other(full: list[int]) -> None:
    with collecting(10) as collect:
        full.clear()
        kept = []
        for step in range(1, 31):
            kept.append(objects(30_000))
            collect(step)
            assert len(full) == step // 10


def test_left_to_python_they_come_as_objects_are_made(full: list[int]) -> None:
    with collecting(0) as collect:
        gc.collect()
        full.clear()
        kept = [objects(30_000) for _ in range(30)]
        collect(10)
    assert full, "or the test above shows nothing"
    assert kept


def test_old_circles_that_hold_tensors_go_at_the_next_step() -> None:
    with collecting(5) as collect:
        for step in range(1, 11):
            circle = Circle()
            gc.collect(0), gc.collect(1)  # it is old now: no pass over young objects finds it
            seen = weakref.ref(circle.tensor)
            del circle
            collect(step)
            assert (seen() is None) == (step % 5 == 0)


def test_young_circles_go_without_waiting_for_a_step() -> None:
    with collecting(1000):
        seen = weakref.ref(Circle().tensor)
        kept = objects(5_000)
        assert seen() is None
    assert kept


def test_afterwards_all_is_as_before() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with collecting(5):
        assert gc.get_freeze_count() > frozen
        assert gc.get_threshold() != before
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


def test_in_a_process_of_its_own_nothing_is_passed_over_while_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_owns_process", True)
    passes: list[str] = []

    def note(phase: str, how: dict[str, Any]) -> None:
        passes.append(f"{phase} {how['generation']}")

    gc.callbacks.append(note)
    try:
        with importing():
            kept = objects(30_000)
            with importing():
                kept += objects(30_000)
            monkeypatch.setitem(sys.modules, "imported_just_now", ModuleType("imported_just_now"))
            kept += objects(30_000)
            assert passes == []
        assert gc.isenabled()
        assert gc.get_freeze_count() > len(kept)
    finally:
        gc.callbacks.remove(note)
        gc.unfreeze()


def test_where_no_module_came_nothing_is_set_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made meanwhile may be garbage soon, and would never be freed."""
    monkeypatch.setattr(garbage, "_owns_process", True)
    with importing():
        circle = weakref.ref(Circle())
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert circle() is None


def test_in_a_process_of_other_code_imports_change_nothing(full: list[int]) -> None:
    with importing():
        kept = [objects(30_000) for _ in range(30)]
        assert full
    assert gc.get_freeze_count() == 0
    assert kept


def test_passes_are_rarer_while_rows_are_read_and_as_before_afterwards() -> None:
    passes: list[int] = []

    def counted(phase: str, how: dict[str, Any]) -> None:
        if phase == "stop":
            passes.append(how["generation"])

    before = gc.get_threshold()
    gc.callbacks.append(counted)
    try:
        kept = objects(20_000)
        many = len(passes)
        with rarer():
            kept += objects(20_000)
        few = len(passes) - many
    finally:
        gc.callbacks.remove(counted)
    assert many > 20
    assert few <= 1
    assert gc.get_threshold() == before


def test_a_caller_that_switched_passes_off_finds_them_off() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with rarer():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
