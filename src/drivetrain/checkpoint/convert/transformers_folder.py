"""Transformers' folders: weights, configuration, tokenizer; and the Trainer's checkpoints, which have more beside."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drivetrain.checkpoint.convert.foreign import Note, Theirs, of_torch
from drivetrain.checkpoint.convert.own_format import Ours, is_adapter
from drivetrain.checkpoint.directory import MANIFEST, read_manifest
from drivetrain.errors import problem
from drivetrain.runtime.storage import local_file
from drivetrain.trust import pickles

WEIGHTS, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
LARGEST_FILE = 5 * 2**30
OWN = ("model.", "optimizer.", "training.", MANIFEST)


def write(saved: Ours, folder: Path, dtype: torch.dtype | None) -> list[Note]:
    """Writes a folder that AutoModel.from_pretrained reads. dtype: for floating weights; None: as they are."""
    if is_adapter(saved.path):
        return _write_adapter(saved, folder, dtype)
    if not (saved.path / "config.json").is_file():
        why = f"{saved.path} holds no config.json: what was trained is no Transformers model"
        raise problem("--to", why, "give --to dcp or --to accelerate")
    copy_assets(saved.path, folder)
    weights = {name: _as(tensor, dtype) for name, tensor in saved.untied.items()}  # Transformers ties them again
    _save(weights, folder)
    what = f"{len(weights)} tensors, {_dtypes(weights)}"
    if dtype is not None:
        _name_dtype(folder / "config.json", dtype)
        if any(tensor.dtype == torch.float32 for tensor in saved.weights.values()) and dtype != torch.float32:
            what += ": rounded, which cannot be undone"
    files = sorted(path.name for path in folder.iterdir() if not path.name.startswith(("model.", "model-")))
    return [
        Note("weights", carried=True, what=what),
        Note("assets", carried=True, what=", ".join(files)),
        Note("optimizer's states", carried=False, what="the format has no place for them"),
    ]


def _write_adapter(saved: Ours, folder: Path, dtype: torch.dtype | None) -> list[Note]:
    if dtype is not None:
        raise problem("--dtype", "the checkpoint holds adapters, which keep their dtype", "leave it out")
    copy_assets(saved.path, folder)
    return [
        Note("adapters", carried=True, what="PEFT's files as they are, for PeftModel.from_pretrained"),
        Note("optimizer's states", carried=False, what="the format has no place for them"),
    ]


def copy_assets(source: Path, folder: Path, leave_out: Callable[[str], bool] = lambda _: False) -> None:
    """Copies what the manifest names beside the weights, but for names that `leave_out` is true of; other files there
    may be anything."""
    for name in sorted(read_manifest(source).files):
        if not name.startswith(OWN) and not leave_out(name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(local_file(source, name), folder / name)


def _as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _save(weights: dict[str, Tensor], folder: Path) -> None:
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        if size and size + tensor.nbytes > LARGEST_FILE:
            parts.append({})
            size = 0
        parts[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    if len(parts) == 1:
        save_file(parts[0], folder / WEIGHTS, metadata={"format": "pt"})
        return
    files: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in weights.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2)
    (folder / INDEX).write_text(text, encoding="utf-8")


def _name_dtype(file: Path, dtype: torch.dtype) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _dtypes(weights: dict[str, Tensor]) -> str:
    return ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}))


# --- reading ---------------------------------------------------------------------------------------------------------


def read(folder: Path) -> Theirs:
    """Reads a model's folder; from a Trainer's checkpoint the optimizer and the step as well."""
    if (folder / "adapter_config.json").is_file() and not (folder / WEIGHTS).is_file():
        why = f"{folder} holds an adapter of PEFT's, and no whole model"
        raise problem("PATH", why, "go on with it by adapter.path in the run file")
    theirs = Theirs(read_weights(folder))
    state = folder / "trainer_state.json"
    if state.is_file():
        theirs.step = int(json.loads(state.read_text(encoding="utf-8"))["global_step"])
    for name in ("optimizer.pt", "optimizer.bin"):
        if (folder / name).is_file():
            theirs.moments, theirs.arguments = of_torch(pickles.load(folder / name))
            break
    else:
        theirs.step = theirs.step or 0  # a model to start from
    if (folder / "scaler.pt").is_file():
        theirs.scaler = pickles.load(folder / "scaler.pt")
    theirs.notes += not_read(folder, {"scheduler.pt": "the learning rate follows the run file's schedule"})
    return theirs


def not_read(folder: Path, names: dict[str, str]) -> list[Note]:
    return [Note(name, carried=False, what=why) for name, why in names.items() if (folder / name).exists()]


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Reads weights from one file or several, safetensors or pickled. Raises UserError if there are none, or one is
    truncated."""
    files = [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else []
    for index in (folder / INDEX, folder / f"{PICKLED}.index.json"):
        if not files and index.is_file():
            files = [folder / name for name in sorted(set(_index(index).values()))]
    if not files and (folder / PICKLED).is_file():
        files = [folder / PICKLED]
    if not files:
        why = f"{folder} holds no weights ({WEIGHTS}, {INDEX} or {PICKLED})"
        raise problem("PATH", why, "give a complete folder")
    weights: dict[str, Tensor] = {}
    for file in files:
        weights |= _safe(file) if file.suffix == ".safetensors" else pickles.load(file, are_weights=True)
    return weights


def _index(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    return found


def _safe(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise problem("PATH", f"{file} cannot be read: {error}", "copy or save it again") from error
