"""Tests the checks before the first step: ranks that differ are named, the disk is measured, the network
timed."""

from __future__ import annotations

import random
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.checkpoint.directory import newest_good
from drivetrain.config.load import load, validate
from drivetrain.config.run import RunConfig
from drivetrain.distributed.communicator import Communicator
from drivetrain.errors import UserError
from drivetrain.launch import group
from drivetrain.launch.group import join
from drivetrain.runtime import environment
from drivetrain.runtime.hardware import detect
from drivetrain.training import preflight
from drivetrain.training.assemble import assemble
from drivetrain.training.run import run
from drivetrain.workloads.build import build_workload
from tests.launch.test_start import prepared
from tests.ranks import RankPool

Usage = namedtuple("Usage", "total used free")


class Numbers:
    """Samples that are what they are given."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def load(self, index: int, epoch: int) -> Any:
        del epoch
        value = self.values[index]
        return value() if callable(value) else value


class Data:
    """As much of a workload as its data."""

    def __init__(self, train: Any, evaluation: Any = None) -> None:
        self.train, self.evaluation = Numbers(train), None if evaluation is None else Numbers(evaluation)


def some_run(lr: float = 0.1) -> RunConfig:
    given = {"workload": {"type": "module", "path": "x.py"}, "batch_size": 4, "loop": {"steps": 1}}
    config, _ = validate({**given, "optimizer": {"lr": lr}}, [])
    assert config is not None
    return config


def refused(ask: Callable[[], object]) -> list[tuple[str, str]]:
    try:
        ask()
    except UserError as error:
        return [(problem.field, problem.why) for problem in error.problems]
    return []


def on_a_rank() -> dict[str, Any]:
    """The second of two ranks has another learning rate, another torch, other data; all in one spawn."""
    ranks = Communicator()
    odd = ranks.rank == 1
    found: dict[str, Any] = {"alike": refused(lambda: preflight.agree(some_run(), ranks))}
    found["run"] = refused(lambda: preflight.agree(some_run(0.2 if odd else 0.1), ranks))
    real = environment.versions
    environment.versions = lambda: {**real(), **({"torch": "1.0"} if odd else {})}  # type: ignore[assignment]
    try:
        found["versions"] = refused(lambda: preflight.agree(some_run(), ranks))
    finally:
        environment.versions = real
    of: dict[str, Any] = {
        "same data": [1, 2, 3],
        "shorter": [1, 2] if odd else [1, 2, 3],
        "changed": [torch.tensor([1.0, 2.0]), {"x": np.arange(3) + odd}, "text"],
        "by chance": [lambda: random.random(), 2, lambda: torch.rand(2)],
    }
    seed = ranks.rank
    random.seed(seed)
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    for name, values in of.items():
        found[name] = refused(lambda values=values: preflight.same_data(Data(values), ranks))  # type: ignore[misc,arg-type]
    found["drawn"] = not torch.equal(before, torch.get_rng_state())
    found["network"] = preflight.timed_all_reduce(ranks, torch.device("cpu"))
    return found


def test_ranks_that_differ_are_named_with_what_differs(ranks: Callable[[int], RankPool]) -> None:
    first, second = ranks(2).run(on_a_rank)
    for name in ("alike", "run", "versions", "same data", "shorter", "changed", "by chance", "drawn"):
        assert first[name] == second[name], "all ranks are told the same"
    assert first["alike"] == []
    assert first["run"] == [("run file", "optimizer.lr is 0.1 on rank 0 and 0.2 on rank 1")]
    here = environment.versions()["torch"]
    assert first["versions"] == [("versions", f"torch is {here} on rank 0 and 1.0 on rank 1")]
    assert first["same data"] == []
    assert first["shorter"][0] == ("workload.data", "train samples is 3 on rank 0 and 2 on rank 1")
    (changed,) = first["changed"]
    assert changed[1].startswith("train sample 1 is ")
    assert first["by chance"] == [], "samples that are drawn anew each time are no data that differ"
    assert not first["drawn"], "looking at samples draws nothing that training would have drawn"
    assert first["network"]["all_reduce_latency_seconds"] > 0
    assert first["network"]["all_reduce_bytes_per_second"] > 0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(prepared(tmp_path))
    return tmp_path


def config_of(place: Path, *settings: str) -> RunConfig:
    config, problems = load(place / "run.yaml", [*settings, "tracking.trackers=[]"])
    assert config is not None
    assert not problems
    return config


@pytest.mark.parametrize("name", ["adamw", "sgd", "torch.optim.RAdam", "torch.optim:RAdam"])
def test_the_size_of_a_checkpoint_is_known_before_there_is_one(place: Path, name: str) -> None:
    config = config_of(place, f"optimizer.name={name}", "output=run", *([] if name == "sgd" else ["momentum=0"]))
    machine = detect("cpu")
    _, engine = assemble(config, machine, Communicator(), training=True)
    expected = preflight.checkpoint_bytes(config, engine.shapes(), engine.engaged().trained_parameters)
    engine.close()
    run(config, machine)
    path, _ = newest_good(place / "run" / "checkpoints")
    assert path is not None
    from safetensors.torch import load_file

    parts = [file for file in path.glob("*.safetensors") if file.name.startswith(("model", "optimizer"))]
    tensors = [tensor for part in parts for tensor in load_file(part).values()]
    floats = sum(tensor.nbytes for tensor in tensors if tensor.is_floating_point() and tensor.dim())
    assert expected == floats


def test_a_disk_without_room_for_one_checkpoint_is_refused_before_an_old_run_is_replaced(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(config_of(place, "output=run", "loop.steps=2"), detect("cpu"))
    before = sorted(path.name for path in (place / "run" / "checkpoints").iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 10, 0))
    monkeypatch.setattr(preflight, "checkpoint_bytes", lambda *_: 10 * 2**20)
    with pytest.raises(UserError, match=r"takes at least 10.0 MiB, and .* has 0.\d MiB free"):
        run(config_of(place, "output=run"), detect("cpu"), overwrite=True)
    assert sorted(path.name for path in (place / "run" / "checkpoints").iterdir()) == before


def test_a_disk_with_room_for_exactly_one_checkpoint_is_not_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(place, "output=run", "checkpoints.keep_last=1", "checkpoints.keep_best=0")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 2**20))
    assert len(preflight.disk(config, 2**20, place / "checkpoints", False)) == 1, "a warning: two while it is replaced"
    with pytest.raises(UserError, match=r"takes at least 1.0 MiB"):
        preflight.disk(config, 2**20 + 1, place / "checkpoints", False)


def test_a_disk_with_room_for_fewer_checkpoints_than_are_kept_is_reported(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(place, "output=run")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 4 * 2**20))
    assert preflight.disk(config, 2**20, place / "checkpoints", False) == [], "two, the best, and one being written"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 3 * 2**20))
    (reported,) = preflight.disk(config, 2**20, place / "checkpoints", False)
    assert "3 checkpoints are to be kept, which takes 4.0 MiB more" in reported


def test_ranks_that_cannot_meet_are_reported_with_where_and_through_which_interfaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.distributed.DistNetworkError("the client socket has timed out")

    monkeypatch.setattr(group, "rendezvous", refuse)
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node-a", "MASTER_PORT": "29501"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(RuntimeError) as raised:
        join("cpu")
    text = str(raised.value)
    assert text.startswith("rank 3 of 4 on ")
    for words in ("at node-a:29501: the client socket has timed out", "(127.0.0.1)", "set GLOO_SOCKET_IFNAME"):
        assert words in text


def test_own_code_with_batch_norm_says_so_where_the_batch_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tmp_path)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "workload.py"
    file.write_text(file.read_text().replace("nn.LayerNorm(16)", "nn.BatchNorm1d(16)"))

    def notes(*overrides: str) -> list[str]:
        config, _ = load(Path("run.yaml"), overrides)
        assert config is not None
        workload = build_workload(config.workload, 0)
        workload.build_model()
        return [note for note in preflight.workload_notes(config, workload) if "BatchNorm" in note]

    assert not notes(), "one device runs the whole batch"
    (spread,) = notes("engine=ddp", "processes=2")
    assert "the batch of 8 is cut into pieces of 4" in spread
    (cut,) = notes("micro_batch_size=2")
    assert "pieces of 2" in cut
    file.write_text(file.read_text().replace("nn.BatchNorm1d(16)", "nn.LayerNorm(16)"))
    assert not notes("engine=ddp", "processes=2")
