"""Checkpoints as directories that are whole or not there.

A checkpoint is written aside, synced, read back and compared, and only then renamed into place. Its manifest is
written last and holds the size and SHA-256 of every other file. A kill at any moment leaves a hidden `.partial` folder
and every earlier checkpoint as it was.

    step-00000120/
        model.safetensors       weights under plain parameter names
        optimizer.safetensors   tensors of the optimizer's state, and .json its shape
        training.safetensors    random generators, progress, scaler
        config.json, ...        what the workload puts beside the weights
        manifest.json           format, step, facts, size and checksum of each file
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drivetrain.checkpoint.state import State, is_channels_last, join, split
from drivetrain.errors import Problem, RunError, UserError, problem

FORMAT = 1
MODEL = "model"
MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"\.(?:step-\d+|old)-?.*\.partial-(\d+)")


def save(
    root: Path,
    step: int,
    parts: Mapping[str, State],
    facts: Mapping[str, Any],
    assets: Callable[[Path], None] | None = None,
) -> Path:
    """Write a checkpoint of `parts` ("model": {name: tensor}, others any state) and return its folder.

    assets: writes further files into the folder it is given. Raises RunError, and leaves the earlier checkpoints as
    they were, if the disk is full or the folder cannot be written.
    """
    target = root / f"step-{step:08d}"
    aside = root / f".{target.name}.partial-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _need_space(root, parts)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        for name, part in parts.items():
            _write_part(aside, name, part)
        if assets is not None:
            assets(aside)
        _write_manifest(aside, step, facts)
        _prove(aside, parts)
        _replace(aside, target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise _save_failed(root, step, error) from error
    return target


def verify(path: Path) -> list[str]:
    """What is wrong with a checkpoint; empty if every file is there with its size and checksum."""
    try:
        manifest = read_manifest(path)
    except (OSError, ValueError) as error:
        return [f"its {MANIFEST} cannot be read: {error}"]
    wrong = []
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            wrong.append(f"{name} is missing")
        elif file.stat().st_size != expected["bytes"]:
            wrong.append(f"{name} has {file.stat().st_size} bytes, not {expected['bytes']}")
        elif _sha256(file) != expected["sha256"]:
            wrong.append(f"{name} does not have its checksum")
    return wrong


def load(path: Path) -> dict[str, State]:
    """The parts of a checkpoint. UserError if it does not verify."""
    wrong = verify(path)
    if wrong:
        raise problem(
            "--checkpoint", f"{path} is damaged or no checkpoint: {'; '.join(wrong)}", "use another checkpoint"
        )
    return _read_parts(path)


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
    """Finished checkpoints, oldest first."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if path.is_dir() and _STEP.fullmatch(path.name))


def clean_partials(root: Path) -> None:
    """Remove what killed processes left half-written."""
    for path in root.glob(".*.partial-*") if root.is_dir() else ():
        found = _PARTIAL.fullmatch(path.name)
        if found and not psutil.pid_exists(int(found.group(1))):
            shutil.rmtree(path, ignore_errors=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """Raises OSError or ValueError."""
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or "files" not in manifest:
        raise ValueError(f"not in format {FORMAT}")
    return manifest


def check_fits(model: Mapping[str, Tensor], saved: Mapping[str, Tensor], path: Path) -> None:
    """UserError if the saved weights are of another model: names and shapes that differ, the first few of each."""
    differing = [
        f"{name} is {tuple(saved[name].shape)} there and {tuple(model[name].shape)} here"
        for name in model.keys() & saved.keys()
        if model[name].shape != saved[name].shape
    ]
    problems = [
        Problem("workload.model", f"{path} is of another model: {_some(found)} {why}", "give the run file it came from")
        for found, why in (
            (sorted(model.keys() - saved.keys()), "missing there"),
            (sorted(saved.keys() - model.keys()), "unknown here"),
            (sorted(differing), "shaped differently"),
        )
        if found
    ]
    if problems:
        raise UserError(problems)


# --- writing ---------------------------------------------------------------------------------------------------------


def _write_part(folder: Path, name: str, part: State) -> None:
    if name == MODEL:
        tree: Any = {"channels_last": sorted(key for key, tensor in part.items() if is_channels_last(tensor))}
        tensors, tree["shared"] = _untied(part)
    else:
        tensors, tree = split(part)
    written = {key: _alone(tensor) for key, tensor in tensors.items()}
    save_file(written, folder / f"{name}.safetensors", {"format": "pt"})
    (folder / f"{name}.json").write_text(json.dumps(tree), encoding="utf-8")


def _alone(tensor: Tensor) -> Tensor:
    """Contiguous on the CPU and alone in its storage, as safetensors wants it."""
    tensor = tensor.detach().cpu().contiguous()
    alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if alone else tensor.clone()


def _untied(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights without second names of the same tensor, and second name → first name."""
    first: dict[tuple[Any, ...], str] = {}
    kept, shared = {}, {}
    for name, tensor in weights.items():
        identity = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and identity in first:
            shared[name] = first[identity]
        else:
            first[identity] = name
            kept[name] = tensor
    return kept, shared


def _write_manifest(folder: Path, step: int, facts: Mapping[str, Any]) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for file in files:
        _sync(file)
    listed = {str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files}
    manifest = {"format": FORMAT, "step": step, "facts": dict(facts), "files": listed}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _sync(folder / MANIFEST)
    _sync(folder)


def _prove(folder: Path, parts: Mapping[str, State]) -> None:
    """Read the checkpoint back and compare it with what is in memory."""
    wrong = verify(folder)
    if not wrong:
        read = _read_parts(folder)
        wrong = [f"{name} reads back different" for name, part in parts.items() if not same(part, read[name])]
    if wrong:
        raise OSError("; ".join(wrong))


def same(one: State, other: State) -> bool:
    """Equal to the bit, NaN included."""
    if isinstance(one, Tensor):
        if not isinstance(other, Tensor) or one.dtype != other.dtype or one.shape != other.shape:
            return False
        mine, theirs = (t.detach().cpu().contiguous().flatten().view(torch.uint8) for t in (one, other))
        return torch.equal(mine, theirs)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


def _replace(aside: Path, target: Path) -> None:
    if target.exists():  # a resumed run saves a step again
        old = target.with_name(f".old-{target.name}.partial-{os.getpid()}")
        target.rename(old)
        aside.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    else:
        aside.rename(target)
    _sync(target.parent)


def _need_space(root: Path, parts: Mapping[str, State]) -> None:
    needed = sum(t.numel() * t.element_size() for part in parts.values() for t in split(part)[0].values())
    free = shutil.disk_usage(root).free
    if free < needed:
        raise OSError(
            f"no space left: the checkpoint needs {needed / 2**20:,.1f} MiB, {free / 2**20:,.1f} MiB are free"
        )


def _save_failed(root: Path, step: int, error: Exception) -> RunError:
    newest, _ = newest_good(root)
    kept = f"The last good checkpoint is {newest}" if newest else "There is no earlier checkpoint"
    reason = getattr(error, "strerror", None) or error
    return RunError(
        f"the checkpoint of step {step} could not be saved in {root}: {reason}. {kept}; make room or give another "
        "output, then go on with --resume"
    )


# --- reading ---------------------------------------------------------------------------------------------------------


def _read_parts(path: Path) -> dict[str, State]:
    parts = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors = load_file(file)
        tree = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
        parts[file.stem] = _retied(tensors, tree) if file.stem == MODEL else join(tensors, tree)
    return parts


def _retied(weights: dict[str, Tensor], tree: dict[str, Any]) -> dict[str, Tensor]:
    for name in tree["channels_last"]:
        if name in weights:
            weights[name] = weights[name].contiguous(memory_format=torch.channels_last)
    return weights | {second: weights[name] for second, name in tree["shared"].items()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
