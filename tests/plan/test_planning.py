"""What `drivetrain plan` searches: the fields that the file and the command line leave open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from drivetrain.config.load import load
from drivetrain.config.run import RunConfig
from drivetrain.errors import UserError
from drivetrain.plan import planning
from drivetrain.plan.as_asked import plan_as_asked
from drivetrain.plan.estimate import Traced
from drivetrain.plan.estimator import NotPlanned
from drivetrain.plan.machines import cluster
from drivetrain.plan.rows import Plan, Row
from drivetrain.plan.search_space import Space, families
from drivetrain.runtime.hardware import detect
from tests.launch.test_start import prepared
from tests.plan.invented import Time

RUN = """
workload: {type: module, path: own.py}
batch_size: 16
loop: {steps: 30}
optimizer: {name: sgd, lr: 0.5}
"""


@pytest.mark.parametrize(
    ("in_file", "arguments", "machine", "precisions", "engines"),
    [
        ("", [], "2xA100-80GB", ("fp32",), None),
        ("engine: ddp", [], "2xA100-80GB", ("fp32",), None),
        ("", ["engine=ddp"], "2xA100-80GB", ("fp32",), ["ddp"]),
        ("engine: auto\nprecision: auto", [], "2xA100-80GB", ("fp32", "tf32", "bf16-mixed"), None),
        ("", ["engine=auto", "precision=auto"], "4xP40", ("fp32",), None),
    ],
)
def test_a_plan_searches_what_is_left_open(
    in_file: str,
    arguments: Sequence[str],
    machine: str,
    precisions: tuple[str, ...],
    engines: list[str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "own.py").write_text("")
    (tmp_path / "run.yaml").write_text(RUN + in_file)
    monkeypatch.chdir(tmp_path)
    seen: list[Space] = []

    def searched(_: RunConfig, space: Space, *__: object) -> Plan:
        seen.append(space)
        return Plan(machine, 0, (), None)

    monkeypatch.setattr(planning, "searched", searched)
    planning.planned(Path("run.yaml"), arguments, machine)
    assert seen[0].precisions == precisions
    assert (None if seen[0].engines is None else [each.label for each in seen[0].engines]) == engines


def test_what_the_command_line_names_is_not_searched(own: Path) -> None:
    run, problems = load(own, ["nodes=1", "processes=2"])
    assert run is not None, problems
    assert planning.fixed_of(run) == {"nodes", "processes"}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.py").write_text("")
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return Path("run.yaml")


@pytest.mark.parametrize("engines", ["engine=ddp,fsdp", "engine=ddp"])
def test_more_nodes_than_the_machine_has_are_a_problem(engines: str, own: Path) -> None:
    with pytest.raises(UserError, match="nodes: 2 were given, but the machine has 1 node"):
        planning.planned(own, ["nodes=2", engines], "8xH100-80GB")
    with pytest.raises(UserError, match="nodes: 4 were given, but the machine has 2 nodes"):
        planning.planned(own, ["nodes=4", engines], "2x8xH100-80GB")


def test_the_line_to_type_keeps_the_users_own_overrides(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(base: RunConfig, *_: object) -> Plan:
        ways = [Row(base, ("engine=fsdp", "recompute=true")), Row(base, ("engine=ddp", "precision=tf32"))]
        return Plan("a machine", 8, tuple(ways), ways[1])

    monkeypatch.setattr(planning, "searched", searched)
    given = ["engine=auto", "precision=auto", "lr=0.1", "recompute=false", "workload.path=own.py"]
    found = planning.planned(own, given, "8xH100-80GB")
    first, second = (each.overrides for each in found.rows)
    assert first == ("lr=0.1", "workload.path=own.py", "engine=fsdp", "recompute=true", "precision=fp32")
    assert second == ("lr=0.1", "recompute=false", "workload.path=own.py", "engine=ddp", "precision=tf32")
    assert found.choice is found.rows[1]
    found = planning.planned(own, ["engine=ddp", "engine.shard_optimizer=true"], "8xH100-80GB")
    assert found.rows[1].overrides == ("engine=ddp", "precision=tf32"), "a row's engine is the whole block"


def test_each_row_has_its_own_number_of_steps_and_the_nodes_that_it_was_given(tmp_path: Path) -> None:
    place = prepared(tmp_path)
    given = [f"workload.path={place / 'workload.py'}", "loop.steps=null", "loop.epochs=2", "engine=ddp"]
    batches = [[*given, f"batch_size={size}"] for size in (4, 11)]
    found = plan_as_asked(place / "run.yaml", batches, Traced(cluster("2x1xH100-80GB")), price=1.0)
    assert {row.run.global_batch: row.steps for row in found.rows} == {4: 22, 11: 8}
    for row in found.rows:
        assert row.seconds is not None
        assert row.steps is not None
        assert found.total_seconds(row) == pytest.approx(row.steps * row.seconds)
        assert row.overrides[-1] == "nodes=2"


@pytest.mark.parametrize(
    "settings",
    [
        ["engine=fsdp", "engine.offload=true"],
        ["engine={name: deepspeed, stage: 1, offload_optimizer: cpu}"],
    ],
)
def test_offload_by_engines_is_not_searched_unasked(settings: list[str], own: Path) -> None:
    run, problems = load(own, settings)
    assert run is not None, problems
    ways = families(run, Space(("fp32",)), cluster("2xH100-80GB").host, 1, 2)
    assert not any(each.run.engine.keeps_elsewhere or each.run.offload_activations for each in ways.possible)


def test_times_in_eight_bits_of_a_calibration_are_noted(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = load(own, ["precision=fp8-mixed"])
    assert run is not None
    estimator = Traced(replace(cluster("1xH100-80GB"), is_here=True))
    plan = Plan("this machine", 1, (Row(run, (), timing=Time(1.0, "compute")),), None)
    monkeypatch.setattr(planning, "kept", lambda _: None)
    assert planning._noted(plan, estimator).notes == ()
    monkeypatch.setattr(planning, "kept", lambda _: object())
    assert "times are those of bf16" in planning._noted(plan, estimator).notes[0]


BATCH_NORM = """
import torch
from torch import nn
train_data = evaluation_data = [(torch.randn(6), i % 4) for i in range(16)]
loss = nn.CrossEntropyLoss()
def build_model():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
"""


def test_a_model_that_takes_no_single_sample_is_planned_with_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(BATCH_NORM)
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    one, _ = load(Path("run.yaml"), ["batch_size=1"])
    assert one is not None
    with pytest.raises(NotPlanned, match="more than 1 value per channel"):
        Traced(replace(cluster("1xH100-80GB"), host=detect(), is_here=True)).costs(one)
    found = planning.planned(Path("run.yaml"), ["engine=single,ddp"], "2xH100-80GB")
    assert found.choice is not None
    assert {row.fits for row in found.rows if row.run.engine.label == "ddp"} >= {"yes"}
    assert all(row.run.micro_batch > 1 for row in found.rows if row.costs is not None)


def test_an_unknown_machine_is_reported_with_the_problems_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that hold on every machine, each once, though several ways are named."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("")
    Path("run.yaml").write_text(RUN + "engin: ddp\nbatch_size_per_device: 4\nengine: auto\n")
    for arguments in ([], ["engine=ddp,fsdp"]):
        with pytest.raises(UserError) as refused:
            planning.planned(Path("run.yaml"), arguments, "8xH1000-80GB")
        assert [each.field for each in refused.value.problems] == ["engin", "batch_size", "--machine"]
        assert "did you mean H100-80GB" in refused.value.problems[-1].fix
    with pytest.raises(UserError, match=r"none.yaml: there is no such file(.|\n)*no device of the catalogue"):
        planning.planned(Path("none.yaml"), [], "8xH1000-80GB")


def test_a_plan_says_which_way_it_looks_at_and_how_many_traces_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tmp_path)
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    arguments = ["engine=single,ddp", "processes=1", "micro_batch_size=2"]
    planning.planned(Path("run.yaml"), arguments, "this machine", say=told.append)
    assert told == [
        f"trace {number}, of engine={engine} precision=fp32 micro_batch_size=2"
        for number, engine in enumerate(("single", "ddp"), start=1)
    ]


def test_devices_that_the_choice_leaves_idle_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(tmp_path)
    monkeypatch.chdir(tmp_path)
    idle = "the choice takes 1 of the 2 devices; the others would stand idle"
    for engine, is_noted in (("single", True), ("ddp", False)):
        found = planning.planned(Path("run.yaml"), [f"engine={engine}"], "2xH100-80GB")
        assert found.choice is not None
        assert (idle in found.notes) is is_noted
