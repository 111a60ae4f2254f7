"""Traces that processes take ahead are those of the process that searches, and cost nothing where they fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from drivetrain.config.load import load
from drivetrain.config.run import RunConfig
from drivetrain.errors import UserError
from drivetrain.plan import estimate, planning
from drivetrain.plan.catalogue import catalogue
from drivetrain.plan.estimate import Traced
from drivetrain.plan.machines import cluster
from drivetrain.plan.rows import Plan
from drivetrain.plan.step_costs import StepCosts
from drivetrain.plan.trace_processes import TraceProcesses
from tests.plan.measured import LLAMA

MACHINE = "2x2xH100-80GB"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("All the world's a stage, and all the men and women merely players.\n" * 40)
    data = {"train": str(tmp_path / "text.txt"), "length": 32}
    workload = {"type": "language_model", "model": {"config": LLAMA}, "data": data}
    (tmp_path / "run.yaml").write_text(json.dumps({"workload": workload, "batch_size": 8, "loop": {"steps": 2}}))
    return tmp_path / "run.yaml"


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[TraceProcesses]:
    """Two that are asked from the first trace on."""
    monkeypatch.setattr(estimate, "PAYS", -1.0)
    found = TraceProcesses(2)
    yield found
    found.close()


def run_of(run_file: Path, *overrides: str) -> RunConfig:
    run, problems = load(run_file, overrides)
    assert run is not None, problems
    return run


def without_seconds(costs: StepCosts | None) -> StepCosts | None:
    if costs is None:
        return None
    ranks = {rank: replace(each, seconds_taken=0.0) for rank, each in costs.by_rank.items()}
    return replace(costs, seconds_taken=0.0, by_rank=ranks)


def by_way(plan: Plan) -> dict[tuple[str, ...], tuple[str | None, StepCosts | None]]:
    return {row.overrides: (row.reason, without_seconds(row.costs)) for row in plan.rows}


@pytest.mark.long
def test_a_search_finds_the_same_with_them(run_file: Path, processes: TraceProcesses) -> None:
    asked = ["engine=ddp"]
    run = run_of(run_file, *asked)
    alone, ahead = Traced(cluster(MACHINE, catalogue())), Traced(cluster(MACHINE, catalogue()), processes)
    ahead.expect([run_of(run_file, "engine=fsdp", "processes=2")] * 2)
    wait(ahead._ahead.values(), 120)  # until they have started: these traces are short
    taken: list[str] = []
    take = ahead._from_ahead

    def counted(run: RunConfig, key: str) -> StepCosts | None:
        found = take(run, key)
        taken.extend([key] if found is not None else [])
        return found

    ahead._from_ahead = counted  # type: ignore[method-assign]
    plans = [planning.searched(run, planning.space_of(run, each.host, []), each) for each in (alone, ahead)]
    ways = [by_way(each) for each in plans]
    assert {key: (ways[0].get(key), value) for key, value in ways[1].items() if ways[0].get(key) != value} == {}
    assert len(ways[0]) == len(ways[1])
    assert taken, "some of the costs come from the processes"
    assert plans[0].notes == plans[1].notes


def test_what_ends_a_process_costs_nothing(run_file: Path, processes: TraceProcesses) -> None:
    run = run_of(run_file, "engine=fsdp", "processes=2", "nodes=2")
    estimator = Traced(cluster(MACHINE, catalogue()), processes)
    estimator.expect([run])
    deadline = time.monotonic() + 60
    while len(processes._processes) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    for process in processes._processes:
        os.kill(process.pid, signal.SIGKILL)
    found = estimator.costs(run)
    assert without_seconds(found) == without_seconds(Traced(cluster(MACHINE, catalogue())).costs(run))


def test_the_reason_why_a_run_cannot_be_traced_is_that_of_the_caller(run_file: Path, processes: TraceProcesses) -> None:
    run = run_of(run_file, "engine={name: mesh, dp: 1, tp: 3}", "processes=3")
    alone, ahead = Traced(cluster("3xH100-80GB", catalogue())), Traced(cluster("3xH100-80GB", catalogue()), processes)
    ahead.expect([run])
    future = next(iter(ahead._ahead.values()))
    assert future.result(120) is None
    reasons: list[str] = []
    for each in (alone, ahead):
        with pytest.raises(UserError) as caught:
            each.costs(run)
        reasons.append(str(caught.value))
    assert reasons[0] == reasons[1]


def test_the_end_of_a_search_ends_them_in_the_middle_of_a_trace(run_file: Path) -> None:
    processes = TraceProcesses(2)
    runs = [run_of(run_file, "engine=fsdp", "processes=2", f"batch_size={size}") for size in (2, 4, 8, 16)]
    estimator = Traced(cluster(MACHINE, catalogue()), processes)
    estimator._spent = 1e9
    estimator.expect(runs)
    deadline = time.monotonic() + 60
    while len(processes._processes) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    processes.close()
    assert [process.poll() is not None for process in processes._processes] == [True, True]


def test_they_end_with_a_search_that_is_killed(run_file: Path, tmp_path: Path) -> None:
    caller = f"""
import sys, time
from pathlib import Path
from drivetrain.plan.estimate import Traced
from drivetrain.plan.machines import cluster
from drivetrain.plan.trace_processes import TraceProcesses
from tests.plan.test_trace_processes import MACHINE, run_of
processes = TraceProcesses(2)
estimator = Traced(cluster(MACHINE), processes)
estimator._spent = 1e9
estimator.expect([run_of(Path({str(run_file)!r}), "engine=fsdp", "processes=2")])
deadline = time.monotonic() + 60
while len(processes._processes) < 2 and time.monotonic() < deadline:
    time.sleep(0.01)
print(*(each.pid for each in processes._processes), flush=True)
time.sleep(600)
"""
    (tmp_path / "caller.py").write_text(caller)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(tmp_path / "caller.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        pids = [int(each) for each in process.stdout.readline().split()]
        process.kill()
    deadline = time.monotonic() + 60
    while any(map(is_there, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(pids) == 2
    assert not any(map(is_there, pids))


def is_there(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # which init has not collected yet
    except psutil.NoSuchProcess:
        return False


def test_a_short_search_starts_none(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    processes = TraceProcesses(2)
    estimator = Traced(cluster(MACHINE, catalogue()), processes)
    estimator.expect([run_of(run_file, "engine=fsdp", "processes=2")])
    assert estimator.at_once == 1
    processes.close()
