"""torch.distributed.checkpoint's directories: every tensor under its path, as FSDP scripts and torchtitan have them.

The reader of torch runs any pickle that it finds in the metadata and among the values that are no tensors. Here the
metadata may name torch's own classes alone, and values are read as tensors and plain numbers.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as distributed
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from drivetrain.checkpoint.convert.foreign import Moments, Note, Theirs
from drivetrain.checkpoint.convert.own_format import Ours
from drivetrain.errors import problem
from drivetrain.trust import pickles

METADATA = ".metadata"
OPTIMIZER = re.compile(r"(?:^|.*\.)(?:optimizer|optim|optimizers|optimizer_state)\.(state|param_groups)\.(.+)")
STEPS = ("step", "train_state.step", "global_step", "app.step")
BESIDE = re.compile(r"(?:^|.*\.)(lr_scheduler|scheduler|dataloader|train_state|rng_state|rng)(?:\.|$)")
KNOWN = {
    *(("torch.distributed.checkpoint.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *(("torch.distributed.checkpoint.metadata", f"{name}StorageMetadata") for name in ("Tensor", "Bytes", "Chunk")),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
}


def write(saved: Ours, folder: Path, dtype: torch.dtype | None) -> list[Note]:
    """Writes {"model": ..., "optimizer": {"state": ..., "param_groups": ...}} by names, as get_state_dict returns them.

    The groups are there twice: as a list, and under each parameter, as flatten_optimizer_state_dict has them.
    """
    del dtype
    groups = [{**saved.arguments(group), "params": group["params"]} for group in saved.groups]
    flat = {
        f"param_groups.{name}.{key}": value
        for group in saved.groups
        for name in group["params"]
        for key, value in saved.arguments(group).items()
    }
    state = {
        "model": saved.weights,
        "optimizer": {"state": saved.moments, "param_groups": groups, **flat},
        "train_state": {"step": saved.step},
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        distributed.save(state, storage_writer=distributed.FileSystemWriter(folder), no_dist=True)
    return [
        Note("weights", carried=True, what=f"{len(saved.weights)} tensors under model."),
        Note("optimizer's states", carried=True, what=f"of {len(saved.moments)} parameters under optimizer.state."),
        Note("step", carried=True, what="under train_state.step"),
        Note("random states", carried=False, what="the format names none"),
        *_lost(saved),
        Note("learning-rate schedule", carried=False, what="give the script's scheduler the step yourself"),
    ]


def _lost(saved: Ours) -> list[Note]:
    scaler = saved.training["engine"]["scaler"]
    return [Note("loss scale", carried=False, what=f"{scaler['scale']:g}: the format names none")] if scaler else []


# --- reading ---------------------------------------------------------------------------------------------------------


def read(folder: Path) -> Theirs:
    reader = _Reader(folder)
    kinds = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(kind.size, dtype=kind.properties.dtype)
        for key, kind in kinds.items()
        if isinstance(kind, TensorStorageMetadata)
    }
    values = {key: None for key, kind in kinds.items() if isinstance(kind, BytesStorageMetadata) and _is_read(key)}
    found: dict[str, Any] = {**tensors, **values}
    planner = _Planner()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        distributed.load(found, storage_reader=reader, planner=planner, no_dist=True)
    planner.refuse()
    return _sorted({**found, **planner.values}, [key for key in kinds if key not in found])


def _is_read(key: str) -> bool:
    return key in STEPS or OPTIMIZER.fullmatch(key) is not None


def _sorted(found: dict[str, Any], unread: list[str]) -> Theirs:
    theirs, moments, groups = Theirs({}), Moments(), dict[str, dict[str, Any]]()
    left = list(unread)
    for key, value in found.items():
        if key in STEPS:
            theirs.step = int(value)
        elif (of_optimizer := OPTIMIZER.fullmatch(key)) and "." in of_optimizer[2]:
            kind, path = of_optimizer.groups()
            name, what = path.rsplit(".", 1)
            (moments if kind == "state" else groups).setdefault(name, {})[what] = value
        elif BESIDE.match(key):
            left.append(key)
        else:
            theirs.weights[key] = value
    theirs.moments = moments or None
    theirs.arguments = [{k: v for k, v in group.items() if k != "params"} for group in groups.values()]
    kinds = sorted({beside[1] if (beside := BESIDE.match(key)) else key for key in left})
    theirs.notes += [Note(kind, carried=False, what="the run goes by its own") for kind in kinds]
    return theirs


class _Reader(distributed.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        del args, kwargs
        file = Path(self.path) / METADATA
        try:
            with file.open("rb") as opened:
                metadata: Metadata = _Unpickler(opened).load()
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise problem("PATH", f"{file} cannot be read: {error}", "copy or save it again") from error
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


# as Python 3.13 writes it, and no other has it; as the pickles of protocol 2 have it
RENAMED = {"pathlib._local": "pathlib", "__builtin__": "builtins"}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout)
        module = RENAMED.get(module, module)
        if f"{module}.{name}" == pickles.GETATTR:
            return pickles.member
        if (module, name) in KNOWN or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is none of torch's metadata and could run code")


class _Planner(DefaultLoadPlanner):
    """Plans the reading. values: those that are no tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.values: dict[str, Any] = {}
        self._unsafe: list[str] = []

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.values[name] = pickles.restrained(value)
        except pickle.UnpicklingError:
            self._unsafe.append(name)  # torch would wrap what is raised here

    def refuse(self) -> None:
        if self._unsafe:
            shown = ", ".join(self._unsafe[:3])
            why = f"{shown} holds more than tensors and plain values: reading it could run code that came with it"
            raise problem("PATH", why, "save it again without those objects")
