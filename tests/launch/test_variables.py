"""Environment variables that a run sets for libraries which read nothing else."""

from __future__ import annotations

import os
from typing import Any

import pytest

from drivetrain.config.load import validate
from drivetrain.config.run import RunConfig
from drivetrain.launch.variables import KERNELS, of_the_run, variables

WORKLOADS: dict[str, dict[str, Any]] = {
    "texts": {
        "type": "text_classification",
        "model": {"tokenizer": "v", "config": {"model_type": "bert"}},
        "data": {"train": "t"},
    },
    "language": {
        "type": "language_model",
        "model": {"config": {"model_type": "llama"}},
        "data": {"train": "t.txt"},
    },
    "images": {
        "type": "image_classification",
        "model": {"config": {"model_type": "resnet"}},
        "data": {"source": "digits"},
    },
}


@pytest.fixture(autouse=True)
def no_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KERNELS:
        monkeypatch.delenv(name, raising=False)


def run_of(kind: str) -> RunConfig:
    rest = {"batch_size": 4, "loop": {"steps": 1}, "optimizer": {"name": "adamw", "lr": 1e-3}}
    config, problems = validate({"workload": WORKLOADS[kind], **rest}, [])
    assert config is not None, problems
    return config


@pytest.mark.parametrize("kind", ["texts", "language"])
def test_a_run_on_texts_keeps_few_kernels_of_onednn_on_a_cpu_alone(kind: str) -> None:
    assert KERNELS.items() <= of_the_run(run_of(kind), "cpu").items()
    assert not KERNELS.keys() & of_the_run(run_of(kind), "cuda").keys()


def test_other_runs_keep_the_kernels_of_convolutions() -> None:
    assert not KERNELS.keys() & of_the_run(run_of("images"), "cpu").keys()


@pytest.mark.parametrize("name", KERNELS)
def test_neither_cache_is_sized_where_the_user_sizes_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1000")
    added = of_the_run(run_of("texts"), "cpu")
    assert not KERNELS.keys() & added.keys()
    with variables(added):
        assert {each: os.environ.get(each) for each in KERNELS} == dict.fromkeys(KERNELS) | {name: "1000"}


def test_repeatable_products_on_a_gpu_are_asked_of_cublas() -> None:
    """PyTorch refuses them otherwise."""
    run = run_of("images")
    again = run.model_copy(update={"deterministic": True})
    assert of_the_run(again, "cuda")["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in {**of_the_run(again, "cpu"), **of_the_run(run, "cuda")}
