"""Trackers by name and by import path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from drivetrain.errors import RunError, UserError
from drivetrain.tracking.build import EventStream, build_trackers
from drivetrain.tracking.events import Event, Tracker, Warned
from drivetrain.tracking.jsonl import FILE_NAME, read_events

OWN = """
from drivetrain.tracking.events import Tracker
class Mine(Tracker):
    def __init__(self, folder): self.folder, self.seen = folder, []
    def handle(self, event): self.seen.append(event)
    def close(self): self.seen.append("closed")
class NoTracker: pass
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_trackers.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_trackers", raising=False)
    return "own_trackers"


def test_json_lines_are_always_kept(tmp_path: Path) -> None:
    EventStream(build_trackers([], tmp_path)).send(Warned("x"))
    assert [event["event"] for event in read_events(tmp_path / FILE_NAME)] == ["warning"]


def test_a_users_tracker_hears_every_event_in_order_and_is_closed(tmp_path: Path, own_module: str) -> None:
    trackers = build_trackers([f"{own_module}:Mine"], tmp_path)
    stream, mine = EventStream(trackers), trackers[-1]
    stream.send(Warned("one"))
    stream.send(Warned("two"))
    stream.close()
    assert mine.seen == [Warned("one"), Warned("two"), "closed"]  # type: ignore[attr-defined]
    assert mine.folder == tmp_path  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("progres", "did you mean progress"),
        ("comet", "others as package.module:Class"),
        ("nowhere.at:All", "nowhere"),
        ("own_trackers:Mien", "did you mean own_trackers:Mine"),
        ("own_trackers:NoTracker", "is no Tracker"),
    ],
)
def test_a_name_that_is_no_tracker_is_refused(name: str, words: str, tmp_path: Path, own_module: str) -> None:
    assert own_module == "own_trackers"
    with pytest.raises(UserError, match=words):
        build_trackers([name], tmp_path)


def test_a_tracker_that_fails_ends_the_run_and_is_named() -> None:
    class Broken(Tracker):
        def handle(self, event: Event) -> None:
            raise KeyError(event.kind)

        def close(self) -> None: ...

    with pytest.raises(RunError, match=r"Broken failed on warning: KeyError"):
        EventStream([Broken()]).send(Warned("x"))


def test_tensorboard_holds_the_curve(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from drivetrain.tracking.events import Evaluated, RolledOut, RunStarted, StepDone

    stream = EventStream(build_trackers(["tensorboard"], tmp_path))
    stream.send(RunStarted("run", "runs/run", total_steps=9, first_step=0, samples_per_epoch=10))
    for number in (1, 2, 3):
        stream.send(StepDone(number, 0.5, 1.0 / number, 1.0, 1e-3, 8.0, 0, 10, 5.0, 2.0))
    stream.send(Evaluated(3, {"accuracy": 0.5}, 0.1, best=True))
    stream.send(RolledOut(2, {"reward": 0.25}))
    stream.close()
    held = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [point.value for point in held.Scalars("train/loss")] == pytest.approx([1.0, 0.5, 1 / 3])
    assert [point.step for point in held.Scalars("evaluation/accuracy")] == [3]
    assert [(point.step, point.value) for point in held.Scalars("answers/reward")] == [(2, 0.25)]
    assert "train/scale" in held.Tags()["scalars"]
