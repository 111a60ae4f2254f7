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

from tests.properties import examples

BENCH = Path(__file__).resolve().parents[2] / "bench"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(BENCH))  # its files import each other as scripts do
interleaved, lockstep = _load("interleaved"), _load("lockstep")
sys.path.remove(str(BENCH))


def side(name: str, journal: list[str], rate: float, foreign: float = 0.0) -> Callable[[], object]:
    def measured() -> object:
        journal.append(name)
        return interleaved.Measurement(rate, foreign)

    return measured


def pair_of(foreign: float) -> object:
    return interleaved.in_turns(side("a", [], 12.0, foreign), side("b", [], 10.0), 0, limit_cores=0.05)


def test_sides_take_turns_and_the_order_swaps_from_pair_to_pair() -> None:
    journal: list[str] = []
    ours, theirs = side("a", journal, 12.0), side("b", journal, 10.0)
    pairs = [interleaved.in_turns(ours, theirs, number) for number in range(3)]
    assert journal == ["a", "b", "b", "a", "a", "b"]
    assert [pair.ratio for pair in pairs] == pytest.approx([1.2, 1.2, 1.2])


def test_a_disturbed_pair_is_kept_in_sight_left_out_and_repeated() -> None:
    pairs = list(interleaved.repeat(lambda number: pair_of(0.4 if number == 1 else 0.0), 3))
    assert [pair.disturbed for pair in pairs] == [False, True, False, False]
    assert interleaved.undisturbed(pairs) == [pairs[0], pairs[2], pairs[3]]


def test_measuring_ends_on_a_machine_that_never_rests() -> None:
    pairs = list(interleaved.repeat(lambda _: pair_of(1.0), 3, max_attempts=5))
    assert len(pairs) == 5
    assert interleaved.undisturbed(pairs) == []


def test_a_pair_is_as_disturbed_as_its_worse_side() -> None:
    assert pair_of(0.2).foreign_cores == 0.2
    assert pair_of(0.2).disturbed
    assert not pair_of(0.05).disturbed


def turn(step: int, seconds: float, foreign: float = 0.0) -> object:
    return lockstep.Turn(step, seconds, 2 * seconds, foreign)


def test_a_disturbed_turn_is_left_out_on_both_sides() -> None:
    turns = [
        (turn(20, 1.0), turn(20, 2.0)),
        (turn(30, 9.0, foreign=0.5), turn(30, 2.0)),
        (turn(40, 1.0), turn(40, 2.0)),
    ]
    pair = lockstep.joined(turns, 100, {"mine": 1}, {})
    assert (pair.ours.rate, pair.theirs.rate, pair.disturbed) == (100.0, 50.0, False)
    assert pair.ours.facts == {"mine": 1, "quiet_turns": 2, "turns": 3, "processor_seconds": 4.0}


def test_a_pair_with_few_quiet_turns_counts_as_disturbed() -> None:
    turns = [(turn(20, 1.0), turn(20, 1.0)), *[(turn(s, 1.0, 0.5), turn(s, 1.0)) for s in (30, 40)]]
    assert lockstep.joined(turns, 100, {}, {}).disturbed


def test_sides_that_do_not_do_the_same_steps_are_refused() -> None:
    with pytest.raises(AssertionError, match="same steps"):
        lockstep.joined([(turn(20, 1.0), turn(30, 1.0))], 100, {}, {})


TURNER = """
import json, pathlib, sys, time
sys.path.insert(0, {bench!r})
from turns import Turns
turns = Turns()
for step in (10, 20, 30):
    time.sleep(0.05)
    turns.take(step)
pathlib.Path(sys.argv[2]).write_text(json.dumps({{"name": sys.argv[1]}}))
"""


def test_two_processes_take_turns_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "turner.py").write_text(TURNER.format(bench=str(BENCH)))
    monkeypatch.setattr(lockstep, "BENCH", tmp_path)
    monkeypatch.setattr(lockstep, "wait_until_idle", lambda: True)
    a, b = (lockstep.Child("turner.py", Path(name), tmp_path / f"{name}.json") for name in "ab")
    pair = lockstep.lockstep(a, b, num_turns=2, samples_a_turn=10)
    assert (pair.ours.facts["name"], pair.theirs.facts["name"]) == ("a", "b")
    assert pair.ours.facts["turns"] == 2
    assert 10 < pair.ours.rate <= 10 / 0.05


def test_a_process_that_dies_between_turns_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dies.py").write_text("raise SystemExit('out of memory')")
    monkeypatch.setattr(lockstep, "BENCH", tmp_path)
    child = lockstep.Child("dies.py", Path("run"), tmp_path / "dies.json")
    with pytest.raises(RuntimeError, match="out of memory"):
        child.first_turn()
    child.stop()


@settings(deadline=None, max_examples=examples(30))
@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=15))
def test_quartiles_are_numpys(values: list[float]) -> None:
    assert interleaved.quartiles(values) == pytest.approx(tuple(np.percentile(values, [25, 50, 75])))


def test_a_childs_own_work_is_not_foreign() -> None:
    before = interleaved.own_seconds()
    spin = "import time\nwhile time.process_time() < 0.6: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    assert interleaved.own_seconds() - before >= 0.6


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
