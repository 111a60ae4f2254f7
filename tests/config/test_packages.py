"""Optional packages that a run needs are known before any process starts."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain.config import rules
from drivetrain.config.load import validate
from drivetrain.config.packages import OPTIONAL, needed
from drivetrain.config.run import RunConfig
from tests.tiny_workload import CPU

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
NEEDS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "nothing": ({}, set()),
    "zero": ({"engine": "zero2"}, {"deepspeed"}),
    "accelerate": ({"engine": "accelerate-zero1"}, {"accelerate", "deepspeed"}),
    "adapter": ({"adapter": {"method": "lora"}}, {"peft"}),
    "qlora": ({"adapter": {"method": "lora"}, "quantised_base": "nf4"}, {"peft", "bitsandbytes"}),
    "int4": ({"adapter": {"method": "lora"}, "quantised_base": "int4"}, {"peft", "torchao"}),
    "fp8": ({"precision": "fp8-mixed"}, {"torchao"}),
    "8 bits": ({"optimizer": {"name": "bnb-adamw8bit"}}, {"bitsandbytes"}),
    "galore": ({"optimizer": {"name": "galore"}}, {"pytorch_optimizer"}),
    "tensorboard": ({"tracking": {"trackers": ["progress", "tensorboard"]}}, {"tensorboard"}),
}


def run_of(block: dict[str, Any], tmp_path: Path) -> RunConfig:
    (tmp_path / "net.py").write_text("")
    workload = {"type": "module", "path": str(tmp_path / "net.py")}
    found, problems = validate({"workload": workload, "batch_size": 4, "loop": {"steps": 1}, **block}, [])
    assert found is not None, problems
    return found


@pytest.mark.parametrize("name", NEEDS)
def test_what_is_missing_is_reported_with_the_extra_that_brings_it(name: str, tmp_path: Path) -> None:
    block, packages = NEEDS[name]
    run = run_of(block, tmp_path)
    assert {package for _, _, package in needed(run)} == packages

    def words(installed: frozenset[str]) -> list[str]:
        found = rules.check(run, replace(CPU, packages=installed))
        return [problem.fix for problem in found if "not installed" in problem.why]

    assert sorted(words(frozenset())) == sorted(
        f"pip install 'drivetrain[{OPTIONAL[each].extra}]'" for each in packages
    )
    assert words(frozenset(OPTIONAL)) == []


def test_each_extra_exists_and_brings_its_package() -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    for name, package in OPTIONAL.items():
        assert any(line.replace("-", "_").startswith(name.replace(".", "_")) for line in extras[package.extra])
