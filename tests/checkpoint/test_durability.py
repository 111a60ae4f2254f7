"""The order in which a save reaches the disk: a machine that loses power at any moment keeps a whole checkpoint.

Every call of the system that matters is recorded, and the order is read off the record: what is read back was synced,
every file before the manifest, the manifest before the new name, the new name before anything older goes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.checkpoint.saving import save
from drivetrain.training.progress import Progress
from tests.training.test_run_checkpoints import Training

Call = tuple[str, str]


class Record:
    """Calls, in order, as (name, path within the root); of a file that is saved aside its place in the checkpoint."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Call] = []
        self._root = root
        for name in ("fsync", "pwrite", "preadv"):
            self._watch(monkeypatch, os, name, lambda descriptor, *_: os.readlink(f"/proc/self/fd/{descriptor}"))
        for name in ("unlink", "rmdir"):
            self._watch(monkeypatch, os, name, _in_folder)
        for name in ("write_text", "rename"):
            self._watch(monkeypatch, Path, name, lambda path, *_, **__: str(path))

    def _watch(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, path_of: Any) -> None:
        real = getattr(owner, name)

        def watched(*given: Any, **named: Any) -> Any:
            self.calls.append((name, os.path.relpath(path_of(*given, **named), self._root)))
            return real(*given, **named)

        monkeypatch.setattr(owner, name, watched)

    def first(self, name: str, path: str) -> int:
        return self.calls.index((name, path))

    def last(self, name: str, path: str) -> int:
        return len(self.calls) - 1 - self.calls[::-1].index((name, path))

    def between(self, start: int, end: int) -> list[Call]:
        assert start < end, self.calls
        return self.calls[start + 1 : end]

    def deletions(self) -> list[int]:
        return [number for number, (name, _) in enumerate(self.calls) if name in ("unlink", "rmdir")]


def _in_folder(path: Any, *_: Any, dir_fd: int | None = None) -> str:
    return str(path) if dir_fd is None else os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)


pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of open files are read from /proc")


def parts() -> dict[str, Any]:
    weights = {"a": torch.arange(6.0), "b": torch.ones(2, 2)}
    return {"model": weights, "optimizer": {"state": {"a": {"exp_avg": torch.ones(6)}}}, "training": {"step": 7}}


def assets(folder: Path, _: Mapping[str, Tensor]) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "config.json").write_text("{}")


def aside(record: Record, step: int) -> str:
    """The hidden folder that was renamed into place."""
    [found] = [
        path for name, path in record.calls if name == "rename" and path.startswith(f".step-{step:08d}.partial-")
    ]
    return found


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_save_is_on_the_disk_before_its_name_is_and_that_before_what_it_replaces_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    if is_replaced:
        save(tmp_path, 7, parts(), {}, assets)
    with monkeypatch.context() as patched:
        record = Record(tmp_path, patched)
        target = save(tmp_path, 7, parts(), {}, assets)
    own = aside(record, 7)
    manifest = record.first("write_text", f"{own}/manifest.json")
    files = [path for path in target.rglob("*") if path.name != "manifest.json"]
    assert {"model.safetensors", "optimizer.json", "config.json", "adapter"} <= {path.name for path in files}
    written = record.last("write_text", f"{own}/adapter/config.json")  # by the assets, last of all
    for path in files:
        name = f"{own}/{path.relative_to(target)}"
        assert ("fsync", name) in record.between(written, manifest), f"{name} before the manifest"
    for name in (f"{own}/model.safetensors", f"{own}/optimizer.safetensors"):
        proved = record.between(record.last("pwrite", name), record.first("preadv", name))
        assert ("fsync", name) in proved, f"{name} is read back from the disk"
    renamed = record.first("rename", own)
    synced = record.between(manifest, renamed)
    assert synced.index(("fsync", f"{own}/manifest.json")) < synced.index(("fsync", own)), "the manifest, then its name"
    durable = record.last("fsync", ".")
    assert renamed < durable
    gone = record.deletions()
    assert bool(gone) == is_replaced
    assert all(durable < number for number in gone), "what it replaces goes last"
    assert not any(name in ("pwrite", "write_text") for name, _ in record.calls[renamed:])


def test_an_older_checkpoint_goes_when_the_new_ones_name_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"every_steps": 1, "keep_last": 1, "keep_best": 0}
    training = Training(tmp_path, checkpoints=kept)
    training.checkpoints.save(training.train(Progress(), 1))
    with monkeypatch.context() as patched:
        record = Record(tmp_path, patched)
        training.checkpoints.save(training.train(Progress(step=1), 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002"]
    renamed, older = record.first("rename", aside(record, 2)), record.first("rename", "step-00000001")
    assert ("fsync", ".") in record.between(renamed, older)
    assert older < min(record.deletions()), "it has another name before a file of it goes"
