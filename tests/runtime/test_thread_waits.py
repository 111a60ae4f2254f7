"""Tests that threads of an operation sleep while they wait for each other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest

from drivetrain.config.run import RunConfig
from drivetrain.launch.elastic import environment_of_ranks
from drivetrain.launch.job import Job
from drivetrain.runtime import thread_waits

STARTED = """
import sys
from typing import Any
from drivetrain.cli.entry import main
sys.argv = ["drivetrain", "--version"]
assert "torch" not in sys.modules
try:
    main()
except SystemExit:
    import torch
"""


def test_the_command_line_sets_it_before_torch_is_imported() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in thread_waits.GIVEN}
    settings = re.compile(r"GOMP_SPINCOUNT = '(\d+)'")
    spins = []
    for code in ("import torch", STARTED):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, "OMP_DISPLAY_ENV": "verbose"},
            stderr=subprocess.PIPE,
            text=True,
            check=True,
        )
        spins += settings.findall(done.stderr)
    if not spins:
        pytest.skip("this torch has another library of threads than GNU's, which says what it was given")
    assert int(spins[0]) > 0
    assert spins[1:] == ["0"]


def test_ranks_get_it_with_their_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in thread_waits.GIVEN:
        monkeypatch.delenv(each, raising=False)
    run: dict[str, Any] = {
        "workload": {"type": "module", "path": "model.py"},
        "engine": "ddp",
        "processes": 2,
        "batch_size": 8,
    }
    run["loop"] = {"steps": 1}
    task = Job(verb="train", run=RunConfig.model_validate(run))
    assert environment_of_ranks(task, 2).items() >= {"OMP_WAIT_POLICY": "passive"}.items()


@pytest.mark.parametrize("name", thread_waits.GIVEN)
def test_what_the_user_has_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in thread_waits.GIVEN:
        monkeypatch.delenv(each, raising=False)
    assert thread_waits.asleep() == {"OMP_WAIT_POLICY": "passive"}
    monkeypatch.setenv(name, "1")
    assert thread_waits.asleep() == {}
