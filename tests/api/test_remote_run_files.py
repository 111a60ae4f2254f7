"""drivetrain.train, compare and engine with run files that lie in a store or on a web server."""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import drivetrain
from drivetrain.checkpoint.directory import load, steps
from drivetrain.checkpoint.state import same
from drivetrain.errors import UserError
from drivetrain.runtime.object_store import ObjectStore
from tests.training.test_mirroring import run_in


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()
    found = tmp_path / "files" / "mine.yaml"
    found.write_text(json.dumps(run_in(tmp_path, "", steps=2, seed=7)))
    return found


@pytest.fixture
def in_store(bucket: str, run_file: Path) -> str:
    ObjectStore(f"{bucket}/files").upload(run_file.name, run_file)
    return f"{bucket}/files/{run_file.name}"


@pytest.fixture
def on_the_web(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("obstore", reason="obstore is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    handler = functools.partial(Quiet, directory=str(run_file.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/{run_file.name}"
        server.shutdown()


@pytest.mark.parametrize("where", ["in_store", "on_the_web"])
def test_a_run_file_at_an_address_trains_as_the_same_file_on_the_disk(
    where: str, run_file: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    address = request.getfixturevalue(where)
    drivetrain.train(run_file, output=tmp_path / "of-the-disk", quiet=True)
    report = drivetrain.train(address, output=tmp_path / "of-the-address", loop={"steps": 2}, quiet=True)
    assert report.status == "completed"
    ends = [load(steps(tmp_path / name / "checkpoints")[-1]) for name in ("of-the-disk", "of-the-address")]
    assert same(ends[0]["model"], ends[1]["model"])


def test_a_mirrored_run_goes_on_from_python_by_its_address_alone(bucket: str, tmp_path: Path) -> None:
    drivetrain.train(run_in(tmp_path, bucket, steps=2), quiet=True)
    shutil.rmtree(tmp_path / "disk")
    report = drivetrain.train(bucket, resume=True, steps=4, trust=True, quiet=True)
    assert report.status == "completed"
    assert (tmp_path / "disk" / "checkpoints" / "step-00000004").is_dir()


def test_a_comparison_reads_its_run_file_from_its_address(in_store: str, tmp_path: Path) -> None:
    table = drivetrain.compare(in_store, lr=[0.02])
    assert [row.status for row in table.comparison.rows] == ["completed"]
    assert table.folder == (tmp_path / "runs" / "mine-compare").absolute()


def test_a_loop_of_ones_own_takes_its_engine_from_a_run_file_at_an_address(in_store: str) -> None:
    engine = drivetrain.engine(in_store, nn.Linear(8, 1), loss=nn.MSELoss())
    assert engine.run.seed == 7, "as the file has it"


def test_an_address_without_a_run_file_is_refused_by_the_arguments_name(bucket: str) -> None:
    for call, argument in (
        (lambda place: drivetrain.train(place), "run_file"),
        (lambda place: drivetrain.compare(place, lr=[0.1]), "run_file"),
        (lambda place: drivetrain.engine(place, nn.Linear(8, 1), loss=nn.MSELoss()), "config"),
    ):
        with pytest.raises(UserError, match="there is nothing at") as raised:
            call(f"{bucket}/absent.yaml")
        assert [each.field for each in raised.value.problems] == [argument]
