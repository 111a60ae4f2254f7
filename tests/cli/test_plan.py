"""`drivetrain plan` checks its options before it plans, and writes its results where they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain.config.run import RunConfig
from drivetrain.plan import planning
from drivetrain.plan.rows import Plan
from drivetrain.plan.search import search
from tests.plan.measured import LLAMA
from tests.plan.test_search import SPACE, large, run

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(tmp_path)
    return run(tmp_path)


@pytest.fixture
def invented(base: RunConfig, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Plans are those of an invented machine; returns a list that grows with each."""
    asked: list[int] = []

    def planned(*_: Any) -> Plan:
        asked.append(1)
        return search(base, SPACE, large(), steps=1000)

    monkeypatch.setattr(planning, "planned", planned)
    return asked


def test_an_output_that_cannot_be_written_is_refused_before_the_plan(invented: list[int], drivetrain: Command) -> None:
    Path("taken").write_text("")
    for place in ("taken", "taken/below"):
        code, _, err = drivetrain("plan", "run.yaml", "-o", place)
        assert code == 2
        assert "--output" in err
        assert "--resume" not in err
    assert invented == []
    assert drivetrain("plan", "run.yaml", "-o", "new/folder")[0] == 0
    assert (Path("new/folder") / "plan.html").is_file()


def test_a_page_that_cannot_be_written_in_the_end_leaves_the_table(
    invented: list[int], drivetrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("drivetrain.plan.page.write_whole", full)
    code, out, err = drivetrain("plan", "run.yaml", "-o", "folder")
    assert code == 1
    assert "The line to type" in out
    assert "No space left" in err
    assert "plan again" in err
    assert "--resume" not in err
    assert invented == [1]


def test_an_explanation_stands_in_the_json(invented: list[int], drivetrain: Command) -> None:
    code, out, _ = drivetrain("plan", "run.yaml", "--json", "--explain", "single", "--explain", "magic")
    assert (code, invented) == (0, [1])
    found = json.loads(out)["explained"]
    assert "short of at least" in found["single"][0]
    assert "none of the ways" in found["magic"][0]


MISTAKES = {
    "no such head": ({"config": {"model_type": "t5", "d_model": 32, "num_layers": 1}}, {}, "CausalLM"),
    "no such key": ({"config": {**LLAMA, "head_dimension": 8}}, {}, "head_dimension"),
    "too long": ({"config": LLAMA}, {"length": 512}, "64"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("arguments", [[], ["engine=ddp,fsdp", "precision=fp32,bf16-mixed"]], ids=str)
def test_one_mistake_is_one_refusal_whatever_the_number_of_ways(
    name: str, arguments: list[str], drivetrain: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, data, words = MISTAKES[name]
    Path("text.txt").write_text("All the world's a stage.\n" * 1000)
    workload = {"type": "language_model", "model": model, "data": {"train": "text.txt", **data}}
    Path("run.yaml").write_text(json.dumps({"workload": workload, "batch_size": 8, "loop": {"steps": 2}}))
    code, out, err = drivetrain("plan", "run.yaml", "--machine", "2xA100-80GB", *arguments)
    assert code == 2, out
    assert words in err
    assert err.startswith("1 problem: ")
    assert out == ""


@pytest.mark.parametrize("arguments", [[], ["engine=single,fsdp"], ["--explain", "fsdp"]], ids=str)
def test_a_precision_that_no_engine_has_on_the_machine_is_one_refusal(
    arguments: list[str], drivetrain: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("All the world's a stage.\n" * 1000)
    workload = {"type": "language_model", "model": {"config": LLAMA}, "data": {"train": "text.txt"}}
    Path("run.yaml").write_text(json.dumps({"workload": workload, "batch_size": 8, "loop": {"steps": 2}}))
    code, _, err = drivetrain("plan", "run.yaml", "precision=fp8-mixed", "--machine", "4xP40", *arguments)
    assert code == 2
    assert err.startswith("1 problem: ")
    assert err.count("fp8-mixed") == 1
    assert "P40 has compute capability 6.1; it needs 8.9 works here: fp32" in err


def test_a_precision_that_each_engine_lacks_for_its_own_reason_is_refused_with_each(
    drivetrain: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("All the world's a stage.\n" * 1000)
    workload = {"type": "language_model", "model": {"config": LLAMA}, "data": {"train": "text.txt"}}
    Path("run.yaml").write_text(json.dumps({"workload": workload, "batch_size": 8, "loop": {"steps": 2}}))
    code, _, err = drivetrain(
        "plan", "run.yaml", "precision=fp8-mixed", "engine=zero2,zero3", "processes=2", "--machine", "2xH100-80GB"
    )
    assert code == 2
    assert "engine=zero2 has no fp8-mixed" in err
    assert "engine=zero3 has no fp8-mixed" in err
