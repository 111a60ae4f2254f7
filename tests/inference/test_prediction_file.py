"""The file of predictions."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from drivetrain.config.load import validate
from drivetrain.errors import UserError
from drivetrain.inference.prediction_file import PredictionFile, check_place
from drivetrain.inference.prediction_request import request_of


def test_predictions_are_written_whole_as_json_lines_or_csv(tmp_path: Path) -> None:
    rows = [{"sample": "a, b", "label": "ü"}, {"sample": 'say "x"', "label": "2"}]
    assert PredictionFile(tmp_path / "deep" / "out.csv").write(iter(rows)) == 2
    with (tmp_path / "deep" / "out.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == rows
    assert PredictionFile(tmp_path / "out.jsonl").write(iter(rows)) == 2
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == rows


def test_predictions_that_cannot_be_written_are_reported_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        PredictionFile(tmp_path / "file" / "out.csv").write(iter([{"sample": 1}]))


def test_an_error_of_what_makes_the_rows_is_not_the_files(tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield {"sample": 1}
        raise FileNotFoundError("picture.png")

    with pytest.raises(FileNotFoundError, match=r"picture\.png"):
        PredictionFile(tmp_path / "out.jsonl").write(rows())


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / ".out.csv.partial").symlink_to("/dev/full")
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        PredictionFile(tmp_path / "out.csv").write(iter([{"sample": 1}]))


def test_a_failure_on_the_way_leaves_no_half_file(tmp_path: Path) -> None:
    def rows():  # type: ignore[no-untyped-def]
        yield {"sample": 1}
        raise RuntimeError("broken")

    (tmp_path / "out.csv").write_text("earlier")
    with pytest.raises(RuntimeError, match="broken"):
        PredictionFile(tmp_path / "out.csv").write(rows())
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]
    assert (tmp_path / "out.csv").read_text() == "earlier"


def test_predictions_never_replace_what_they_are_made_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = {"train": "train.csv", "evaluation": str(tmp_path / "evaluation.csv")}
    run, _ = validate(
        {
            "workload": {"type": "text_classification", "model": {"path": "bert"}, "data": data},
            "batch_size": 2,
            "loop": {"steps": 1},
        },
        [],
    )
    assert run is not None
    for name in ("train.csv", "evaluation.csv", "new.csv", "earlier.csv"):
        Path(name).touch()
    for path in (tmp_path / "train.csv", Path("evaluation.csv"), Path("new.csv")):
        with pytest.raises(UserError, match=f"{path.name} is a file that the run is made from"):
            check_place(path, run, "./new.csv")
    check_place(Path("earlier.csv"), run, "./new.csv")
    PredictionFile(Path("earlier.csv")).write(iter([{"sample": 1, "prediction": 2}]))
    PredictionFile(Path("earlier.jsonl")).write(iter([{"sample": 1, "prediction": 2}]))
    for name in ("earlier.csv", "earlier.jsonl", "none.csv"):
        check_place(Path(name), run, None)
    Path("events.jsonl").write_text('{"time": "now"}\n')
    Path("mine.csv").write_text("text,label\n")
    Path("binary.csv").write_bytes(b"\xff\xfe\x00")
    for name in ("events.jsonl", "mine.csv", "binary.csv"):
        with pytest.raises(UserError, match=f"{name} is there, and holds something else than predictions"):
            check_place(Path(name), run, None)
    with pytest.raises(UserError, match=r"run.yaml does not end in .jsonl or .csv"):
        check_place(Path("run.yaml"), run, None)


def test_values_stand_under_their_own_names_though_a_row_lacks_some(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"sample": "a", "reference": "x", "probabilities": {"x": 0.1, "y": 0.9}},
        {"sample": "b", "probabilities": {"y": 0.8, "x": 0.2}},
    ]
    PredictionFile(tmp_path / "p.csv").write(iter(rows))
    assert (tmp_path / "p.csv").read_text().splitlines() == [
        "sample,reference,probabilities.x,probabilities.y",
        "a,x,0.1,0.9",
        "b,,0.2,0.8",
    ]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"sample": "a", "x": 1}, {"sample": "b", "y": 2}], "the row of b has y, which the first row has not"),
        ([{"sample": "a", "p": {"x": 1}, "p.x": 2}], "two values of the row of a have one name"),
    ],
)
def test_rows_that_have_no_common_columns_are_refused_in_a_table(
    rows: list[dict[str, Any]], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        PredictionFile(tmp_path / "p.csv").write(iter(rows))
    assert not (tmp_path / "p.csv").exists()


def test_json_lines_that_a_kill_cut_short_go_on_where_they_stopped(tmp_path: Path) -> None:
    path, request = tmp_path / "out.jsonl", {"run": "a"}

    def broken() -> Iterator[dict[str, Any]]:
        yield {"sample": 0}
        yield {"sample": 1}
        raise KeyboardInterrupt

    first = PredictionFile(path)
    assert first.begin(request) == 0
    with pytest.raises(KeyboardInterrupt):
        first.write(broken())
    with (tmp_path / ".out.jsonl.partial").open("a") as file:
        file.write('{"sam')  # as a kill leaves it
    again = PredictionFile(path)
    assert again.begin(request) == 2
    assert again.write(iter([{"sample": 2}])) == 3
    assert [json.loads(line)["sample"] for line in path.read_text().splitlines()] == [0, 1, 2]
    assert [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("named", ["evaluation", "train"])
def test_the_runs_own_data_are_a_part_of_the_request(named: str, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.png").write_text("a")
    data = {"train": "train.csv", named: str(folder)}
    workload = {"type": "text_classification", "model": {"path": "bert"}, "data": data}
    run, _ = validate({"workload": workload, "batch_size": 2, "loop": {"steps": 1}}, [])
    assert run is not None

    def request() -> Any:
        return json.loads(json.dumps(request_of(run, tmp_path / "step", None, [])))

    first = request()
    assert request() == first
    (folder / "deep" / "a.png").write_text("other")
    second = request()
    assert second != first
    (folder / "deep" / "a.png").rename(folder / "deep" / "b.png")
    assert request() != second


def interrupted(path: Path, request: dict[str, Any], rows: int, overwrite: bool = False) -> PredictionFile:
    """Begins a prediction that Ctrl-C ends after some rows."""
    file = PredictionFile(path, overwrite)
    start = file.begin(request)

    def made() -> Iterator[dict[str, Any]]:
        yield from ({"sample": number} for number in range(start, start + rows))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        file.write(made())
    return file


def test_what_another_request_left_is_neither_gone_on_with_nor_lost(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    file = interrupted(path, {"run": "a"}, 2)
    other = PredictionFile(path)

    def rows() -> Iterator[dict[str, Any]]:
        other.begin({"run": "b"})
        yield {"sample": 0}

    with pytest.raises(
        UserError, match=r"holds 2 rows of an interrupted prediction to out\.jsonl, and this is another"
    ):
        other.write(rows())
    assert PredictionFile(path).begin({"run": "a"}) == 2
    assert file.left() == f": 2 rows are kept in {tmp_path}/.out.jsonl.partial, and the same command goes on"
    anew = interrupted(path, {"run": "b"}, 1, overwrite=True)
    assert PredictionFile(path).begin({"run": "b"}) == 1
    assert anew.left().endswith(
        f": 1 row is kept in {tmp_path}/.out.jsonl.partial, and the same command without --overwrite goes on"
    )


def test_rows_are_kept_when_their_prediction_is_interrupted_again_before_it_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    interrupted(path, {"run": "a"}, 2)
    again = PredictionFile(path)

    def loading() -> Iterator[dict[str, Any]]:
        raise KeyboardInterrupt
        yield {}

    with pytest.raises(KeyboardInterrupt):
        again.write(loading())
    assert again.begin({"run": "a"}) == 2


def test_an_interrupted_table_says_that_it_keeps_no_rows(tmp_path: Path) -> None:
    assert "a .csv keeps no rows" in interrupted(tmp_path / "out.csv", {"run": "a"}, 2).left()
    assert interrupted(tmp_path / "out.jsonl", {"run": "a"}, 0).left() == " before the first row was written"


@contextmanager
def being_written(path: Path) -> Iterator[None]:
    """Another process writes two rows of the request {"run": "a"} and goes on."""
    writer = (
        "import sys, time; from pathlib import Path; from drivetrain.inference.prediction_file import PredictionFile\n"
        "def rows():\n"
        "    yield {'sample': file.begin({'run': 'a'})}\n"
        "    yield {'sample': 1}\n"
        "    print('ready', flush=True); time.sleep(60)\n"
        "file = PredictionFile(Path(sys.argv[1])); file.write(rows())"
    )
    with subprocess.Popen([sys.executable, "-c", writer, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_process_that_would_write_the_file_is_refused_and_changes_nothing(
    tmp_path: Path, name: str, overwrite: bool
) -> None:
    path, request = tmp_path / name, {"run": "a"}
    with being_written(path):
        there = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
        second = PredictionFile(path, overwrite)

        def rows() -> Iterator[dict[str, Any]]:
            second.begin(request)
            raise AssertionError("it is refused before any work")
            yield {}

        for write in (lambda: second.begin(request), lambda: second.write(rows()), lambda: second.write(iter([{}]))):
            with pytest.raises(UserError, match=rf"(?s)another process is writing .*{name} \(process \d+ .*wait until"):
                write()
        assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == there
    assert PredictionFile(path, overwrite).begin(request) == (2 if name == "out.jsonl" and not overwrite else 0)


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_a_file_that_another_process_wrote_too_is_no_result(tmp_path: Path, name: str) -> None:
    """Where the file system has no locks, nothing keeps the other one out."""
    file = PredictionFile(tmp_path / name)

    def rows() -> Iterator[dict[str, Any]]:
        file.begin({"run": "a"})
        yield {"sample": 0, "text": "two\nlines"}
        with (tmp_path / f".{name}.partial").open("a") as other:
            other.write('{"sample": 0}\n')
        yield {"sample": 1, "text": "one"}

    with pytest.raises(UserError, match=r"has \d lines, and \d were written: another process wrote it too"):
        file.write(rows())
    assert [*tmp_path.iterdir()] == []
