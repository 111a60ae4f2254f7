"""accelerator.save_state's folder: weights by name, the optimizer by position, a random state a process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from drivetrain.checkpoint.convert import dcp
from drivetrain.checkpoint.convert.foreign import Note, Theirs, of_torch
from drivetrain.checkpoint.convert.own_format import Ours
from drivetrain.checkpoint.convert.transformers_folder import WEIGHTS, not_read, read_weights
from drivetrain.trust import pickles

OPTIMIZER, SCALER, NAMES = "optimizer.bin", "scaler.pt", "optimizer_names.json"
SHARDED = ("pytorch_model_fsdp_0", "optimizer_0")  # under FSDP: folders of torch.distributed.checkpoint
NOT_READ = {
    "scheduler.bin": "the learning rate follows the run file's schedule",
    "sampler.bin": "the order of the data is the run's own",
    "dl_state_dict.bin": "the order of the data is the run's own",
    "custom_checkpoint_0.pkl": "objects of the script",
}


def write(saved: Ours, folder: Path, dtype: torch.dtype | None) -> list[Note]:
    """Writes a folder that accelerator.load_state reads, for one prepared model and one optimizer."""
    del dtype
    weights = saved.untied
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / WEIGHTS, {"format": "pt"})
    groups = _groups(saved)
    position = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    numbered = [{**group, "params": [position[name] for name in group["params"]]} for group in groups]
    state = {position[name]: values for name, values in saved.moments.items()}
    torch.save({"state": state, "param_groups": numbered}, folder / OPTIMIZER)
    names = [group["params"] for group in groups]
    (folder / NAMES).write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")
    sizes = " and ".join(str(len(each)) for each in names)
    notes = [
        Note("weights", carried=True, what=f"{len(weights)} tensors in {WEIGHTS}"),
        Note(
            "optimizer's states",
            carried=True,
            what=f"{len(state)} in {OPTIMIZER}: {len(groups)} group(s) of {sizes} parameters, named in {NAMES}; the "
            "script's optimizer must have the same groups in the same order",
        ),
        Note("random states", carried=True, what=f"of {_write_random_states(saved, folder)} process(es)"),
        Note("learning-rate schedule", carried=False, what="give the script's scheduler the step yourself"),
    ]
    if saved.training["engine"]["scaler"]:
        torch.save(saved.training["engine"]["scaler"], folder / SCALER)
        notes.append(Note("loss scale", carried=True, what=f"in {SCALER}"))
    return notes


def _groups(saved: Ours) -> list[dict[str, Any]]:
    """Returns one group in the model's order, as most scripts have it, if all parameters are treated alike."""
    first, *others = map(saved.arguments, saved.groups)
    if all(other == first for other in others):
        return [{**first, "params": saved.trained}]
    return [{**saved.arguments(group), "params": group["params"]} for group in saved.groups]


def _write_random_states(saved: Ours, folder: Path) -> int:
    """Writes each rank's random state where accelerate looks for it."""
    generators: list[dict[str, Any]] = saved.training["generators"]
    for rank, own in enumerate(generators):
        python, numpy = own["python"], own["numpy"]
        keys = numpy["keys"].numpy().astype(np.uint32)
        state = {
            "step": 0,  # of the accumulation, of which none is under way
            "random_state": (python["version"], tuple(python["words"]), python["gauss"]),
            "numpy_random_seed": (numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]),
            "torch_manual_seed": own["torch"],
            **({"torch_cuda_manual_seed": own["cuda"]} if own["cuda"] else {}),
        }
        torch.save(state, folder / f"random_states_{rank}.pkl")
    return len(generators)


# --- reading ---------------------------------------------------------------------------------------------------------


def read(folder: Path) -> Theirs:
    theirs = _sharded(folder) if (folder / SHARDED[0]).is_dir() else _whole(folder)
    if (folder / SCALER).is_file():
        theirs.scaler = pickles.load(folder / SCALER)
    theirs.notes += not_read(folder, NOT_READ)
    return theirs


def _whole(folder: Path) -> Theirs:
    theirs = Theirs(read_weights(folder))
    if (folder / OPTIMIZER).is_file():
        theirs.moments, theirs.arguments = of_torch(pickles.load(folder / OPTIMIZER))
    return theirs


def _sharded(folder: Path) -> Theirs:
    weights: dict[str, Tensor] = dcp.read(folder / SHARDED[0]).weights
    if not (folder / SHARDED[1]).is_dir():
        return Theirs(weights)
    theirs = dcp.read(folder / SHARDED[1])
    theirs.weights = weights
    return theirs
