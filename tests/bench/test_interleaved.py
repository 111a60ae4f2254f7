"""The benches' bookkeeping, without measuring anything."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

BENCH = Path(__file__).resolve().parents[2] / "bench"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


interleaved = _load("interleaved")


def side(name: str, journal: list[str], rate: float, foreign: dict[int, float]) -> Callable[[int], object]:
    def measured(number: int) -> object:
        journal.append(f"{name}{number}")
        return interleaved.Measurement(rate, foreign.get(number, 0.0))

    return measured


def pairs_of(num_pairs: int, foreign: dict[int, float], **options: object) -> tuple[list[str], list]:
    journal: list[str] = []
    ours, theirs = side("a", journal, 12.0, foreign), side("b", journal, 10.0, {})
    return journal, list(interleaved.interleave(ours, theirs, num_pairs, **options))


def test_sides_take_turns_and_the_order_swaps_from_pair_to_pair() -> None:
    journal, pairs = pairs_of(3, {})
    assert journal == ["a0", "b0", "b1", "a1", "a2", "b2"]
    assert [pair.ratio for pair in pairs] == pytest.approx([1.2, 1.2, 1.2])


def test_a_disturbed_pair_is_kept_in_sight_left_out_and_repeated() -> None:
    _, pairs = pairs_of(3, {1: 0.4})
    assert [pair.is_disturbed(0.05) for pair in pairs] == [False, True, False, False]
    assert interleaved.undisturbed(pairs) == [pairs[0], pairs[2], pairs[3]]


def test_measuring_ends_on_a_machine_that_never_rests() -> None:
    _, pairs = pairs_of(3, dict.fromkeys(range(100), 1.0), max_attempts=5)
    assert len(pairs) == 5
    assert interleaved.undisturbed(pairs) == []


def test_a_pair_is_as_disturbed_as_its_worse_side() -> None:
    pair = interleaved.Pair(interleaved.Measurement(1.0, 0.01), interleaved.Measurement(1.0, 0.2))
    assert pair.foreign_cores == 0.2
    assert pair.is_disturbed(0.1)
    assert not pair.is_disturbed(0.2)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=15))
def test_quartiles_are_numpys(values: list[float]) -> None:
    assert interleaved.quartiles(values) == pytest.approx(tuple(np.percentile(values, [25, 50, 75])))


def test_a_childs_own_work_is_not_foreign() -> None:
    watch = interleaved.ForeignWork()
    spin = "import time; start = time.process_time()\nwhile time.process_time() - start < 0.6: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    own = interleaved._own_seconds()
    assert watch.cores() >= 0.0
    assert own >= 0.6


def test_work_of_others_is_seen() -> None:
    watch = interleaved.ForeignWork()
    spin = "import time; start = time.process_time()\nwhile time.process_time() - start < 30: pass"
    other = subprocess.Popen([sys.executable, "-c", spin])  # not waited for while watched: a stranger
    try:
        time.sleep(1.0)
        assert watch.cores() > 0.3
    finally:
        other.kill()
        other.wait()


def test_a_child_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit('no data here')")
    monkeypatch.setattr(interleaved, "BENCH", tmp_path)
    monkeypatch.setattr(interleaved, "wait_until_idle", lambda: True)
    with pytest.raises(RuntimeError, match="no data here"):
        interleaved.measure("broken.py", tmp_path / "run.yaml", tmp_path / "result.json")


def test_a_child_reports_its_rate_and_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fine.py").write_text(
        "import json, sys, pathlib\npathlib.Path(sys.argv[2]).write_text(json.dumps({'rate': 5.0, 'accuracy': 0.5}))"
    )
    monkeypatch.setattr(interleaved, "BENCH", tmp_path)
    monkeypatch.setattr(interleaved, "wait_until_idle", lambda: True)
    measured = interleaved.measure("fine.py", tmp_path / "run.yaml", tmp_path / "result.json")
    assert measured.rate == 5.0
    assert measured.facts == {"accuracy": 0.5}
