"""events.jsonl: what is written is what is read, also after a kill."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.errors import RunError
from drivetrain.runtime.strict_json import dumps
from drivetrain.tracking.events import (
    EVENTS,
    CheckpointSaved,
    Evaluated,
    Event,
    Generated,
    RolledOut,
    RunFinished,
    RunStarted,
    StepDone,
    Troubled,
    Warned,
)
from drivetrain.tracking.jsonl import FILE_NAME, LONGEST, SAMPLES, JsonlTracker, odd_lines, parsed, read_events
from tests.properties import examples


def started(first_step: int = 0) -> RunStarted:
    return RunStarted("run", "runs/run", total_steps=100, first_step=first_step, samples_per_epoch=10)


def step(number: int, loss: float = 1.0) -> StepDone:
    return StepDone(number, 0.5, loss, 1.0, 1e-3, None, 0, 10 * number, 5.0, 2.0)


def test_every_event_is_a_line_with_its_kind_and_time(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    for event in (started(), step(1), Evaluated(1, {"accuracy": 0.5}, 0.1, best=True), Warned("careful: ü")):
        tracker.handle(event)
    tracker.close()
    events = list(read_events(tmp_path / FILE_NAME))
    assert [event["event"] for event in events] == ["run_started", "step", "evaluation", "warning"]
    assert events[1]["loss"] == 1.0
    assert events[2]["metrics"] == {"accuracy": 0.5}
    assert events[3]["message"] == "careful: ü"
    assert all(event["time"].endswith("+00:00") for event in events)


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    for event in (started(), *(step(n) for n in range(1, 9))):
        tracker.handle(event)
    resumed = JsonlTracker(tmp_path)
    for event in (started(first_step=5), *(step(n, loss=2.0) for n in range(6, 9))):
        resumed.handle(event)
    steps = [(e["step"], e["loss"]) for e in read_events(tmp_path / FILE_NAME) if e["event"] == "step"]
    assert steps == [(n, 1.0 if n <= 5 else 2.0) for n in range(1, 9)]


def test_answers_made_after_the_checkpoint_that_a_run_resumes_from_are_reported_once(tmp_path: Path) -> None:
    """The checkpoint of step 4 was saved before the answers for the steps after 4 were made; they are made again."""
    before = [RolledOut(step, {"reward": 0.0}, [{"answer": "a"}]) for step in (0, 2, 4)]
    evaluated = [Generated(4, [{"prompt": "p", "answer": "b"}])]
    tracker = JsonlTracker(tmp_path)
    for event in (started(), *before[:2], *evaluated, before[2]):
        tracker.handle(event)
    resumed = JsonlTracker(tmp_path)
    for event in (started(first_step=4), before[2]):
        resumed.handle(event)
    assert [each["step"] for each in read_events(tmp_path / FILE_NAME) if each["event"] == "rollout"] == [0, 2, 4]
    samples = [json.loads(line) for line in (tmp_path / SAMPLES).read_text().splitlines()]
    assert [(each["step"], each["answer"]) for each in samples] == [(0, "a"), (2, "a"), (4, "b"), (4, "a")]


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.handle(started())
    tracker.handle(step(1))
    file = tmp_path / FILE_NAME
    file.write_text(file.read_text() + '{"event": "step", "st')
    assert len(list(read_events(file))) == 2
    JsonlTracker(tmp_path).handle(started(first_step=1))
    assert [event["event"] for event in read_events(file)] == ["run_started", "step", "run_started"]


ODD = {
    "a number": b"17",
    "nothing": b"null",
    "a text": b'"text"',
    "a list": b"[1, 2]",
    "no event": b'{"step": 5}',
    "a step of no number": b'{"step": null}',
    "an event of no name": b'{"event": ["step"], "step": 1}',
    "an event without fields": b'{"event": "step"}',
    "an event of another software": b'{"event": "epoch", "step": null}',
    "a field of another type": json.dumps({**step(7).as_dict(), "step": "7"}).encode(),
    "a truth for a number": json.dumps({**step(7).as_dict(), "loss": True}).encode(),
    "rubbish": bytes(range(128, 256)) + b"\0\r",
    "half a line": json.dumps(step(7).as_dict()).encode()[:40],
    "depths": b"[" * 100_000,
    "a number of many digits": b'{"event": "step", "step": ' + b"1" * 10_000 + b"}",
    "a number beyond all floats": json.dumps({**step(7).as_dict(), "loss": 10**400}).encode(),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD.keys())
def test_an_odd_line_is_passed_over_and_named_once_and_stays_when_a_run_resumes(tmp_path: Path, odd: bytes) -> None:
    tracker, file = JsonlTracker(tmp_path), tmp_path / FILE_NAME
    for event in (started(), step(1)):
        tracker.handle(event)
    with file.open("ab") as opened:
        opened.write(odd + b"\n" + odd)  # the second one at the end of the file, cut off by a kill
    assert parsed(odd) is None
    resumed = JsonlTracker(tmp_path)
    for event in (started(first_step=1), step(2), step(3)):
        resumed.handle(event)
    warnings: list[str] = []
    found = list(read_events(file, warnings.append))
    assert [(e["event"], e.get("step")) for e in found if e["event"] == "step"] == [("step", n) for n in (1, 2, 3)]
    assert warnings == [f"{file}: lines 3, 4 of it are no events of a run, and passed over"] == odd_lines(file)
    JsonlTracker(tmp_path).handle(started(first_step=2))
    assert file.read_bytes().split(b"\n").count(odd) == 2, "never lost"
    assert [e["step"] for e in read_events(file, warnings.append) if e["event"] == "step"] == [1, 2]


def test_a_line_of_a_hundred_megabytes_is_neither_held_nor_lost(tmp_path: Path) -> None:
    JsonlTracker(tmp_path).handle(started())
    file, long = tmp_path / FILE_NAME, {**step(9).as_dict(), "more": "x" * 100_000_000}
    with file.open("a") as opened:
        opened.write(json.dumps(long) + "\n")
    size = file.stat().st_size
    tracemalloc.start()
    JsonlTracker(tmp_path).handle(started(first_step=1))
    warnings: list[str] = []
    events = list(read_events(file, warnings.append))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * LONGEST < 100_000_000
    assert [event["event"] for event in events] == ["run_started", "run_started"]
    assert warnings == [f"{file}: line 2 of it is no event of a run, and passed over"]
    assert file.stat().st_size > size


def test_many_odd_lines_are_counted(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("17\n\n" * 20)
    [warning] = odd_lines(tmp_path / FILE_NAME)
    assert "lines 1, 3, 5, 7, 9 and 15 more of it" in warning
    assert odd_lines(tmp_path / "none") == []


def test_readers_of_nothing_particular_are_warned_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE_NAME).write_text("17\n")
    assert list(read_events(tmp_path / FILE_NAME)) == []
    assert "line 1 of it is no event of a run" in caplog.text


def test_answered_prompts_of_later_steps_go_and_odd_lines_among_them_stay(tmp_path: Path) -> None:
    tracker, file = JsonlTracker(tmp_path), tmp_path / SAMPLES
    for number in (2, 4):
        tracker.handle(Generated(number, [{"prompt": "p", "answer": str(number), "reference": None}]))
        with file.open("a") as opened:
            opened.write('null\n{"step": "4"}\n')
    JsonlTracker(tmp_path).handle(started(first_step=2))
    lines = file.read_text().splitlines()
    assert lines[1:] == ["null", '{"step": "4"}'] * 2
    assert json.loads(lines[0])["answer"] == "2"


@pytest.mark.parametrize(
    "event",
    [
        RunStarted("run", "out", 10, 0, 5, {"precision": "fp32", "blocks": [1, {"a": None}]}),
        StepDone(1, 0.5, math.inf, -math.inf, 1e-3, None, 0, 10, 5.0, 2.0),
        StepDone(1, 1, 2, 3, 0, 65536.0, 0, 10, 5, 2),
        Evaluated(1, {"loss": math.inf, "accuracy": 1}, 0.1, best=False),
        CheckpointSaved(1, "path", 5, 0.1),
        Warned("nan"),
        Troubled(1, "spike", "told", "m", math.inf, 1.0, None, 0.5, [3, 4], None),
        RunFinished("failed", -1, "why"),
    ],
    ids=lambda event: event.kind,
)
def test_every_event_is_read_as_it_was_sent(event: Event) -> None:
    found = parsed(dumps(event.as_dict()).encode())
    assert found == event.as_dict()


def test_every_kind_of_event_can_be_read() -> None:
    """Generated goes into a file of its own."""
    assert {event for event in Event.__subclasses__() if event.__module__ == Event.__module__} == set(EVENTS)


def test_a_broken_line_within_a_file_costs_that_line_alone(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.handle(started())
    file = tmp_path / FILE_NAME
    file.write_text(file.read_text() + '{"event": "step", "st\n')
    tracker.handle(step(2))
    assert [event["event"] for event in read_events(file)] == ["run_started", "step"]


def test_what_a_kill_cut_off_does_not_spoil_what_is_written_next(tmp_path: Path) -> None:
    JsonlTracker(tmp_path).handle(started())
    file = tmp_path / FILE_NAME
    file.write_text(file.read_text() + '{"event": "step", "st')
    JsonlTracker(tmp_path).handle(Warned("before the run starts again"))
    assert [event["event"] for event in read_events(file)] == ["run_started", "warning"]


def test_a_last_line_whose_end_an_editor_took_is_kept(tmp_path: Path) -> None:
    JsonlTracker(tmp_path).handle(started())
    file = tmp_path / FILE_NAME
    file.write_text(file.read_text().rstrip("\n"))
    JsonlTracker(tmp_path).handle(Warned("next"))
    assert [event["event"] for event in read_events(file)] == ["run_started", "warning"]


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.handle(started())
    whole = (tmp_path / FILE_NAME).read_bytes()
    script = FILLED.format(most=len(whole) + 40, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "events.jsonl cannot be written: " in done.stderr
    assert (tmp_path / FILE_NAME).read_bytes() == whole


FILLED = """
import resource, signal
from pathlib import Path
from drivetrain.runtime.strict_json import dumps
from drivetrain.tracking.events import Warned
from drivetrain.tracking.jsonl import JsonlTracker
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}))
JsonlTracker(Path({folder!r})).handle(Warned("x" * 200))
"""


def strictly(line: str) -> Any:
    """As a reader does that takes JSON at its word."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(line, parse_constant=refuse)


def test_numbers_that_json_lacks_are_null_for_others_and_themselves_for_us(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path)
    tracker.handle(started())
    tracker.handle(step(1, loss=math.nan))
    tracker.handle(Evaluated(1, {"accuracy": 0.5, "perplexity": math.inf}, 0.1, best=True))
    tracker.handle(Warned("nan"))
    for resumed in (False, True):
        if resumed:  # what stays is written anew
            tracker.handle(started(first_step=1))
        lines = [strictly(line) for line in (tmp_path / FILE_NAME).read_text().splitlines()]
        assert lines[1]["loss"] is None
        assert lines[1]["not_finite"] == {"loss": "nan"}
        assert lines[2]["metrics"] == {"accuracy": 0.5, "perplexity": None}
        assert lines[2]["not_finite"] == {"metrics": {"perplexity": "inf"}}
        _, stepped, evaluated, warned, *_ = read_events(tmp_path / FILE_NAME)
        assert math.isnan(stepped["loss"])
        assert evaluated["metrics"] == {"accuracy": 0.5, "perplexity": math.inf}
        assert warned["message"] == "nan", "a text is none of them"
        assert not any("not_finite" in event for event in (stepped, evaluated, warned))


@pytest.mark.parametrize("name", [FILE_NAME, SAMPLES])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_record_that_cannot_be_cut_is_reported_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    tracker = JsonlTracker(tmp_path)
    for event in (started(), step(1), step(2), Generated(2, [{"prompt": "p", "answer": "a", "reference": None}])):
        tracker.handle(event)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    replace = Path.replace

    def refused(path: Path, target: Path) -> Path:
        if path.name.startswith(f".{name}"):
            raise OSError(number, os.strerror(number))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refused)
    with pytest.raises(RunError, match=rf"{name} cannot be written: {os.strerror(number)}; .*, then go on with --res"):
        tracker.handle(started(first_step=1))
    assert (tmp_path / name).read_bytes() == before[name]
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_is_gone_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot be written.*--resume"):
        JsonlTracker(tmp_path / "gone").handle(step(1))


@settings(deadline=None, max_examples=examples(50))
@given(message=st.text(), loss=st.floats())
def test_any_text_and_number_is_one_line_of_json(
    message: str, loss: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("events")
    tracker = JsonlTracker(folder)
    tracker.handle(Warned(message.encode("utf-8", "replace").decode()))
    tracker.handle(step(1, loss))
    warned, stepped = read_events(folder / FILE_NAME)
    assert warned["message"] == message.encode("utf-8", "replace").decode()
    assert repr(stepped["loss"]) == repr(loss)
