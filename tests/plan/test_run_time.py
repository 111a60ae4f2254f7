"""A run's step on a machine: micro-batches, what its settings change, and the disk of its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drivetrain.config.load import load
from drivetrain.config.run import RunConfig
from drivetrain.plan import estimate
from drivetrain.plan.estimate import Traced
from drivetrain.plan.machines import cluster
from drivetrain.plan.run_time import checkpoint_bytes, circumstances, disk_bytes, micro_batches, time_of
from drivetrain.plan.speeds import FUSED
from drivetrain.plan.step_costs import Operations
from tests.plan.costs import costs

H100 = cluster("8xH100")


def run(*overrides: str) -> RunConfig:
    found, problems = load(Path("recipes/digits.yaml"), list(overrides))
    assert found is not None, problems
    return found


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("batch_size=64",), 1),
        (("batch_size=64", "micro_batch_size=16"), 4),
        (("batch_size=64", "micro_batch_size=16", "engine=ddp", "processes=4"), 1),
        (("batch_size=64", "micro_batch_size=5", "engine=ddp", "processes=2"), 7),
        (("batch_size=64", "micro_batch_size=8", "engine={name: dp, replicas: 2}"), 4),
    ],
)
def test_micro_batches_are_those_that_a_rank_runs(overrides: tuple[str, ...], expected: int) -> None:
    assert micro_batches(run(*overrides)) == expected


def test_settings_of_a_run_are_the_circumstances_of_its_step() -> None:
    found = circumstances(run("precision=bf16-mixed", "recompute=true"), H100, compiles=True)
    assert (found.recomputes, found.fused, found.dtype, found.causal) == (True, FUSED, "bfloat16", False)
    assert circumstances(run(), H100).fused == 1.0
    assert circumstances(run("precision=tf32"), H100).products == {"float32": "tfloat32"}
    assert circumstances(run("precision=tf32"), H100).dtype == "tfloat32"
    staged = circumstances(run("engine=mesh-pp2", "processes=2", "batch_size=64", "micro_batch_size=8"), H100)
    assert (staged.stages, staged.micro_batches) == (2, 8)


@pytest.mark.parametrize(("steps", "compiled"), [(20, False), (5000, True)])
def test_blocks_are_compiled_in_a_plan_where_the_run_would_compile_them(
    steps: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(estimate, "time_of", lambda *given: seen.append(given[3]))
    Traced(cluster("1xH100")).time(run(f"loop.steps={steps}", "loop.epochs=null", "batch_size=64"), costs())
    assert seen == [compiled]


def test_only_language_models_leave_out_masked_pairs() -> None:
    found, problems = load(Path("recipes/alpaca-qlora.yaml"), [])
    assert found is not None, problems
    assert circumstances(found, H100).causal
    assert not circumstances(found, cluster("this machine")).causal or torch.cuda.is_available()


def test_a_step_on_a_quicker_device_takes_less() -> None:
    work = costs(Operations("convolution", "float32", 100, 1e13, 1e10))
    assert time_of(run(), work, cluster("1xH100")).seconds < time_of(run(), work, cluster("1xP40")).seconds


@pytest.mark.parametrize("overrides", [(), ("optimizer={name: sgd, lr: 0.1}",)])
def test_a_checkpoint_is_as_large_as_the_one_that_a_run_writes(
    overrides: tuple[str, ...], tmp_path: Path, drivetrain: Any
) -> None:
    where = f"output={tmp_path / 'run'}"
    code, *_ = drivetrain("train", "recipes/digits.yaml", *overrides, "loop={steps: 2}", where, "--quiet")
    assert code == 0
    saved = sorted((tmp_path / "run" / "checkpoints").glob("*/"))[-1]
    weights = sum(tensor.numel() for tensor in load_file(saved / "model.safetensors").values())
    written = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
    planned = checkpoint_bytes(run(*overrides), costs(parameters=weights))
    assert planned == pytest.approx(written, rel=0.02, abs=40_000), "beside them: positions, random states, checksums"
    assert disk_bytes(run(*overrides), costs(parameters=weights)) == 4 * planned
