"""A place that is not there is refused before anything that takes seconds is imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import sys
from drivetrain.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print(end.code, sorted({"torch", "transformers", "pandas", "scipy"} & sys.modules.keys()))
"""
RUN = """
workload: {type: module, path: own.py}
batch_size: 8
loop: {steps: 1}
"""
CHECKPOINT = "runs/one/checkpoints/step-00000004"
MEANT, LISTED = "did you mean runs/one?", "holds the steps 10, 12"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with two checkpoints, by their names."""
    for step in (10, 12):
        (tmp_path / f"runs/one/checkpoints/step-{step:08d}").mkdir(parents=True)
    (tmp_path / "runs/one/run.yaml").write_text(RUN)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["predict", "runs/onne"], MEANT),
        (["evaluate", "runs/onne"], MEANT),
        (["evaluate", "runs/onne", "--multiple-choice", "."], MEANT),
        (["serve", "runs/onne"], MEANT),
        (["chat", "runs/onne"], MEANT),
        (["chat", "runs/one", "--compare", "runs/onne"], MEANT),
        (["serve", "runs/one", "--adapter", "tone=a/b/c"], "--adapter: a/b/c does not exist"),
        (["predict", "onee"], MEANT),
        (["evaluate", "onee", "--multiple-choice", "."], MEANT),
        (["serve", "onee"], "nor a model in the hub's cache, and HF_HUB_OFFLINE keeps from asking the hub " + MEANT),
        (["chat", "other"], "HF_HUB_OFFLINE keeps from asking the hub give a local folder"),
        (["chat", "no model"], "no model is no folder here, and no name that a model on the hub may have"),
        (["serve", "/nowhere/at/all"], "MODEL: /nowhere/at/all does not exist"),
        (["chat", "runs/one/run.yml"], "did you mean runs/one/run.yaml?"),
        (["predict", "runs/one", "--data", "new.jsonl"], "--data: new.jsonl does not exist"),
        (["predict", "runs/one", "--checkpoint", "4"], LISTED),
        (["evaluate", "runs/one", "--checkpoint", CHECKPOINT], LISTED),
        (["serve", "runs/one", "--checkpoint", CHECKPOINT], LISTED),
        (["chat", "runs/one", "--checkpoint", "step-00000004"], LISTED),
    ],
)
def test_a_place_that_is_not_there_is_refused_before_torch_is_imported(
    command: list[str], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "empty"))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *command], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.stdout == "2 []\n", done.stdout
    assert words in " ".join(done.stderr.split())


def test_a_checkpoint_and_data_that_are_not_there_are_reported_together(folder: Path) -> None:
    command = ["predict", "runs/one", "--checkpoint", "4", "--data", "new.jsonl"]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *command], cwd=folder, capture_output=True, text=True, check=False
    )
    told = " ".join(done.stderr.split())
    assert "2 problems" in told
    assert LISTED in told
    assert "--data: new.jsonl does not exist" in told


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("runs/nix", "runs/nix: there is no such folder there are runs/one"),
        ("runs/onne", "runs/onne: there is no such folder " + MEANT),
        ("runs/onne.yaml", "runs/onne.yaml: there is no such file"),
    ],
)
@pytest.mark.parametrize("verb", [("export", "--to", "transformers", "-o", "exported"), ("evaluate",), ("check",)])
def test_a_run_that_is_not_there_is_a_folder_and_the_runs_there_are_named(
    verb: tuple[str, ...],
    place: str,
    words: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    drivetrain: Callable[..., tuple[int, str, str]],
) -> None:
    monkeypatch.chdir(folder)
    code, _, err = drivetrain(verb[0], place, *verb[1:])
    assert code == 2
    assert words in err
