"""`engine: auto` and `precision: auto`: decided by a plan, stated in the run's folder, kept when a run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from drivetrain import UserError, train
from drivetrain.config.planned import PlannedFigures
from drivetrain.config.run import RunConfig
from drivetrain.launch import auto_choice
from drivetrain.launch.auto_choice import decided
from drivetrain.plan.rows import Plan
from drivetrain.plan.search import search
from drivetrain.plan.search_space import Space
from drivetrain.training.report import RunReport
from tests.cli.test_cli import here
from tests.plan.invented import Invented, Model

Command = Callable[..., tuple[int, str, str]]
__all__ = ["here"]  # a fixture

SMALL = Model(parameters=2**20, layers=4, activations=2**12, flops=2**36)


def planner(machine: Invented) -> Callable[..., Plan]:
    def planned(base: RunConfig, asked: Any) -> Plan:
        precisions = ("fp32", "bf16-mixed") if "precision" in asked else (base.precision,)
        return search(base, Space(precisions, None if "engine" in asked else (base.engine,)), machine)

    return planned


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> Invented:
    machine = Invented(SMALL, nodes=1, devices_per_node=1, memory=2**34)
    monkeypatch.setattr(auto_choice, "planned", planner(machine))
    return machine


@pytest.mark.usefixtures("one_device")
def test_the_plans_choice_trains_and_the_run_file_in_the_folder_names_it(drivetrain: Command) -> None:
    code, _, err = drivetrain("train", "digits.yaml", "engine=auto", "precision=auto")
    assert code == 0, err
    assert "engine and precision=auto takes engine=single precision=bf16-mixed" in err.replace("\n", " ")
    kept = YAML(typ="safe").load(Path("runs/digits/run.yaml"))
    assert (kept["engine"]["name"], kept["precision"]) == ("single", "bf16-mixed")
    report = json.loads(Path("runs/digits/report.json").read_text())
    assert report["planned"]["way"].startswith("engine=single precision=bf16-mixed")
    assert RunReport.read(Path("runs/digits/report.json")).departures, "the invented model is another one"


def test_a_run_that_goes_on_keeps_what_was_chosen(drivetrain: Command, one_device: Invented) -> None:
    assert drivetrain("train", "digits.yaml", "engine=auto", "precision=auto", "--quiet")[0] == 0
    asked = len(one_device.asked)
    code, _, err = drivetrain("train", "digits.yaml", "engine=auto", "precision=auto", "--resume", "loop.steps=6")
    assert code == 0, err
    assert "as the run in runs/digits has it" in err.replace("\n", " ")
    assert len(one_device.asked) == asked
    code, _, err = drivetrain("evaluate", "digits.yaml", "engine=auto", "precision=auto")
    assert code == 0, err
    assert len(one_device.asked) == asked


def test_where_nothing_fits_the_run_is_refused_with_what_would(
    drivetrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Invented(Model(2**36, 64, 2**20, 2**30), nodes=1, devices_per_node=2, memory=2**33)
    monkeypatch.setattr(auto_choice, "planned", planner(machine))
    code, _, err = drivetrain("train", "digits.yaml", "engine=auto")
    assert code == 2
    assert "no way to run fits this machine" in err
    assert "such devices" in err
    assert not Path("runs").exists()


@pytest.mark.usefixtures("one_device")
def test_settings_of_the_user_are_kept() -> None:
    choice = decided(Path("digits.yaml"), ["engine=auto", "precision=fp32", "micro_batch_size=auto"], anew=True)
    assert not any(each.startswith("micro_batch_size=") and "auto" not in each for each in choice.overrides)
    assert choice.planned is not None
    assert choice.planned.micro_batch_size > 0


def test_wrong_settings_beside_auto_are_all_reported(drivetrain: Command) -> None:
    code, _, err = drivetrain("train", "digits.yaml", "engine=auto", "batch_size=-1", "sed=3")
    assert code == 2
    assert "batch_size" in err
    assert "did you mean seed" in err


@pytest.mark.long
def test_a_verb_that_decides_nothing_says_who_does(drivetrain: Command) -> None:
    code, out, _ = drivetrain("compare", "digits.yaml", "engine=auto,single")
    assert code == 0
    assert "auto is decided by a plan" in " ".join(out.split())


def report(**values: Any) -> list[str]:
    planned = PlannedFigures(way="engine=ddp", peak_bytes=2**30, samples_per_second=100.0, micro_batch_size=4)
    empty = dict.fromkeys(RunReport.model_fields)
    return RunReport.model_construct(**{**empty, "planned": planned, **values}).departures


def test_only_what_departs_by_more_than_a_tenth_is_reported() -> None:
    assert report(peak_memory={"allocated": int(1.09 * 2**30)}, samples_per_second=91.0) == []
    (told,) = report(peak_memory={"tensor": 2**31}, samples_per_second=100.0)
    assert told == "the peak of tensors was 2,048.0 MiB, planned 1,024.0 MiB: +100%"
    (told,) = report(peak_memory={"tensor": 2**30}, samples_per_second=50.0)
    assert told == "the rate was 50 samples/s, planned 100 samples/s: -50%"
    (told,) = report(peak_memory={"tensor": 2**30}, samples_per_second=11_900.0)
    assert told == "the rate was 11,900 samples/s, planned 100 samples/s: +11800%"


@pytest.mark.usefixtures("one_device", "here")
def test_python_takes_the_plans_choice_and_resume_keeps_it(one_device: Invented) -> None:
    report = train("digits.yaml", engine="auto", precision="auto", quiet=True)
    assert (report.engine, report.precision) == ("single", "bf16-mixed")
    assert report.planned is not None
    asked = len(one_device.asked)
    again = train("digits.yaml", set={"engine": "auto", "precision": "auto", "loop.steps": 6}, resume=True, quiet=True)
    assert (again.engine, again.precision, again.steps) == ("single", "bf16-mixed", 6)
    assert len(one_device.asked) == asked


@pytest.mark.usefixtures("here")
def test_python_is_refused_where_something_else_is_wrong_too() -> None:
    with pytest.raises(UserError) as refused:
        train("digits.yaml", engine="auto", batch_sise=8)
    assert [each.field for each in refused.value.problems] == ["batch_sise"]


@pytest.mark.usefixtures("one_device", "here")
def test_ranks_of_several_nodes_that_another_launcher_started_do_not_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "first"}
    for name, value in {**torchrun, "MASTER_PORT": "29511"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="another launcher has started 2 nodes of 2 processes") as refused:
        decided(Path("digits.yaml"), ["engine=auto", "precision=auto"], anew=True)
    assert [each.field for each in refused.value.problems] == ["engine", "precision"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert decided(Path("digits.yaml"), ["engine=auto"], anew=True).planned is not None
