"""Tests which optimizer works under which engine and on which device, as a run reports it before any work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drivetrain.config import rules
from drivetrain.config.notices import notices
from tests.config.test_rules import CPU, H100, T4, config

IN_BITS = ["adamw8bit", "adamw4bit", "adamw-fp8", "bnb-adamw8bit", "torchao.optim:AdamW4bit"]
WHOLE = ["adafactor", "galore", "torch.optim:Adafactor", "pytorch_optimizer:GaLore"]
PIECES = ["fsdp", "zero1", "zero2", "zero3", {"name": "fsdp", "hybrid": 2}, {"name": "accelerate", "driver": "zero2"}]
PIECES += [{"name": "mesh", "dp": 2, "shard": True}, {"name": "mesh", "tp": 2}]
BOTH = ["single", "dp", "ddp", "zero0", {"name": "ddp", "shard_optimizer": True}]


def refused(name: str, engine: Any, machine: Any = H100) -> list[str]:
    spread = {} if engine in ("single", "dp") else {"processes": 2}
    machine = replace(machine, device_count=2, packages=None)
    run = config(optimizer={"name": name}, engine=engine, precision="fp32", **spread)
    return [found.why for found in rules.check(run, machine) if found.field == "optimizer.name"]


@pytest.mark.parametrize("name", [*IN_BITS, *WHOLE, "bnb-paged-adamw8bit"])
def test_small_states_work_where_ranks_hold_whole_parameters(name: str) -> None:
    for engine in BOTH:
        assert refused(name, engine) == []


@pytest.mark.parametrize("name", WHOLE)
def test_updates_of_rows_columns_and_singular_vectors_need_whole_tensors(name: str) -> None:
    for engine in PIECES:
        [why] = refused(name, engine)
        assert "needs whole tensors" in why
    assert refused(name, {"name": "mesh", "pp": 2}) == []


@pytest.mark.parametrize("name", IN_BITS)
def test_blocks_of_few_bits_are_refused_where_no_checkpoint_could_name_them(name: str) -> None:
    for engine in ("zero1", "zero2", "zero3", {"name": "accelerate", "driver": "zero2"}):
        [why] = refused(name, engine)
        assert "flat pieces of many parameters" in why
    [why] = refused(name, {"name": "mesh", "pp": 2})
    assert "not joined over a mesh" in why
    on_fsdp = refused(name, "fsdp")
    assert len(on_fsdp) == ("bnb" in name)
    assert all("updates whole tensors, and engine=fsdp shards them" in why for why in on_fsdp)


@pytest.mark.parametrize("name", ["bnb-paged-adamw8bit", "bitsandbytes.optim:PagedAdamW8bit"])
def test_pages_need_a_gpu(name: str) -> None:
    assert refused(name, "single", CPU) == [f"{name} moves its state between a GPU and main memory, and this is a CPU"]
    assert refused(name, "single") == []


def test_fp8_states_need_a_gpu_that_has_fp8_or_a_cpu() -> None:
    assert refused("adamw-fp8", "single", T4) == ["adamw-fp8 needs compute capability 8.9, and Tesla T4 has 7.5"]
    assert refused("adamw-fp8", "single", CPU) == refused("adamw-fp8", "single", H100) == []


def test_betas_and_eps_without_effect_are_reported() -> None:
    words = " ".join(notices(config(optimizer={"name": "adafactor", "betas": (0.8, 0.9), "eps": 1e-6}), CPU))
    assert "optimizer.betas has no effect: adafactor has none" in words
    assert "optimizer.eps has no effect" in words
    assert "optimizer." not in " ".join(notices(config(optimizer={"name": "galore", "betas": (0.8, 0.9)}), CPU))
