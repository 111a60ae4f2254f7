"""A state leaves the device once, whatever is done with it then. Engine tensors on the CPU play those of a GPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.checkpoint import host_copies
from drivetrain.checkpoint.directory import load, steps
from drivetrain.checkpoint.host_copies import HostCopies
from drivetrain.checkpoint.state import same
from drivetrain.training.progress import Progress
from tests.training.test_run_checkpoints import Training


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_copies_each_tensor_from_the_device_once(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, checkpoints={"asynchronous": asynchronous})
    progress = training.train(Progress(), 1)
    state = training.engine.state_dict()
    held = {tensor.data_ptr() for tensor in state["model"].values()}
    held |= {value.data_ptr() for own in state["optimizer"]["state"].values() for value in own.values()}
    copies: Counter[int] = Counter()
    for name, read_from in (("cpu", 0), ("copy_", 1), ("clone", 0)):
        real = getattr(Tensor, name)

        def counted(*args: Any, real: Any = real, read_from: int = read_from, **kwargs: Any) -> Any:
            copies[args[read_from].data_ptr()] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(Tensor, name, counted)
    monkeypatch.setattr(host_copies, "is_away", lambda tensor: tensor.data_ptr() in held)
    training.checkpoints.save(progress)
    training.checkpoints.finish()
    assert {pointer: copies[pointer] for pointer in held} == dict.fromkeys(held, 1)
    monkeypatch.undo()
    (path,) = steps(tmp_path)
    assert same(load(path)["model"], state["model"])


def test_the_next_save_uses_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "is_away", lambda _: True)
    own, host = {"a": torch.randn(3, 4).t(), "b": torch.zeros(2)}, HostCopies()
    own["c"] = own["a"]
    first = host.of(own, apart=False)
    assert first["a"] is first["c"]
    assert first["a"].data_ptr() != own["a"].data_ptr()
    own["a"].add_(1)
    again = host.of(own, apart=False)
    assert same(again, own)
    assert [again[name].data_ptr() for name in "abc"] == [first[name].data_ptr() for name in "abc"]
    other = {"a": torch.zeros(7), "b": own["b"]}
    assert same(host.of(other, apart=False), other)


def test_cpu_memory_is_copied_only_where_training_goes_on_meanwhile() -> None:
    own, host = {"a": torch.zeros(2)}, HostCopies()
    assert host.of(own, apart=False)["a"] is own["a"]
    taken = host.of(own, apart=True)
    own["a"].add_(1)
    assert not taken["a"].any()
    host.wait()
