"""Runs that are named by the address that they were mirrored to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import drivetrain
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


def test_an_address_that_holds_nothing_is_an_error(bucket: str) -> None:
    with pytest.raises(UserError, match="there is nothing at"):
        here(f"{bucket}/absent")
