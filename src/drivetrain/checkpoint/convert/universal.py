"""DeepSpeed's universal checkpoints: a folder a parameter, its fp32 weight and Adam's moments whole in a file each.

    latest_universal                      the tag
    global_step120_universal/
        zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
        zero/optimizer_state.pt           arguments of the groups; of stage 3 the step
        mp_rank_00_model_states.pt        counters, buffers; of stage 3 zero_pp_rank_0_mp_rank_00_model_states.pt

Its loader reads, of the arguments, a list as long as its own groups: of a shorter one the states of the other groups
would stay behind. Stage 3 gives the first group's arguments to all.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.convert.foreign import Moments, Note, Theirs
from drivetrain.checkpoint.convert.own_format import KERNELS, Ours
from drivetrain.errors import problem
from drivetrain.trust import pickles

LATEST = "latest_universal"
STATES = "*model_states.pt"
MOMENTS = ("exp_avg", "exp_avg_sq")
LAYOUT = "0.19.8"  # the version that this was written after
NO_BUFFERS = "in module of the states files; DeepSpeed's universal loading reads trained weights alone"


def write(saved: Ours, folder: Path, dtype: torch.dtype | None) -> list[Note]:
    """Writes a folder that load_checkpoint reads with checkpoint.load_universal, under ZeRO of any stage and any number
    of ranks."""
    del dtype
    tag = folder / f"global_step{saved.step}_universal"
    (tag / "zero").mkdir(parents=True)
    (folder / LATEST).write_text(tag.name, encoding="utf-8")
    for name in saved.trained:
        refuse_path(name)
        _write_parameter(tag / "zero" / name, saved.weights[name], saved.moments.get(name, {}))
    moments = [name for name in saved.trained if MOMENTS[0] in saved.moments.get(name, {})]
    torch.save(_global_state(saved, moments), tag / "zero" / "optimizer_state.pt")
    states = _model_states(saved)
    torch.save(states, tag / "mp_rank_00_model_states.pt")
    torch.save(states, tag / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    return list(_described(saved, moments))


def refuse_path(name: str) -> None:
    """Raises UserError for the name of a parameter that would leave its folder."""
    if {"/", "\\", "\0"} & set(name) or name in ("", ".", ".."):
        why = f"a parameter is called {name!r}, and the format makes a folder's name of it"
        raise problem("PATH", why, "rename it, or take another format")


def _write_parameter(folder: Path, weight: Tensor, state: dict[str, Any]) -> None:
    folder.mkdir()
    torch.save({"param": weight.float().contiguous()}, folder / "fp32.pt")
    for key, value in state.items():
        if key == "step":
            torch.save(torch.as_tensor(value), folder / "step.pt")
        elif isinstance(value, Tensor) and value.shape == weight.shape:
            torch.save({"param": value.float().contiguous()}, folder / f"{key}.pt")


def _global_state(saved: Ours, moments: list[str]) -> dict[str, Any]:
    shared = {key: value for key, value in saved.shared_arguments.items() if key not in KERNELS}
    updates = saved.moments[moments[0]]["step"] if moments else torch.tensor(float(saved.step))
    return {
        "ds_version": _version(),
        "param_groups": [dict(shared) for _ in saved.trained],
        "optimizer_state_dict": {"state": {0: {"step": updates}}, "param_groups": [shared]},
    }


def _version() -> str:
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return LAYOUT


def _model_states(saved: Ours) -> dict[str, Any]:
    progress = saved.training["progress"]
    rest = saved.untrained
    return {
        "module": {name: saved.weights[name].clone() for name in rest},
        "buffer_names": rest,
        "optimizer": None,
        "lr_scheduler": None,
        "skipped_steps": progress["step"] - progress["updates"],
        "global_steps": saved.step,
        "global_samples": progress["samples"],
        "dp_world_size": len(saved.training["generators"]),
        "mp_world_size": 1,
        "ds_version": _version(),
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }


def _described(saved: Ours, moments: list[str]) -> list[Note]:
    notes = [Note("weights", carried=True, what=f"{len(saved.trained)} trained, as fp32 masters")]
    if saved.untrained:
        notes.append(Note("buffers, frozen weights", carried=False, what=f"{len(saved.untrained)} lie {NO_BUFFERS}"))
    if moments:
        notes.append(Note("optimizer's states", carried=True, what=f"of {len(moments)} parameters"))
    elif saved.moments:
        what = "files are there, which stages 1 and 2 read; stage 3 knows Adam's moments alone"
        notes.append(Note("optimizer's states", carried=True, what=what))
    differing = sorted({k for g in saved.groups for k in saved.arguments(g)} - saved.shared_arguments.keys())
    if differing:
        what = f"{', '.join(differing)} differ between groups: the engine's own optimizer keeps its values"
        notes.append(Note("arguments", carried=False, what=what))
    schedule = "load with load_lr_scheduler_states=False where the engine has a scheduler"
    return [
        *notes,
        Note("step", carried=True, what=f"global_steps {saved.step}"),
        Note("loss scale", carried=False, what="DeepSpeed begins anew with its initial scale"),
        Note("learning-rate schedule", carried=False, what=schedule),
        Note("random states", carried=False, what="the format has no place for them"),
    ]


# --- reading ---------------------------------------------------------------------------------------------------------


def read(tag: Path, allowed: tuple[type, ...]) -> Theirs:
    """Reads a folder. tag: the folder that holds zero/. allowed: DeepSpeed's classes that its files may hold."""
    folders = sorted(path.parent for path in (tag / "zero").rglob("fp32.pt"))
    names = [folder.relative_to(tag / "zero").as_posix() for folder in folders]
    common = pickles.load(tag / "zero" / "optimizer_state.pt", allowed)
    step = _step(common)
    weights, moments = dict[str, Tensor](), Moments()
    for name, folder in zip(names, folders, strict=True):
        weights[name] = _tensor(folder / "fp32.pt")
        state = {file.stem: _tensor(file) for file in sorted(folder.glob("*.pt")) if file.stem not in ("fp32", "step")}
        if state:
            own = folder / "step.pt"
            updates = pickles.load(own) if own.is_file() else step
            moments[name] = {**state, **({} if updates is None else {"step": torch.tensor(float(updates))})}
    states = model_states(tag, allowed)
    theirs = Theirs({**weights, **untrained(states)}, moments or None)
    theirs.arguments = [{k: v for k, v in group.items() if k != "params"} for group in common.get("param_groups", [])]
    count(theirs, states[0])
    theirs.clipping = common.get("clip_grad") or None
    return theirs


def _tensor(file: Path) -> Tensor:
    saved = pickles.load(file)
    found = saved["param"] if isinstance(saved, dict) else saved
    assert isinstance(found, Tensor)
    return found


def _step(common: dict[str, Any]) -> Any:
    """Returns the optimizer's step: stage 3 keeps it apart, fused optimizers in their groups."""
    states = common.get("optimizer_state_dict", {}).get("state", {})
    found = [state["step"] for state in states.values() if "step" in state]
    found += [group["step"] for group in common.get("param_groups", []) if "step" in group]
    return found[0] if found else None


def model_states(tag: Path, allowed: tuple[type, ...]) -> list[dict[str, Any]]:
    """Returns the state of each rank that wrote one, in their order."""
    files = sorted(tag.glob(STATES), key=lambda file: [int(number) for number in re.findall(r"\d+", file.name)])
    stage3 = [file for file in files if file.name.startswith("zero_pp_rank_")]
    if not files:
        raise problem("PATH", f"{tag} holds no {STATES}", "give a complete folder")
    return [pickles.load(file, allowed) for file in stage3 or files]


def untrained(states: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Returns buffers, and weights that no optimizer had: whole, or with stage 3 a piece a rank."""
    first = states[0]
    found: dict[str, Tensor] = {name: first["module"][name] for name in first["buffer_names"]}
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        pieces = [state["frozen_param_fragments"][name].flatten() for state in states]
        found[name] = torch.cat(pieces)[: shape.numel()].view(shape)
    return found


def count(theirs: Theirs, states: dict[str, Any]) -> None:
    theirs.step, theirs.skipped = int(states["global_steps"]), int(states.get("skipped_steps", 0))
    theirs.samples = states.get("global_samples")
    if states.get("lr_scheduler"):
        what = "the learning rate follows the run file's schedule"
        theirs.notes.append(Note("lr_scheduler", carried=False, what=what))
    if (states.get("ds_config") or {}).get("fp16", {}).get("enabled"):
        theirs.notes.append(Note("loss scale", carried=False, what="it begins anew at scaler.init_scale"))
