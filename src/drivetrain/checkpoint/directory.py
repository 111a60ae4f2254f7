"""Checkpoints as directories that are complete or absent.

A checkpoint is written aside, synced, read back and compared, and only then renamed into place (saving.py). Its
manifest is written last and holds the size and the SHA-256 sums of every other file. A kill at any moment leaves hidden
folders, which the next run clears away, and every earlier checkpoint. Files hold whole tensors by global names,
whatever layout wrote them, so that every layout reads them.

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

import functools
import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from safetensors.torch import load_file
from torch import Tensor

from drivetrain.checkpoint.state import State, join
from drivetrain.errors import Problem, UserError, problem
from drivetrain.runtime.checkpoint_names import HIDDEN, finished
from drivetrain.runtime.storage import discard, entries, local_file, move

MANIFEST = "manifest.json"
ENDINGS = (".safetensors", ".json")  # of a part's files
BLOCK = 2**26
READ_AT_ONCE = 2**20


class FileRecord(BaseModel):
    """Size and checksums of a file. sha256: of each block of 64 MiB, so that many ranks can compute them."""

    bytes: int
    sha256: list[str]


class Manifest(BaseModel):
    """The contents of a checkpoint. `facts` are the run's: metric, precision, engine.

    Files are named from the checkpoint's folder on and lie within it; those of each part are among them.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    format: Literal[4] = 4
    step: int
    facts: dict[str, Any]
    parts: list[str]
    files: dict[str, FileRecord]

    @model_validator(mode="after")
    def _is_complete(self) -> Manifest:
        outside = sorted(name for name in self.files if not _is_plain(name))
        if outside:
            raise ValueError(f"it names {', '.join(map(repr, outside[:3]))}, which is no name within the folder")
        if "model" not in self.parts:
            raise ValueError("it lists no weights")
        needed = [f"{part}{ending}" for part in self.parts for ending in ENDINGS]
        lacking = [name for name in needed if name not in self.files]
        if lacking:
            raise ValueError(f"it lists no {', '.join(lacking[:3])}")
        return self


Check = Callable[[Path], list[str]]


def verify(path: Path, parts: Collection[str] | None = None) -> list[str]:
    """Returns what is wrong with a checkpoint; empty if every file is there with its size and checksum.

    parts: those that will be read; of the files of other parts the sizes alone are compared. None: all.
    """
    try:
        manifest = read_manifest(path)
    except FileNotFoundError:
        return [f"it has no {MANIFEST}" if path.is_dir() else "there is no such folder"]
    except (OSError, ValueError) as error:
        return [f"its {MANIFEST} cannot be read: {error}"]
    unread = [] if parts is None else [part for part in manifest.parts if part not in parts]
    sizes_only = {f"{part}{ending}" for part in unread for ending in ENDINGS}
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # checksums are computed without Python's lock
        found = [_wrong_with(path, name, record, name in sizes_only, pool) for name, record in manifest.files.items()]
    return [wrong for wrong in found if wrong]


def load(path: Path, check: Check = verify) -> dict[str, State]:
    """Returns the parts of a checkpoint, which are read when they are accessed. Raises UserError if it does not verify.

    check: returns what is wrong with a checkpoint; for a run's, run_state.verify.
    """
    refuse_damaged(path, check)
    return read(path)


def refuse_damaged(path: Path, check: Check) -> None:
    """Raises UserError if a checkpoint does not verify, with the one to take instead."""
    wrong = check(path)
    if wrong:
        other, _ = newest_good(path.parent, check)
        raise problem(
            "--checkpoint",
            f"{path} is damaged or no checkpoint: {'; '.join(wrong)}",
            f"use {other}, the newest good one beside it" if other else "use another: none beside it is good",
        )


def read(path: Path, parts: Collection[str] | None = None) -> dict[str, State]:
    """Reads a checkpoint that was verified before. parts: those of them that are read; None: all."""
    wanted = [name for name in read_manifest(path).parts if parts is None or name in parts]
    return {name: read_part(path, name) for name in wanted}


def newest_good(root: Path, check: Check = verify) -> tuple[Path | None, list[str]]:
    """Returns the newest checkpoint that verifies, and why each newer one was skipped."""
    skipped: list[str] = []
    for path in reversed(steps(root)):
        wrong = check(path)
        if not wrong:
            return path, skipped
        skipped.append(f"{path.name}: {'; '.join(wrong)}")
    return None, skipped


def steps(root: Path) -> list[Path]:
    """Returns finished checkpoints, oldest first. One whose replacement was killed counts, under its hidden name."""
    return [*finished(root).values()]


def clean_partials(root: Path) -> None:
    """Removes what killed processes left half-written, and restores what they were about to replace.

    Called by the process that holds the run's folder: no other one writes there, even if it has one's number now.
    """
    for path in entries(root):
        name = HIDDEN.fullmatch(path.name)
        if not name:
            continue
        target = path.with_name(name[1])
        if name[3] == "replaced" and not target.exists():
            move(path, target)
        else:
            discard(path)


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest. Raises OSError, or ValueError if it is truncated, of another format, or not a manifest at
    all."""
    try:
        return Manifest.model_validate_json(local_file(path, MANIFEST).read_bytes())
    except ValidationError as error:
        faults = ((".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")) for e in error.errors()[:3])
        found = "; ".join(f"{where} {what}".strip() for where, what in faults)
        raise ValueError(found) from None


def check_fits(shapes: Mapping[str, torch.Size], saved: Mapping[str, Tensor], path: Path) -> None:
    """Raises UserError if the saved weights are of another model: names and shapes that differ, the first few of
    each."""
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
    """Returns the name beside a checkpoint under which this process works on it; no reader takes it for a finished
    one."""
    name = HIDDEN.fullmatch(checkpoint.name)
    return checkpoint.with_name(f".{name[1] if name else checkpoint.name}.{purpose}-{os.getpid()}")


# --- reading ---------------------------------------------------------------------------------------------------------


def read_part(folder: Path, name: str) -> State:
    tree = json.loads(local_file(folder, f"{name}.json").read_text(encoding="utf-8"))
    return join(load_file(local_file(folder, f"{name}.safetensors")), tree)


def _is_plain(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and not {"\\", "\0"} & set(name)


def _wrong_with(folder: Path, name: str, record: FileRecord, size_only: bool, pool: Executor) -> str | None:
    try:
        file = local_file(folder, name)
        size = file.stat().st_size
        if size != record.bytes:
            return f"{name} has {size} bytes, not {record.bytes}"
        if size_only:
            return None
        sums = list(pool.map(functools.partial(block_sum, file), range(0, max(size, 1), BLOCK)))
        return None if sums == record.sha256 else f"{name} does not have its checksum"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"


def block_sum(file: Path, start: int) -> str:
    """Returns the SHA-256 of a file's block."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        opened.seek(start)
        for _ in range(0, BLOCK, READ_AT_ONCE):
            digest.update(opened.read(READ_AT_ONCE))
    return digest.hexdigest()


def _some(found: list[str]) -> str:
    return "; ".join(found[:3]) + (f"; and {len(found) - 3} more of this kind" if len(found) > 3 else "")
