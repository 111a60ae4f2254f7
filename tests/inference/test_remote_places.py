"""Runs that are named by the address that they were mirrored to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import drivetrain
from drivetrain.checkpoint.directory import load
from drivetrain.checkpoint.state import same
from drivetrain.cli.app import app
from drivetrain.errors import UserError
from drivetrain.inference.remote_places import here
from drivetrain.runtime.store_cache import local_path
from tests.training.test_mirroring import run_in, train


def test_a_mirrored_run_is_loaded_evaluated_and_reported_by_its_address(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mirror = f"{bucket}/runs/one"
    report = train(run_in(tmp_path, mirror, steps=6))
    loaded = drivetrain.load(mirror, trust=True)
    original = drivetrain.load(tmp_path / "disk")
    for one, other in zip(loaded.parameters(), original.parameters(), strict=True):
        assert torch.equal(one, other)
    assert [path.name for path in (local_path(mirror) / "checkpoints").iterdir()] == [
        Path(str(report.best_checkpoint)).name
    ]
    done = CliRunner().invoke(app, ["evaluate", mirror, "--checkpoint", "last", "--trust"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert found["metrics"] == pytest.approx(drivetrain.evaluate(tmp_path / "disk", "last")["metrics"])
    done = CliRunner().invoke(app, ["report", mirror])
    assert done.exit_code == 0, done.output


def test_a_cached_checkpoint_of_an_overwritten_run_is_fetched_anew(bucket: str, tmp_path: Path) -> None:
    train(run_in(tmp_path, bucket, steps=2))
    old = load(here(bucket, ["last"]) / "checkpoints" / "step-00000002")["model"]
    (local_path(bucket) / "samples.jsonl").write_bytes(b"of a run that left samples")
    train(run_in(tmp_path, bucket, steps=2, seed=7), overwrite=True)
    [found] = (here(bucket, ["best", "last"]) / "checkpoints").iterdir()
    new = load(found)["model"]
    assert same(new, load(tmp_path / "disk" / "checkpoints" / "step-00000002")["model"])
    assert not same(new, old)
    assert not (local_path(bucket) / "samples.jsonl").exists()
    train(run_in(tmp_path, bucket, steps=4), overwrite=True)
    here(bucket, [])
    assert not any((local_path(bucket) / "checkpoints").iterdir()), "the run has no such checkpoint any more"


def test_the_password_of_a_refused_address_is_not_shown() -> None:
    with pytest.raises(UserError) as refused:
        here("https://user:a-pass@word@host/run")
    assert "credentials come from" in str(refused.value)
    assert not [word for word in ("user:", "a-pass", "word@") if word in str(refused.value)]


def test_an_address_that_holds_nothing_is_an_error(bucket: str) -> None:
    with pytest.raises(UserError, match="there is nothing at"):
        here(f"{bucket}/absent")
