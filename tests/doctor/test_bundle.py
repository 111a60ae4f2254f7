"""The file that a user sends to a maintainer: what is in it, and what is not."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from drivetrain.doctor import bundle, findings
from drivetrain.doctor.bundle import ROOT, pack
from drivetrain.errors import RunError, UserError


def contents(file: Path) -> dict[str, str]:
    with tarfile.open(file) as archive:
        opened = {member.name.removeprefix(f"{ROOT}/"): archive.extractfile(member) for member in archive}
        return {name: content.read().decode() for name, content in opened.items() if content is not None}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with records, data, weights, and a link to what is no part of it."""
    folder = tmp_path / "run"
    (folder / "hangs").mkdir(parents=True)
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    (folder / "run.yaml").write_text("name: digits\ntracking:\n  api_key: hunter2\n")
    (folder / "report.json").write_text('{\n "steps": 3\n}')
    (folder / "events.jsonl").write_text('{"event": "step"}\n')
    (folder / "samples.jsonl").write_text("what the model answered")
    (folder / "out.log").write_text("https://me:hunter2@host")
    (folder / "hangs" / "1.txt").write_text("rank 1 waits")
    (folder / "checkpoints" / "step-1" / "model.safetensors").write_text("weights")
    (tmp_path / "private").write_text("hunter2")
    (folder / "linked.log").symlink_to(tmp_path / "private")
    return folder


def test_a_bundle_holds_the_records_of_the_run_and_neither_data_nor_secrets(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    sizes = pack({"device": "cpu"}, run, tmp_path / "bundle.tar.gz")
    found = contents(tmp_path / "bundle.tar.gz")
    assert found.keys() == sizes.keys()
    assert set(found) >= {"doctor.json", "packages.txt", "environment.txt"}
    assert {name for name in found if name.startswith("run/")} == {
        *("run/run.yaml", "run/report.json", "run/events.jsonl", "run/out.log", "run/hangs/1.txt", "run/files.txt")
    }
    assert "hunter2" not in str(found)
    assert json.loads(found["doctor.json"]) == {"device": "cpu"}
    assert f"torch=={version('torch')}" in found["packages.txt"].splitlines()
    assert "NCCL_DEBUG=INFO" in found["environment.txt"].splitlines()
    assert "name: digits" in found["run/run.yaml"]
    assert "checkpoints/step-1/model.safetensors" in found["run/files.txt"]


def test_of_a_long_record_the_end_is_packed_in_whole_lines(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "TAIL_BYTES", 50)
    (run / "events.jsonl").write_text("".join(f"line {number}\n" for number in range(100)))
    pack({}, run, tmp_path / "bundle.tar.gz")
    lines = contents(tmp_path / "bundle.tar.gz")["run/events.jsonl"].splitlines()
    assert lines == [f"line {number}" for number in range(94, 100)]


def test_what_cannot_be_packed_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("kept")
    with pytest.raises(UserError, match="is there already"):
        pack({}, run, tmp_path / "there")
    assert (tmp_path / "there").read_text() == "kept"
    with pytest.raises(UserError, match=r"holds no run\.yaml"):
        pack({}, tmp_path, tmp_path / "new")
    with pytest.raises(RunError, match="cannot be written"):
        pack({}, run, tmp_path / "nowhere" / "new")


def test_the_verb_packs_and_says_what_is_inside(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    drivetrain: Callable[..., tuple[int, str, str]],
) -> None:
    monkeypatch.setattr(findings, "examine", lambda: {"device": "cpu"})
    code, out, _ = drivetrain("doctor", str(run), "--bundle", "-o", str(tmp_path / "bundle.tar.gz"))
    assert code == 0
    for name in contents(tmp_path / "bundle.tar.gz"):
        assert name in out
    assert "look through it before you send it" in " ".join(out.split())
    code, _, err = drivetrain("doctor", str(run))
    assert code == 2
    assert "--bundle" in err
