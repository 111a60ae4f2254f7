"""Checkpoints as directories that are whole or not there.

A checkpoint is written aside, synced, read back and compared, and only then renamed into place. Its manifest is
written last and holds the size and SHA-256 of every other file. A kill at any moment leaves hidden folders, which the
next run clears away, and every earlier checkpoint.

    step-00000120/
        model.safetensors       weights under plain parameter names
        optimizer.safetensors   tensors of the optimizer's state, and .json its shape
        training.safetensors    random generators, progress, scaler
        config.json, ...        what the workload puts beside the weights
        manifest.json           format, step, facts, parts, size and checksum of each file
    .step-00000130.partial-4711     process 4711 is writing it
    .step-00000120.replaced-4711    being replaced by a save of the same step: good until the new one is in place
    .step-00000100.deleted-4711     being deleted
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drivetrain.checkpoint.state import State, join, same, split
from drivetrain.errors import Problem, RunError, UserError, problem

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{8,})")
_HIDDEN = re.compile(r"\.(step-(\d{8,}))\.(partial|replaced|deleted)-(\d+)")


class FileRecord(BaseModel):
    bytes: int
    sha256: str


class Manifest(BaseModel):
    """What a checkpoint holds. `facts` are the run's: metric, precision, engine."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    format: Literal[3] = 3
    step: int
    facts: dict[str, Any]
    parts: list[str]
    files: dict[str, FileRecord]


def save(
    root: Path,
    step: int,
    parts: Mapping[str, State],
    facts: Mapping[str, Any],
    assets: Callable[[Path], None] | None = None,
) -> Path:
    """Write a checkpoint of `parts` ("model": {name: tensor}, others any state) and return its folder.

    assets: writes further files into the folder it is given. Raises RunError, and leaves the earlier checkpoints as
    they were, if the disk is full, the folder cannot be written, or a part holds what has no form in a checkpoint.
    """
    target = root / f"step-{step:08d}"
    aside = hidden(target, "partial")
    needed = 0
    try:
        encoded = {name: split(part) for name, part in parts.items()}
        needed = sum(t.numel() * t.element_size() for tensors, _ in encoded.values() for t in tensors.values())
        root.mkdir(parents=True, exist_ok=True)
        if needed > shutil.disk_usage(root).free:
            raise OSError("no space left")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        for name, (tensors, tree) in encoded.items():
            save_file(_separate(tensors), aside / f"{name}.safetensors", {"format": "pt"})
            (aside / f"{name}.json").write_text(json.dumps(tree), encoding="utf-8")
        if assets is not None:
            assets(aside)
        _write_manifest(aside, step, facts, list(parts))
        _prove(aside, parts)
        _put_in_place(aside, target)
    except (OSError, SafetensorError, TypeError) as error:
        raise _save_failed(root, step, needed, error) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # still there only if the save failed or was interrupted
    return target


def verify(path: Path) -> list[str]:
    """What is wrong with a checkpoint; empty if every file is there with its size and checksum."""
    try:
        manifest = read_manifest(path)
    except FileNotFoundError:
        return [f"it has no {MANIFEST}" if path.is_dir() else "there is no such folder"]
    except (OSError, ValueError) as error:
        return [f"its {MANIFEST} cannot be read: {error}"]
    return [wrong for name, record in manifest.files.items() if (wrong := _wrong_with(path / name, name, record))]


def load(path: Path) -> dict[str, State]:
    """The parts of a checkpoint. UserError if it does not verify."""
    wrong = verify(path)
    if wrong:
        other, _ = newest_good(path.parent)
        raise problem(
            "--checkpoint",
            f"{path} is damaged or no checkpoint: {'; '.join(wrong)}",
            f"use {other}, the newest good one beside it" if other else "use another: none beside it is good",
        )
    return {name: _read_part(path, name) for name in read_manifest(path).parts}


def newest_good(root: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and why each newer one was skipped."""
    skipped: list[str] = []
    for path in reversed(steps(root)):
        wrong = verify(path)
        if not wrong:
            return path, skipped
        skipped.append(f"{path.name}: {'; '.join(wrong)}")
    return None, skipped


def steps(root: Path) -> list[Path]:
    """Finished checkpoints, oldest first. One whose replacement was killed counts, under its hidden name."""
    if not root.is_dir():
        return []
    found: dict[int, Path] = {}
    for path in root.iterdir():
        if (name := _HIDDEN.fullmatch(path.name)) and name[3] == "replaced":
            found.setdefault(int(name[2]), path)
        elif name := _STEP.fullmatch(path.name):
            found[int(name[1])] = path
    return [path for _, path in sorted(found.items()) if path.is_dir()]


def clean_partials(root: Path) -> None:
    """Remove what killed processes left half-written, and put back what they were about to replace."""
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        name = _HIDDEN.fullmatch(path.name)
        if not name or psutil.pid_exists(int(name[4])):
            continue
        target = path.with_name(name[1])
        if name[3] == "replaced" and not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path, ignore_errors=True)


def read_manifest(path: Path) -> Manifest:
    """Raises OSError, or ValueError if it is cut off, of another format, or not a manifest at all."""
    try:
        return Manifest.model_validate_json((path / MANIFEST).read_bytes())
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, e['loc']))} {e['msg']}".strip() for e in error.errors()[:3])
        raise ValueError(found) from None


def check_fits(shapes: Mapping[str, torch.Size], saved: Mapping[str, Tensor], path: Path) -> None:
    """UserError if the saved weights are of another model: names and shapes that differ, the first few of each."""
    differing = [
        f"{name} {tuple(saved[name].shape)} there, {tuple(shape)} here"
        for name, shape in shapes.items()
        if name in saved and saved[name].shape != shape
    ]
    problems = [
        Problem("workload.model", f"{path} is of another model: {_some(found)}", "give the run file it came from")
        for found in (
            [f"{name} missing there" for name in sorted(shapes.keys() - saved.keys())],
            [f"{name} unknown here" for name in sorted(saved.keys() - shapes.keys())],
            sorted(differing),
        )
        if found
    ]
    if problems:
        raise UserError(problems)


def hidden(checkpoint: Path, purpose: Literal["partial", "replaced", "deleted"]) -> Path:
    """The name beside a checkpoint under which this process works on it; no reader takes it for a finished one."""
    name = _HIDDEN.fullmatch(checkpoint.name)
    return checkpoint.with_name(f".{name[1] if name else checkpoint.name}.{purpose}-{os.getpid()}")


# --- writing ---------------------------------------------------------------------------------------------------------


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, on the CPU and each alone in its storage, as safetensors wants them."""
    separate: dict[str, Tensor] = {}
    storages: set[int] = set()
    for key, tensor in tensors.items():
        tensor = tensor.cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in storages:
            tensor = tensor.clone()
        storages.add(storage.data_ptr())
        separate[key] = tensor
    return separate


def _write_manifest(folder: Path, step: int, facts: Mapping[str, Any], parts: list[str]) -> None:
    written = sorted(folder.rglob("*"))
    files = {
        path.relative_to(folder).as_posix(): FileRecord(bytes=path.stat().st_size, sha256=_sha256(path))
        for path in written
        if path.is_file()
    }
    for path in written:
        _sync(path)
    manifest = Manifest(step=step, facts=dict(facts), parts=parts, files=files)
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    _sync(folder / MANIFEST)
    _sync(folder)


def _prove(folder: Path, parts: Mapping[str, State]) -> None:
    """Read the checkpoint back and compare it with what is in memory. OSError if anything differs."""
    wrong = verify(folder) or [
        f"{name} reads back different" for name, part in parts.items() if not same(part, _read_part(folder, name))
    ]
    if wrong:
        raise OSError("; ".join(wrong))


def _put_in_place(aside: Path, target: Path) -> None:
    if not target.exists():
        aside.rename(target)
        _sync(target.parent)
        return
    old = hidden(target, "replaced")  # a resumed run saves a step again
    target.rename(old)
    try:
        aside.rename(target)
    except OSError:
        old.rename(target)
        raise
    _sync(target.parent)  # the new one is durable before the old one goes
    shutil.rmtree(old, ignore_errors=True)


def _save_failed(root: Path, step: int, needed: int, error: Exception) -> RunError:
    reason = getattr(error, "strerror", None) or str(error)
    cure = "take it out of the state"
    if not isinstance(error, TypeError):
        reason += f" ({needed / 2**20:,.1f} MiB needed, {_free(root)} free)"
        cure = "make room or make the folder writable"
    try:
        newest, _ = newest_good(root)
    except OSError:  # the folder may not even be listed
        newest = None
    kept = f"The last good checkpoint is {newest}" if newest else "No earlier checkpoint can be read there"
    return RunError(
        f"the checkpoint of step {step} could not be saved in {root}: {reason}. {kept}; {cure}, then go on with "
        f"{'--resume' if newest else '--overwrite'}"
    )


def _free(root: Path) -> str:
    for path in (root, *root.absolute().parents):
        try:
            return f"{shutil.disk_usage(path).free / 2**20:,.1f} MiB"
        except OSError:  # not there yet, or not ours to look at
            continue
    return "unknown"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading ---------------------------------------------------------------------------------------------------------


def _read_part(folder: Path, name: str) -> State:
    tree = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return join(load_file(folder / f"{name}.safetensors"), tree)


def _wrong_with(file: Path, name: str, record: FileRecord) -> str | None:
    try:
        size = file.stat().st_size
        if size != record.bytes:
            return f"{name} has {size} bytes, not {record.bytes}"
        return None if _sha256(file) == record.sha256 else f"{name} does not have its checksum"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _some(found: list[str]) -> str:
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more of this kind" if len(found) > 3 else "")
