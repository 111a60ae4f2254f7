"""Tests what is suggested: for what was measured, in the order of what it should save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.config.load import load
from drivetrain.config.run import RunConfig
from drivetrain.profile.suggestions import suggestions

RUN = """
workload: {type: module, path: workload.py}
batch_size: 64
loop: {steps: 20}
optimizer: {name: sgd, lr: 0.1}
"""
RANK = {"step": 1.0, "parts": {}, "recompute": 0.0, "idle": 0.0, "exposed_exchange": 0.0, "on_gpu": False}


def config(folder: Path, *overrides: str) -> RunConfig:
    (folder / "run.yaml").write_text(RUN)
    run, problems = load(folder / "run.yaml", overrides)
    assert run is not None
    assert not problems
    return run


def found(run: RunConfig, seconds: dict[tuple[str, ...], float] | None = None, **rank: Any) -> list[tuple[str, float]]:
    def planned(overrides: Sequence[str]) -> float | None:
        return (seconds or {}).get(tuple(overrides))

    return [(" ".join(each.overrides), round(each.gain, 3)) for each in suggestions(run, RANK | rank, 2, planned)]


def test_waiting_for_samples_asks_for_twice_the_workers(tmp_path: Path) -> None:
    assert found(config(tmp_path), parts={"data": 0.4}) == [("loader.workers=4", 0.4)]
    assert found(config(tmp_path), parts={"data": 0.02}) == []


def test_recomputation_and_a_waiting_gpu_are_named_where_the_run_file_has_them(tmp_path: Path) -> None:
    assert found(config(tmp_path, "recompute=true"), recompute=0.25) == [("recompute=false", 0.25)]
    idle = config(tmp_path, "compile=false")
    assert found(idle, idle=0.5, on_gpu=True) == [("compile=true", 0.5)]
    assert found(idle, idle=0.5) == []


def test_the_plans_gains_are_shares_of_the_plans_own_step(tmp_path: Path) -> None:
    run = config(tmp_path, "engine=fsdp", "processes=2", "micro_batch_size=4")
    seconds = {(): 2.0, ("engine=ddp",): 1.5, ("micro_batch_size=8",): 1.0, ("precision=bf16-mixed",): 2.5}
    assert found(run, seconds, exposed_exchange=0.2) == [("micro_batch_size=8", 0.5), ("engine=ddp", 0.25)]
    assert found(run, seconds, exposed_exchange=0.05) == [("micro_batch_size=8", 0.5)]


def test_without_a_plan_and_where_a_way_does_not_fit_nothing_is_promised(tmp_path: Path) -> None:
    run = config(tmp_path, "micro_batch_size=4")
    assert found(run) == []
    assert found(run, {(): 2.0}) == []
