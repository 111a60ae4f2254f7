"""Run files, runs, checkpoints and data that the command line is given by their addresses in a store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import drivetrain
from drivetrain.checkpoint.directory import load, steps
from drivetrain.checkpoint.state import same
from drivetrain.cli.app import app
from drivetrain.config.files import read_yaml
from drivetrain.errors import UserError
from drivetrain.runtime.object_store import ObjectStore
from tests.training.test_mirroring import prefixes_in, run_in, train


@pytest.fixture
def mirror(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a run of six steps, three checkpoints of which are there: after 2, 4 and 6."""
    monkeypatch.chdir(tmp_path)
    found = f"{bucket}/runs/one"
    train(run_in(tmp_path, found, steps=6, checkpoints={"every_steps": 2, "keep_last": 3}))
    return found


def typed(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*words])
    refused = isinstance(done.exception, UserError)  # the entry point ends with 2 then
    assert (2 if refused else done.exit_code) == code, done.output
    return f"{done.output}{done.exception}" if refused else done.output


def put(address: str, file: Path) -> str:
    """Uploads a file and returns its address."""
    folder, _, name = address.rpartition("/")
    ObjectStore(folder).upload(name, file)
    return address


def checkpoint_of(mirror: str, step: int) -> str:
    [name] = [each for each in prefixes_in(mirror) if each.startswith(f"step-{step:08d}")]
    return f"{mirror}/checkpoints/{name}"


def test_a_checkpoint_is_named_by_its_address(mirror: str, tmp_path: Path) -> None:
    chosen = checkpoint_of(mirror, 2)
    out = typed("evaluate", mirror, "--checkpoint", chosen, "--trust")
    expected = drivetrain.evaluate(tmp_path / "disk", "disk/checkpoints/step-00000002")["metrics"]
    assert json.loads(out[out.index("{") :])["metrics"] == pytest.approx(expected)
    typed("predict", mirror, "--checkpoint", chosen, "--trust", "-o", "rows.jsonl")
    typed("predict", "disk", "--checkpoint", "disk/checkpoints/step-00000002", "--trust", "-o", "same.jsonl")
    assert Path("rows.jsonl").read_text() == Path("same.jsonl").read_text()
    model = drivetrain.load(tmp_path / "disk", chosen)
    other = drivetrain.load(tmp_path / "disk", "disk/checkpoints/step-00000002")
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_checkpoints_of_an_address_are_looked_into_verified_and_converted(mirror: str) -> None:
    assert json.loads(_object(typed("checkpoint", "inspect", mirror, "--json")))["step"] == 6
    assert json.loads(_object(typed("checkpoint", "inspect", checkpoint_of(mirror, 2), "--json")))["step"] == 2
    assert typed("checkpoint", "verify", mirror).count(": good") == 3
    typed("checkpoint", "convert", mirror, "--to", "dcp", "--output", "dcp")
    assert (Path("dcp") / ".metadata").exists()


def _object(text: str) -> str:
    return text[text.index("{") : text.rindex("}") + 1]


def test_a_step_of_a_mirrored_run_is_replayed_from_the_checkpoint_before_it(mirror: str) -> None:
    out = typed("replay", mirror, "--step", "4", "--trust")
    assert "the same to the bit" in out
    assert "step-00000002" in out or "from step 2" in out, out


def test_a_run_file_is_read_from_its_address_and_shown_by_it(bucket: str, tmp_path: Path) -> None:
    run = {**run_in(tmp_path, "", steps=2), "output": str(tmp_path / "disk")}
    (tmp_path / "mine.yaml").write_text(json.dumps(run))
    address = put(f"{bucket}/files/mine.yaml", tmp_path / "mine.yaml")
    assert "nothing would be refused" in typed("check", address)
    assert typed("launch", "--local", address).splitlines()[-1] == f"drivetrain train {address}"
    out = typed("train", address)
    assert f"drivetrain train {address} loop.steps=4 --resume" in out
    typed("profile", address, "output=elsewhere", "--steps", "1", "-o", str(tmp_path / "profile"))
    typed("plan", address, "--json")


def test_a_mirrored_run_goes_on_by_its_address_where_nothing_is_left_of_it(
    mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    before = load(steps(tmp_path / "disk" / "checkpoints")[-1])
    shutil.rmtree(tmp_path / "disk")
    typed("train", mirror, "--resume", "loop.steps=6", "--trust")
    assert same(load(tmp_path / "disk" / "checkpoints" / "step-00000006"), before)
    typed("train", mirror, "--resume", "loop.steps=8", "--trust")
    assert (tmp_path / "disk" / "checkpoints" / "step-00000008").exists()
    monkeypatch.chdir((tmp_path / "elsewhere").absolute())
    assert "--trust" in typed("train", mirror, "--resume", "loop.steps=10", code=2), "its Python lies elsewhere"


def test_a_first_run_file_keeps_the_address_of_its_data(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{'good' if number % 2 else 'bad'} room {number},{number % 2}" for number in range(40)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    address = put(f"{bucket}/data/rows.csv", tmp_path / "rows.csv")
    typed("init", "--data", address, "-o", "first.yaml")
    assert read_yaml(Path("first.yaml"))["workload"]["data"]["train"] == address
    assert "0            18  50.0%" in typed("data", "first.yaml")


def test_other_softwares_configuration_is_imported_from_its_address(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}}))
    (tmp_path / "mine.yaml").write_text(json.dumps(run_in(tmp_path, "", steps=2)))
    file, below = (put(f"{bucket}/files/{name}", tmp_path / name) for name in ("ds.json", "mine.yaml"))
    typed("import", file, "--onto", below)
    assert read_yaml(Path("ds-run.yaml"))["engine"] == {"name": "deepspeed", "stage": 2}
    head = Path("ds-run.yaml").read_text()
    assert file in head
    assert below in head


def test_an_address_that_holds_no_run_file_is_refused_by_its_name(bucket: str) -> None:
    out = typed("check", f"{bucket}/files/absent.yaml", code=2)
    assert "RUN.YAML: there is nothing at" in " ".join(out.split())
