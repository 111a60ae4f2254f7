"""Tests what a run leaves to the device and its data. A machine is a value: the GPU is played."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drivetrain.config.load import validate
from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.training import auto_settings
from drivetrain.training.auto_settings import compiling, keeps_freed_memory, micro_batch_tokens, rows_of
from drivetrain.workloads.base import Workload
from drivetrain.workloads.build import build_workload
from tests.test_waits import language, module
from tests.tiny_workload import CPU, TinyWorkload, perceptron

GPU = Machine("cuda", "a GPU", 8, 2**36, 16, (9, 0), frozenset({"float32", "float16", "bfloat16"}))


@pytest.fixture(autouse=True)
def _with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_settings, "find_spec", lambda _: object())


def run_of(workload: dict[str, Any], **more: Any) -> RunConfig:
    raw = {"workload": workload, "batch_size": 8, "micro_batch_size": 4, "precision": "bf16-mixed", **more}
    run, problems = validate({"loop": {"steps": 2000}, **raw}, [])
    assert run is not None, problems
    return run


def found(folder: Path, machine: Machine = GPU, training: bool = True, **more: Any) -> auto_settings.Compiling:
    run = run_of(more.pop("workload", None) or language(folder), **more)
    workload = build_workload(run.workload, run.seed)
    return compiling(run, machine, workload, training)


def test_a_long_training_on_a_gpu_compiles_blocks(tmp_path: Path) -> None:
    assert found(tmp_path).what == "blocks"
    assert found(tmp_path, engine="fsdp", processes=2).what == "blocks"


def test_on_a_cpu_and_where_nothing_is_trained_nothing_is_compiled(tmp_path: Path) -> None:
    for each in (found(tmp_path, CPU), found(tmp_path, training=False)):
        assert (each.what, each.why_not) == (False, None)


@pytest.mark.parametrize("machine", [CPU, GPU])
@pytest.mark.parametrize("wanted", [True, False])
def test_the_run_file_decides_where_it_says_so(wanted: bool, machine: Machine, tmp_path: Path) -> None:
    assert found(tmp_path, machine, compile=wanted, loop={"steps": 1}).what is wanted


@pytest.mark.parametrize(
    ("engine", "keeps"),
    [
        ("single", True), ("ddp", True), ("zero0", True), ("accelerate-ddp", True), ("mesh-pp2", True),
        ("fsdp", False), ("zero2", False), ("zero3", False), ("accelerate-fsdp", False), ("mesh-tp2", False),
    ],
)  # fmt: skip
def test_on_a_cpu_freed_memory_is_given_back_where_an_engine_shards(engine: str, keeps: bool, tmp_path: Path) -> None:
    run = run_of(language(tmp_path), engine=engine, **({} if engine == "single" else {"processes": 2}))
    assert keeps_freed_memory(run, CPU) is keeps
    assert keeps_freed_memory(run, GPU)
    for wanted in ("keep", "system"):
        asked = run.model_copy(update={"allocator": wanted})
        assert [keeps_freed_memory(asked, machine) for machine in (CPU, GPU)] == [wanted == "keep"] * 2


AGAINST: dict[str, tuple[dict[str, Any], Machine, str]] = {
    "a short run": ({"loop": {"steps": 100}}, GPU, "200 forward passes are too few"),
    "an engine that cannot": ({"engine": "dp"}, GPU, "nn.DataParallel copies the model"),
    "an engine that was not measured": ({"engine": "zero2"}, GPU, "engine=zero2 is not known to gain"),
    "exact resumes": ({"deterministic": True}, GPU, "deterministic: true"),
    "packed rows in fp32": ({"precision": "fp32"}, GPU, "packed rows in fp32 take a kernel here that breaks"),
    "packed rows on an older GPU": ({}, replace(GPU, compute_capability=(7, 5)), "packed rows in bf16-mixed"),
    "another maker's GPU": ({}, replace(GPU, compute_capability=None), "packed rows in bf16-mixed"),
    "a quantised base": ({"quantised_base": {"format": "nf4"}}, GPU, "layers with codes"),
    "adapters of other kinds": ({"adapter": {"method": "prefix"}}, GPU, "adapters of kind prefix"),
}


@pytest.mark.parametrize(("more", "machine", "why"), AGAINST.values(), ids=AGAINST)
def test_what_speaks_against_it_is_reported(more: dict[str, Any], machine: Machine, why: str, tmp_path: Path) -> None:
    run = run_of(language(tmp_path))
    changed, _ = validate({**run.model_dump(mode="json", exclude_unset=True), **more}, [])
    assert changed is not None
    words = compiling(changed, machine, build_workload(run.workload, 0), training=True)
    assert words.what is False
    assert why in (words.why_not or "")


def test_a_model_of_ones_own_is_left_as_it_is(tmp_path: Path) -> None:
    assert "own code" in (found(tmp_path, workload=module(tmp_path)).why_not or "")


def test_without_triton_nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_settings, "find_spec", lambda _: None)
    assert found(tmp_path).why_not == "Triton is not installed"


# --- rows of one length -----------------------------------------------------------------------------------------------


def rows(folder: Path, machine: Machine, compiles: bool = False, **more: Any) -> Any:
    data = {name: more.pop(name) for name in ("fixed_rows", "packing", "stream") if name in more}
    run = run_of(language(folder, data=data), **more)
    return rows_of(run, machine, build_workload(run.workload, run.seed), compiles)


def test_packed_rows_have_one_length_on_a_gpu_and_where_blocks_are_compiled(tmp_path: Path) -> None:
    assert rows(tmp_path, CPU) is None
    on_gpu = rows(tmp_path, GPU)
    assert on_gpu.tokens % 64 == 0
    assert on_gpu.samples <= 4, "micro_batch_size bounds a row"
    assert rows(tmp_path, CPU, compiles=True) is not None
    assert rows(tmp_path, GPU, fixed_rows=False) is None
    assert rows(tmp_path, CPU, fixed_rows=True) is not None


@pytest.mark.parametrize(
    ("precision", "machine", "tokens"),
    [
        ("fp32", CPU, 120),
        ("bf16-mixed", CPU, 120),
        ("bf16-mixed", GPU, 16_384),
        ("fp32", GPU, 4_096),
        ("fp16-mixed", replace(GPU, compute_capability=(6, 1)), 4_096),
        ("fp16-mixed", replace(GPU, compute_capability=None), 4_096),
    ],
)
def test_a_pass_costs_more_tokens_the_faster_the_device(
    precision: str, machine: Machine, tokens: int, tmp_path: Path
) -> None:
    run = run_of(language(tmp_path), precision=precision)
    assert micro_batch_tokens(run, machine) == tokens


def test_a_bound_in_tokens_is_the_length(tmp_path: Path) -> None:
    assert rows(tmp_path, GPU, micro_batch_tokens=150).tokens == 150


def test_a_bound_in_tokens_that_the_samples_cannot_fill_pads_no_row_up_to_it(tmp_path: Path) -> None:
    lengths = sorted(build_workload(run_of(language(tmp_path)).workload, 0).lengths or ())
    most = sum(lengths[-4:])  # micro_batch_size
    assert most <= rows(tmp_path, GPU, micro_batch_tokens=100_000).tokens < most + 64


@pytest.mark.parametrize("more", [{"packing": False}, {"stream": True}])
def test_padded_batches_and_streams_have_none(more: dict[str, Any], tmp_path: Path) -> None:
    assert rows(tmp_path, GPU, **more) is None
    assert rows_of(run_of(module(tmp_path)), GPU, TinyWorkload(perceptron), compiles=True) is None


def test_the_longest_sample_of_training_or_evaluation_bounds_positions(tmp_path: Path) -> None:
    run = run_of(language(tmp_path))
    workload: Workload = build_workload(run.workload, run.seed)
    lengths = [*np.asarray(workload.lengths), *(workload.evaluation_lengths or [])]
    found = rows_of(run, GPU, workload, compiles=False)
    assert found is not None
    assert found.longest == max(lengths)


def test_the_report_says_what_was_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(language(tmp_path), precision="fp32")
    workload = build_workload(run.workload, run.seed)
    assert auto_settings.chosen(run, CPU, workload, False) == {}
    workload.rows = rows_of(run, GPU, workload, compiles=False)
    monkeypatch.setattr(auto_settings, "workers_for", lambda _: 3)
    words = auto_settings.chosen(run, GPU, workload, False)
    assert workload.rows is not None
    assert (words["row_tokens"], words["loader_workers"]) == (workload.rows.tokens, 3)
    assert "packed rows in fp32" in words["not_compiled"]
    half = run_of(language(tmp_path))
    assert auto_settings.chosen(half, GPU, workload, False)["not_compiled"] == "the model has no blocks that repeat"
    assert "not_compiled" not in auto_settings.chosen(half, GPU, workload, "2 blocks")
