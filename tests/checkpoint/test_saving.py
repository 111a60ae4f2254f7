"""A save by many ranks: the same files as one rank writes, no more memory than each has, errors heard by all."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain.checkpoint import saving
from drivetrain.checkpoint.directory import load, newest_good, verify
from drivetrain.checkpoint.host_copies import HostCopies
from drivetrain.checkpoint.saving import save
from drivetrain.checkpoint.state import same
from drivetrain.distributed.communicator import Communicator
from drivetrain.distributed.shard import Shard
from drivetrain.errors import RunError
from tests.ranks import RankPool

Pools = Callable[[int], RankPool]


def state() -> dict[str, Any]:
    weight = torch.arange(24.0).view(6, 4)
    tied = {"embed": weight, "head": weight, "bias": torch.arange(3, dtype=torch.bfloat16)}
    moments = {"embed": {"exp_avg": weight * 2, "step": 7}, "bias": {"exp_avg": tied["bias"], "step": 7}}
    groups = [{"params": ["embed", "bias"], "lr": 0.1}]
    return {
        "model": tied,
        "optimizer": {"state": moments, "param_groups": groups},
        "training": {"progress": {"step": 7}},
    }


def share(rank: int, world: int) -> dict[str, Any]:
    """Of columns, and of a flat stretch; the last rank alone has the bias."""
    whole = state()
    columns = torch.arange(4).tensor_split(world)[rank]
    weight = Shard(whole["model"]["embed"][:, columns], torch.Size([6, 4]), (0, int(columns[0])))
    flat = torch.arange(24).tensor_split(world)[rank]
    moment = Shard((torch.arange(24.0) * 2)[flat], torch.Size([6, 4]), (int(flat[0]),))
    model: dict[str, Any] = {"embed": weight, "head": weight}
    moments: dict[str, Any] = {"embed": {"exp_avg": moment, "step": 7}}
    if rank == world - 1:
        model["bias"], moments["bias"] = whole["model"]["bias"], whole["optimizer"]["state"]["bias"]
    own = {"state": moments, "param_groups": whole["optimizer"]["param_groups"]}
    return {"model": model, "optimizer": own, "training": whole["training"] if rank == 0 else {}}


def saved(root: Path) -> None:
    ranks = Communicator()
    save(root, 7, share(ranks.rank, ranks.world), {"metric": 1.0}, communicator=ranks)


def test_many_ranks_write_the_files_that_one_writes(ranks: Pools, tmp_path: Path) -> None:
    alone = save(tmp_path / "alone", 7, state(), {"metric": 1.0})
    ranks(2).run(saved, tmp_path / "together")
    together = tmp_path / "together" / alone.name
    assert verify(together) == []
    assert same(load(together), state())
    for file in alone.glob("*.safetensors"):
        assert file.read_bytes() == (together / file.name).read_bytes()
    assert load(together)["model"]["head"] is load(together)["model"]["embed"] or same(
        load(together)["model"]["head"], load(together)["model"]["embed"]
    )


def failing(root: Path) -> list[str]:
    """Returns what each rank hears when the second one cannot write, then cannot read back, then has what has no
    form."""
    ranks, heard = Communicator(), []
    fill, differing = saving.fill, saving.differing

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    save(root, 1, share(ranks.rank, ranks.world), {}, communicator=ranks)
    for name, bad in (("fill", full), ("differing", lambda *_: ["embed"]), ("", None)):
        parts = share(ranks.rank, ranks.world)
        if ranks.rank == 1 and bad is not None:
            setattr(saving, name, bad)
        elif ranks.rank == 1:
            parts["training"] = {"tags": {1}}
        try:
            save(root, 2, parts, {}, communicator=ranks)
        except RunError as error:
            heard.append(str(error))
        saving.fill, saving.differing = fill, differing
    save(root, 3, share(ranks.rank, ranks.world), {}, communicator=ranks)
    return heard


def test_all_ranks_hear_why_a_save_failed_and_the_earlier_ones_stay(ranks: Pools, tmp_path: Path) -> None:
    first, second = ranks(2).run(failing, tmp_path)
    assert first == second
    full, different, formless = first
    assert "No space left on device" in full
    assert f"{tmp_path / 'step-00000001'}" in full
    assert "embed of model" in different
    assert "a set has no form" in formless
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


# --- one rank --------------------------------------------------------------------------------------------------------

CALLS = [
    *((os, name) for name in ("pwrite", "preadv", "posix_fallocate", "fsync", "open", "mkdir")),
    *((Path, name) for name in ("rename", "write_text", "read_text", "open")),
]


class Faults:
    """The n-th of the calls that a save makes of the system fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.left, self.failed = number, ""
        for owner, name in CALLS:
            monkeypatch.setattr(owner, name, self._watched(getattr(owner, name), name))

    def _watched(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.failed = name
                raise OSError(5, "Input/output error")
            return call(*args, **kwargs)

        return watched


@pytest.mark.parametrize("step", [1, 2])
def test_a_fault_in_any_call_of_a_save_leaves_the_earlier_checkpoint(step: int, tmp_path: Path) -> None:
    save(tmp_path, 1, state(), {})
    later = state() | {"training": {"progress": {"step": 8}}}
    failed = set()
    for number in itertools.count(1):
        with pytest.MonkeyPatch.context() as monkeypatch:
            faults = Faults(monkeypatch, number)
            try:
                save(tmp_path, step, later, {})
                words = None
            except RunError as error:
                words = str(error)
        newest, skipped = newest_good(tmp_path)
        assert newest is not None
        assert skipped == []
        if not faults.failed:
            assert words is None
            assert same(load(newest), later)
            break
        failed.add(faults.failed)
        found = load(newest)
        if words is not None:
            assert "Input/output error" in words
        assert same(found, state()) or same(found, later), "one or the other, whole"
        assert words is not None or same(found, later), f"{faults.failed} failed in silence"
        for path in tmp_path.iterdir():
            if path != newest:
                shutil.rmtree(path)
        if same(found, later):  # put in place before the fault: the next one begins where this one did
            shutil.rmtree(newest)
            save(tmp_path, 1, state(), {})
    assert {"pwrite", "preadv", "fsync", "rename", "write_text", "posix_fallocate"} <= failed


@pytest.mark.parametrize("moment", ["before the first word", "at the first word", "at the second word"])
def test_a_save_that_loses_the_others_takes_nothing_away_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A rank that dies while they agree on a name must not cost the project that the run was started in."""
    (tmp_path / "workload.py").write_text("mine")
    monkeypatch.chdir(tmp_path)

    class Losing(Communicator):
        def on_first(self, do: Callable[[], Any]) -> Any:
            if moment == "before the first word":
                raise RuntimeError("Connection closed by peer")
            found = do()
            if moment == "at the first word":
                raise KeyboardInterrupt
            return found

        def on_each(self, do: Callable[[], Any]) -> Any:  # noqa: ARG002 (the name is the other's)
            raise RuntimeError("Connection closed by peer")

    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        save(tmp_path / "run" / "checkpoints", 1, state(), {}, communicator=Losing())
    assert (tmp_path / "workload.py").read_text() == "mine"


def test_writes_cut_short_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, place: write(file, data[:7], place))
    assert same(load(save(tmp_path, 7, state(), {})), state())


def test_a_file_system_without_room_to_reserve_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    assert same(load(save(tmp_path, 7, state(), {})), state())


def shifted(root: Path) -> list[str]:
    """Training goes on while a copy is written: what is saved is what was there."""
    ranks = Communicator("saving")
    parts = share(ranks.rank, ranks.world)
    kept = HostCopies().of(parts, apart=True)
    for held in (parts["model"]["embed"].tensor, parts["optimizer"]["state"]["embed"]["exp_avg"].tensor):
        held.fill_(-1)
    save(root, 7, kept, {}, communicator=ranks)
    dist.barrier()
    return [str(os.getpid())]


def test_a_copy_stays_as_it_was(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(shifted, tmp_path)
    assert same(load(tmp_path / "step-00000007"), state())


@pytest.mark.parametrize("kind", ["tensor", "piece"])
def test_ties_are_copied_once(kind: str) -> None:
    weight = torch.arange(4.0)
    given = weight if kind == "tensor" else Shard(weight, torch.Size([8]), (0,))
    copy = HostCopies().of({"a": given, "b": [given]}, apart=True)
    first, second = copy["a"], copy["b"][0]
    if kind == "piece":
        first, second = first.tensor, second.tensor
    assert first is second
    assert first.data_ptr() != weight.data_ptr()
