"""Ranks with different software beneath them get a report of it before they form a group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from drivetrain.config.machine import Machine
from drivetrain.errors import UserError
from drivetrain.launch.agreement import agree, differences
from drivetrain.measure import gpu_software
from drivetrain.measure.gpu_software import device_software
from tests.ranks import RankPool

SOME = {"device": "cuda", "torch": "2.13.0+cu130", "GPU": "an H100", "driver": "580.1", "CUDA": "13.0", "NCCL": "2.28"}


def met(folder: Path, changes: dict[str, str], changed: int) -> list[str] | str:
    """One rank's warnings or error, where rank `changed` has something else."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.FileStore(str(folder / "-".join(["store", *changes])), world)
    try:
        return agree(store, rank, world, {**SOME, **(changes if rank == changed else {})})
    except UserError as error:
        return str(error)


def test_two_ranks_of_other_versions_are_refused_and_of_other_gpus_warned(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    pool = ranks(2)
    assert pool.run(met, tmp_path, {}, 1) == [[], []]
    for words in pool.run(met, tmp_path, {"NCCL": "2.26", "torch": "2.12.0+cu128"}, 1):
        assert "versions: NCCL is 2.28 on rank 0 and 2.26 on rank 1" in words
        assert "versions: torch is 2.13.0+cu130 on rank 0 and 2.12.0+cu128 on rank 1" in words
        assert "install the same everywhere" in words
    warned, others = pool.run(met, tmp_path, {"GPU": "an A100", "driver": "550.2"}, 1)
    assert warned == [
        "GPU is an H100 on rank 0 and an A100 on rank 1: the slowest rank sets the pace",
        "driver is 580.1 on rank 0 and 550.2 on rank 1: the slowest rank sets the pace",
    ]
    assert others == []


def test_a_rank_without_a_gpu_among_those_with_one_is_refused() -> None:
    found = differences([SOME, SOME, {"device": "cpu", "torch": SOME["torch"]}])
    assert "device is cuda on ranks 0, 1 and cpu on rank 2" in found["problems"]
    assert "NCCL is 2.28 on ranks 0, 1 and not there on rank 2" in found["problems"]


def test_what_lies_beneath_a_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_software, "driver_version", lambda: "580.1")
    monkeypatch.setattr(gpu_software, "_nccl", lambda: "2.28")
    monkeypatch.setattr(gpu_software.torch.version, "cuda", "13.0")
    machine = Machine("cuda", "an H100", 1, 2**36, 8, (9, 0), frozenset())
    assert device_software(machine) | {"torch": SOME["torch"]} == SOME
    assert device_software(Machine("cpu", "a CPU", 1, 2**33, 2, None, frozenset())).keys() == {"device", "torch"}
