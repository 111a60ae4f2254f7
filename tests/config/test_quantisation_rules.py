"""Tests what quantisation-aware training and products in 8 bits do not go with, as a run reports it before any
work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drivetrain.config import rules
from drivetrain.config.machine import Machine
from tests.config.test_rules import CPU, H100, T4, config

A100 = replace(H100, device_name="NVIDIA A100", compute_capability=(8, 0))
L4 = replace(H100, device_name="NVIDIA L4", compute_capability=(8, 9))
TEXTS = {"type": "language_model", "model": {"path": "owner/model"}, "data": {"train": "owner/texts"}}
SPREAD = ("ddp", "fsdp", "zero2", "zero3", {"name": "mesh", "tp": 2}, {"name": "accelerate", "driver": "zero2"})


def refused(machine: Machine = H100, engine: Any = "single", **changes: Any) -> dict[str, str]:
    """Field → why."""
    spread = {} if engine in ("single", "dp") else {"processes": 2}
    run = config(engine=engine, **({"workload": TEXTS} | changes), **spread)
    return {problem.field: problem.why for problem in rules.check(run, replace(machine, packages=None))}


@pytest.mark.parametrize("form", ["int8-dynamic-int4-weight", "int4-weight", "int8-weight"])
def test_quantisation_aware_training_works_everywhere_but_on_a_mesh(form: str) -> None:
    for engine in ("single", "dp", *SPREAD):
        found = refused(engine=engine, quantisation_aware=form)
        if isinstance(engine, dict) and engine["name"] == "mesh":
            assert "tensor parallelism cuts rows" in found.pop("quantisation_aware")
        assert not found, engine
    assert not refused(CPU, quantisation_aware=form, adapter="lora")


@pytest.mark.parametrize(
    ("changes", "field", "why"),
    [
        ({"quantised_base": "int4", "adapter": "lora"}, "quantisation_aware", "quantised_base keeps codes already"),
        ({"precision": "fp8-mixed"}, "quantisation_aware", "fp8-mixed rounds the same products"),
        ({"adapter": {"dora": True}}, "adapter.dora", "as they are, not as they will be"),
        ({"adapter": {"pissa": True}}, "adapter.pissa", "PiSSA changes the weights that are quantised"),
        (
            {"quantisation_aware": {"format": "int8-weight", "group_size": 64}},
            "quantisation_aware.group_size",
            "a scale for each row",
        ),
    ],
)
def test_what_quantisation_aware_training_does_not_go_with(changes: dict[str, Any], field: str, why: str) -> None:
    [(words, reason)] = refused(**({"quantisation_aware": "int4-weight"} | changes)).items()
    assert words == field
    assert why in reason


def test_a_frozen_base_without_an_adapter_would_train_nothing() -> None:
    assert "nothing would be trained" in refused(quantised_base="nf4")["quantised_base"]
    assert "quantised_base" not in refused(quantised_base="nf4", adapter="lora")


def test_a_resolved_run_file_is_no_contradiction() -> None:
    assert not refused(quantisation_aware={"format": "int8-weight", "group_size": 32})


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        (CPU, "it exists on cuda only and this is a CPU"),
        (T4, "Tesla T4 has compute capability 7.5; it needs 8.9"),
        (A100, "NVIDIA A100 has compute capability 8.0; it needs 8.9"),
    ],
)
def test_a_device_without_fp8_is_reported_with_what_works(machine: Machine, why: str) -> None:
    run = config(precision="fp8-mixed")
    [problem] = rules.check(run, machine)
    assert (problem.field, problem.why) == ("precision", f"fp8-mixed was given, but {why}")
    assert "bf16-mixed" in problem.fix or machine is T4
    assert "fp8-mixed" not in problem.fix
    assert not refused(L4, precision="fp8-mixed")


def test_fp8_is_of_single_ddp_and_fsdp() -> None:
    for engine in ("single", "ddp", "fsdp", {"name": "accelerate", "driver": "ddp"}):
        assert not refused(engine=engine, precision="fp8-mixed")
    for engine in ("dp", "zero0", "zero3", {"name": "accelerate", "driver": "zero2"}, {"name": "mesh", "dp": 2}):
        assert "were tried on single, ddp and fsdp alone" in refused(engine=engine, precision="fp8-mixed")["precision"]


def test_a_base_of_codes_has_no_products_in_fp8() -> None:
    assert "keeps codes" in refused(precision="fp8-mixed", quantised_base="nf4", adapter="lora")["precision"]
    assert not refused(precision="fp8-mixed", adapter="lora")
