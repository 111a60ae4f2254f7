"""Arguments of Python as keys of a run file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drivetrain.api import settings
from drivetrain.api.errors import as_a_caller_reads_them
from drivetrain.api.settings import read_run
from drivetrain.errors import UserError
from drivetrain.runtime.run_folder import RunFolder

RUN: dict[str, Any] = {
    "workload": {"type": "module", "path": "linear.py"},
    "batch_size": 32,
    "loop": {"epochs": 10},
    "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
    "engine": {"name": "ddp", "bucket_mb": 5},
}


def read(**given: Any) -> Any:
    run, problems, _ = read_run(RUN, given)
    assert run is not None
    assert not problems
    return run


def test_a_key_may_be_given_by_its_end_where_that_is_unique() -> None:
    assert read(lr=0.1).optimizer.lr == 0.1
    assert read(max_grad_norm=1.0).loop.max_grad_norm == 1.0


def test_a_mapping_changes_the_keys_that_it_names_and_leaves_the_others() -> None:
    optimizer = read(optimizer={"lr": 3e-4}).optimizer
    assert (optimizer.lr, optimizer.name, optimizer.momentum) == (3e-4, "sgd", 0.9)
    assert read(engine={"bucket_mb": 7}).engine.bucket_mb == 7
    assert read(loop={"max_grad_norm": 2.0}).loop.epochs == 10


def test_a_mapping_that_names_another_kind_takes_the_blocks_place() -> None:
    engine = read(engine={"name": "mesh", "tp": 2}).engine
    assert (engine.name, engine.tp) == ("mesh", 2)
    assert read(workload={"type": "objects"}).workload.type == "objects"


def test_a_text_stands_for_a_name() -> None:
    run = read(engine="fsdp", optimizer="adamw", schedule="cosine")
    assert (run.engine.name, run.optimizer.name, run.schedule.name) == ("fsdp", "adamw", "cosine")


def test_values_of_python_become_those_of_a_run_file() -> None:
    run = read(output=Path("runs/x"), betas=(0.9, 0.95), batch_size=np.int64(16), lr=np.float64(0.5))
    assert (run.output, run.optimizer.betas, run.batch_size) == (Path("runs/x"), (0.9, 0.95), 16)


def test_keys_with_dots_come_in_set() -> None:
    run, problems, _ = read_run(RUN, {}, {"optimizer.lr": 3e-4, "loop.epochs": 2})
    assert run is not None
    assert not problems
    assert (run.optimizer.lr, run.loop.epochs) == (3e-4, 2)


def test_the_callers_mapping_stays_as_it_is() -> None:
    before = repr(RUN)
    read(optimizer={"lr": 3e-4}, engine="fsdp")
    assert repr(RUN) == before


def test_every_problem_is_found_at_once() -> None:
    _, problems, _ = read_run(RUN, {"lrr": 1, "precision": "fp17", "batch_size": "many"})
    assert {each.field for each in problems} == {"lrr", "precision", "batch_size"}
    assert "did you mean" in next(each for each in problems if each.field == "lrr").fix


def test_importing_the_package_takes_no_torch_and_lists_its_names() -> None:
    script = (
        "import sys, drivetrain\n"
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules\n"
        "assert set(drivetrain.__all__) <= set(dir(drivetrain))\n"
        "try: drivetrain.trian\n"
        "except AttributeError as error: print(error)\n"
        "drivetrain.UserError\n"
        "assert 'torch' not in sys.modules\n"
        "import drivetrain.compare.result_rows\n"
        "assert callable(drivetrain.compare) and drivetrain.compare.__module__ == 'drivetrain.api.comparing'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "has no attribute 'trian'" in done.stdout


def script(folder: Path, *command: str, environment: dict[str, str] | None = None) -> str:
    """Returns the name that a run gets from a Python process which gives it none."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_run_without_a_name_has_that_of_the_script_or_the_notebook(tmp_path: Path) -> None:
    asking = "from drivetrain.api.script_name import script_name\nprint(script_name())\n"
    (tmp_path / "tune.py").write_text(asking)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(asking)
    notebook = {"JPY_SESSION_NAME": "/home/me/My trials.ipynb"}
    assert script(tmp_path, "tune.py") == script(tmp_path, "-m", "tune") == "tune"
    assert script(tmp_path, "tune.py", environment=notebook) == "tune"
    assert script(tmp_path, "-c", asking) == script(tmp_path, "-m", "package") == "None"
    assert script(tmp_path, "-c", asking, environment=notebook) == "My trials"


def test_a_name_or_a_run_file_comes_before_that_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(json.dumps(RUN))
    asking = "from drivetrain.api.settings import read_run\n"
    asking += f"print(read_run({RUN!r}, {{}})[0].folder)\n"
    asking += f"print(read_run({RUN!r}, {{'name': 'own'}})[0].name, read_run('mine.yaml', {{}})[0].name)\n"
    (tmp_path / "tune.py").write_text(asking)
    assert script(tmp_path, "tune.py").splitlines() == ["runs/tune", "own mine"]


def test_a_run_of_a_program_without_a_name_has_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "script_name", lambda: None)
    assert read().folder == Path("runs/run")


def test_a_second_run_of_a_script_is_refused_with_the_arguments_to_give(tmp_path: Path) -> None:
    for name in ("events.jsonl", "report.json"):
        (tmp_path / name).write_text("{}\n")
    with pytest.raises(UserError, match="overwrite=True, or give another name= or output="), as_a_caller_reads_them():
        RunFolder(tmp_path).refuse_if_taken()
