"""An override that takes the place of another field is noted once by every command that reads a run file so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.test_start import prepared

Call = Callable[..., tuple[int, str, str]]
NOTE = "loop.epochs was given: it takes the place of the run file's loop.steps ("


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "run.yaml", "engine=single"],
        ["plan", "run.yaml", "engine=single", "lr=0.1,0.2", "--json"],
        ["plan", "run.yaml", "engine=single", "--machine", "2xH100-80GB"],
        ["launch", "--local", "run.yaml"],
        ["launch", "--local", "--check", "run.yaml"],
        ["launch", "--slurm", "run.yaml"],
        ["launch", "--slurm", "--check", "run.yaml"],
        ["check", "run.yaml"],
        ["check", "run.yaml", "--json"],
        ["data", "run.yaml"],
    ],
    ids=" ".join,
)
def test_a_replaced_field_is_noted_once(
    words: list[str], tmp_path: Path, drivetrain: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prepared(tmp_path))
    _, out, errors = drivetrain(*words, "loop.epochs=1", "device=cpu", "processes=1")
    assert (" ".join(out.split()) + errors).count(NOTE) == 1, out + errors
