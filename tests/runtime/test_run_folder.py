"""The run folder: made ready, protected, and described so that a run can be repeated."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from drivetrain.config.load import load, validate
from drivetrain.config.run import RunConfig
from drivetrain.errors import RunError, UserError
from drivetrain.runtime.run_folder import RunFolder, SameFolder


@pytest.fixture
def finished(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.prepare(resume=False, overwrite=False)
    folder.run_file.write_text("x")
    (folder.path / "events.jsonl").write_text("")
    (folder.checkpoints / "step-00000001").mkdir(parents=True)
    (folder.path / "predictions.csv").write_text("mine")
    return folder


def test_a_folder_with_a_run_is_refused_with_the_three_ways_on(finished: RunFolder) -> None:
    with pytest.raises(UserError, match=r"run.yaml, checkpoints.*\n.*--resume.*--overwrite.*another output"):
        finished.prepare(resume=False, overwrite=False)


def test_a_run_that_died_before_its_first_step_does_not_block_its_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.prepare(resume=False, overwrite=False)
    folder.run_file.write_text("of the dead one")
    (folder.path / "environment.json").write_text("{}")
    events = folder.path / "events.jsonl"
    events.write_text('{"time": "x", "event": "started"}\n')
    folder.prepare(resume=False, overwrite=False)
    folder.begun()
    assert not folder.run_file.exists()
    events.write_text('{"time": "x", "event": "started"}\n{"time": "x", "event": "step", "step": 1}\n')
    with pytest.raises(UserError, match="already holds a run"):
        folder.prepare(resume=False, overwrite=False)


def test_links_to_checkpoints_go_with_the_run_that_is_overwritten_and_come_back_with_it(finished: RunFolder) -> None:
    last = finished.path / "last"
    last.symlink_to("checkpoints/step-00000001", target_is_directory=True)
    (finished.path / "best").mkdir()  # a folder of the user's
    finished.prepare(resume=False, overwrite=True)
    assert not last.is_symlink()
    last.symlink_to("checkpoints/step-00000002")
    assert finished.put_back()
    assert last.readlink() == Path("checkpoints/step-00000001")
    finished.prepare(resume=False, overwrite=True)
    finished.begun()
    assert sorted(path.name for path in finished.path.iterdir()) == ["best", "predictions.csv"]


def test_resuming_keeps_the_run(finished: RunFolder) -> None:
    finished.prepare(resume=True, overwrite=False)
    assert finished.run_file.exists()
    assert finished.checkpoints.exists()


def test_overwriting_takes_the_runs_files_and_no_other(finished: RunFolder) -> None:
    finished.prepare(resume=False, overwrite=True)
    assert not finished.run_file.exists()
    finished.begun()
    assert [path.name for path in finished.path.iterdir()] == ["predictions.csv"]
    assert not finished.put_back()


def test_what_was_to_be_overwritten_comes_back_where_the_run_does_not_begin(finished: RunFolder) -> None:
    for _ in range(2):
        finished.prepare(resume=False, overwrite=True)
        (finished.path / "events.jsonl").write_text("of the new one")
        finished.checkpoints.mkdir()
        assert finished.put_back()
        assert finished.run_file.read_text() == "x"
        assert (finished.path / "events.jsonl").read_text() == ""
        assert [path.name for path in finished.checkpoints.iterdir()] == ["step-00000001"]
        assert not (finished.path / ".overwritten").exists()


def test_an_overwriting_start_that_is_killed_on_the_way_loses_nothing(
    finished: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some results stand aside already, others not yet; the next start puts them together again."""
    rename, moved = Path.rename, list[Path]()

    def killed(path: Path, to: Path) -> Path:
        if moved:
            raise KeyboardInterrupt
        moved.append(path)
        return rename(path, to)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            finished.prepare(resume=False, overwrite=True)
    with pytest.raises(UserError, match="already holds a run"):
        finished.prepare(resume=False, overwrite=False)
    assert finished.run_file.read_text() == "x"
    assert [path.name for path in finished.checkpoints.iterdir()] == ["step-00000001"]
    assert not (finished.path / ".overwritten").exists()


def test_a_folder_that_cannot_be_put_aside_stays(finished: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a disk is mounted on checkpoints."""
    rename = Path.rename

    def busy(path: Path, to: Path) -> Path:
        if path == finished.checkpoints:
            raise OSError(16, "Device or resource busy")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", busy)
    with pytest.raises(UserError, match="cannot be overwritten: Device or resource busy"):
        finished.prepare(resume=False, overwrite=True)
    assert finished.run_file.read_text() == "x"
    assert finished.checkpoints.exists()


def test_a_run_does_not_overwrite_what_it_is_made_from(finished: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(finished.path.parent)
    sources = ["adamw", "checkpoints", "run", "run/checkpoints/step-00000001"]
    with pytest.raises(UserError, match="run/checkpoints/step-00000001 is what the run is made from"):
        finished.prepare(resume=False, overwrite=True, sources=sources)
    assert finished.run_file.exists()
    finished.prepare(resume=False, overwrite=True, sources=sources[:-1])


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_no_run_left_is_never_overwritten(tmp_path: Path, overwrite: bool) -> None:
    """With output=. a run lies among the project's own files."""
    (tmp_path / "run.yaml").write_text("# mine")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match=r"run.yaml, checkpoints, which no run left there\n +give another output"):
        RunFolder(tmp_path).prepare(resume=False, overwrite=overwrite)
    with pytest.raises(UserError, match=r"run.yaml, which no run left there"):
        RunFolder(tmp_path).prepare(resume=True, overwrite=False)
    assert (tmp_path / "run.yaml").read_text() == "# mine"
    assert (tmp_path / "checkpoints").exists()


def test_checkpoints_alone_can_be_gone_on_from(tmp_path: Path) -> None:
    """As other software's, converted."""
    (tmp_path / "checkpoints").mkdir()
    RunFolder(tmp_path).prepare(resume=True, overwrite=False)


def test_overwriting_deletes_nothing_that_a_link_points_to(finished: RunFolder, tmp_path: Path) -> None:
    """As where checkpoints are put on a larger disk."""
    (tmp_path / "large" / "step-00000001").mkdir(parents=True)
    shutil.rmtree(finished.checkpoints)
    finished.checkpoints.symlink_to(tmp_path / "large")
    with pytest.raises(UserError, match=r"checkpoints in .* points to a folder elsewhere"):
        finished.prepare(resume=False, overwrite=True)
    assert finished.run_file.exists(), "refused before anything was deleted"
    assert (tmp_path / "large" / "step-00000001").exists()


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        RunFolder(tmp_path / "file" / "run").prepare(resume=False, overwrite=False)


def config_of(width: int) -> RunConfig:
    workload = {"type": "module", "path": "mine.py", "options": {"width": width}}
    config, _ = validate({"workload": workload, "batch_size": 2, "loop": {"steps": 1}}, [])
    assert config is not None
    return config


def test_the_described_run_is_a_run_file_of_the_same_run(tmp_path: Path) -> None:
    config = config_of(3)
    folder = RunFolder(tmp_path)
    folder.describe(config, {"versions": {"torch": "2"}})
    again, problems = load(folder.run_file)
    assert not problems
    assert again == config
    assert json.loads((tmp_path / "environment.json").read_text())["versions"] == {"torch": "2"}


@pytest.mark.parametrize(
    ("failing", "call"), [("environment.json", "write_text"), ("run.yaml", "write_text"), ("run.yaml", "replace")]
)
@pytest.mark.parametrize(
    ("number", "cure"),
    [(errno.ENOSPC, "make room"), (errno.EDQUOT, "quota"), (errno.EROFS, "make the file system writable")],
)
def test_a_run_that_cannot_be_described_keeps_the_description_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, call: str, number: int, cure: str
) -> None:
    folder, real = RunFolder(tmp_path), getattr(Path, call)
    folder.describe(config_of(3), {"versions": {"torch": "2"}})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(path: Path, *given: object, **named: object) -> object:
        if path.name.startswith(f".{failing}"):
            raise OSError(number, os.strerror(number))
        return real(path, *given, **named)

    monkeypatch.setattr(Path, call, full)
    with pytest.raises(RunError, match=f"{failing} cannot be written: {os.strerror(number)}; .*{cure}.* --resume"):
        folder.describe(config_of(4), {"versions": {"torch": "3"}})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_is_deleted_moved_or_replaced_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    same = SameFolder(path)
    (path / "file").write_text("")
    same.check()
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=r"run is no longer the folder .* \(No such file or directory\).*put it back"):
        same.check()
    path.mkdir()
    with pytest.raises(RunError, match="another one lies there"):
        same.check()
    path.rmdir()
    (tmp_path / "elsewhere").rename(path)
    same.check()


def test_a_folder_that_is_deleted_and_made_again_is_another_one(tmp_path: Path) -> None:
    """Though many file systems give a new folder the number of the one that was deleted last."""
    path = tmp_path / "run"
    path.mkdir()
    same = SameFolder(path)
    for _ in range(20):
        path.rmdir()
        path.mkdir()
        assert not same.in_place
