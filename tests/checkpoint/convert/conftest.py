"""A run file of the small model, and what its runs leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.cli import main
from drivetrain.tracking.jsonl import read_events
from tests.checkpoint.convert import net, scripts


@pytest.fixture(scope="package")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("run") / "run.yaml"
    file.write_text(scripts.RUN.format(net=net.__file__))
    return file


@pytest.fixture(scope="package")
def run(run_file: Path) -> Path:
    """The folder of a run that made its steps. Nobody may write into it."""
    folder = run_file.parent / "out"
    with pytest.raises(SystemExit) as ended:
        main(["train", str(run_file), f"output={folder}", "--quiet"])
    assert ended.value.code == 0
    return folder


@pytest.fixture
def goes_on(
    drivetrain: Callable[..., tuple[int, str, str]], run_file: Path, tmp_path: Path
) -> Callable[..., list[float]]:
    """Another's folder → the losses of a run that goes on from it."""

    def call(theirs: Path, *more: str) -> list[float]:
        output = f"output={tmp_path / 'goes-on'}"
        code, _, err = drivetrain("checkpoint", "convert", str(theirs), "--run", str(run_file), output, *more)
        assert code == 0, err
        overrides = [word for word in more if "=" in word]
        code, _, err = drivetrain("train", str(run_file), output, *overrides, "--resume", "--quiet")
        assert code == 0, err
        events = read_events(tmp_path / "goes-on" / "events.jsonl")
        return [event["loss"] for event in events if event["event"] == "step"]

    return call
