"""Memory of a rank beside its tensors: the gaps that an allocator leaves, and the libraries that are loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from drivetrain.config.run import RunConfig
from drivetrain.plan.calibration import DeviceSpeeds
from drivetrain.plan.machines import cluster
from drivetrain.plan.room import (
    HELD_ON_CPU,
    HELD_ON_GPU,
    HELD_ON_GPU_OF_PIECES,
    UNSEEN,
    library_bytes,
    unseen_bytes,
    with_held,
)
from drivetrain.plan.rows import Row
from drivetrain.plan.step_costs import Operations, StepMemory
from drivetrain.runtime.hardware import detect
from tests.plan.costs import costs

CURVE = ((1.0, 1e-6), (1e6, 1e-3))
PROGRAM = """
import json
from drivetrain.plan.calibrate_memory import measured_libraries
print(json.dumps(measured_libraries()))
"""


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    (tmp_path / "own.py").write_text("def build(): ...")
    workload = {"type": "module", "path": tmp_path / "own.py"}
    return RunConfig.model_validate({"workload": workload, "batch_size": 8, "loop": {"steps": 1}})


def of(size: int, run: RunConfig, device: str = "cpu") -> StepMemory:
    memory = StepMemory(size, size, {"activations": size})
    known = replace(costs(), memory=memory)
    known = replace(known, by_rank={0: known, 3: known})
    found = with_held(known, run, replace(detect(), device=device))
    assert [each.memory for each in found.by_rank.values()] == [found.memory, found.memory]
    assert found.memory.allocated == size
    return found.memory


def test_the_allocator_holds_more_than_the_tensors_that_are_alive(run: RunConfig) -> None:
    assert of(1000, run).reserved == 1000 * HELD_ON_CPU > 1000
    assert of(1000, run, "cuda").reserved == 1000 * HELD_ON_GPU


def test_on_a_gpu_an_engine_that_gathers_pieces_leaves_more_gaps(run: RunConfig) -> None:
    sharded = run.model_copy(update={"engine": RunConfig.model_validate({**run.model_dump(), "engine": "fsdp"}).engine})
    assert of(1000, sharded, "cuda").reserved == 1000 * HELD_ON_GPU_OF_PIECES > of(1000, run, "cuda").reserved


def test_a_way_whose_tensors_alone_would_fit_is_short_of_the_gaps(run: RunConfig) -> None:
    known = with_held(replace(costs(), memory=StepMemory(1000, 1000, {"activations": 1000})), run, detect())
    assert Row(run, (), known, capacity=2000).fits == "yes"
    assert Row(run, (), known, capacity=1100).fits == "no"


def test_libraries_count_where_the_run_computes_with_them() -> None:
    libraries = {"step": 1, "matmul": 10, "attention": 100, "convolution": 1000, "imports": 10_000}
    products = {"float32": CURVE}
    speeds = DeviceSpeeds(
        matmul=products, attention=products, convolution=products, memory=CURVE, optimizer=CURVE, random=CURVE,
        call_seconds=1e-6, libraries=libraries,
    )  # fmt: skip
    assert library_bytes([], speeds) == 1
    assert library_bytes([Operations("matmul", "float32", 1, 1.0, 1.0)] * 2, speeds) == 11
    assert library_bytes([Operations("convolution", "float32", 1, 1.0, 1.0)], speeds) == 1001


def test_libraries_are_a_wide_range_until_a_machine_is_calibrated() -> None:
    libraries = {"step": 1, "convolution": 1000, "imports": 10_000}
    products = {"float32": CURVE}
    speeds = DeviceSpeeds(
        matmul=products, attention=products, convolution=products, memory=CURVE, optimizer=CURVE, random=CURVE,
        call_seconds=1e-6, libraries=libraries,
    )  # fmt: skip
    host = replace(detect(), device="cpu")
    assert unseen_bytes(host, None) == UNSEEN["cpu"]
    assert unseen_bytes(host, speeds.model_copy(update={"libraries": {}})) == UNSEEN["cpu"]
    assert unseen_bytes(host, speeds) == (10_000, 11_001)


@pytest.mark.skipif(cluster("this machine").host.device != "cpu", reason="libraries are measured on CPUs")
def test_the_first_products_and_convolutions_load_code_that_stays() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert list(found) == ["step", "matmul", "attention", "convolution", "imports"]
    assert found["imports"] > 2**27, "PyTorch alone"
    assert found["matmul"] > 2**20
    assert found["convolution"] > 2**20, "oneDNN reads its code, and makes kernels"
    assert sum(found.values()) < 2**31
