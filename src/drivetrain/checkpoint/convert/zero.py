"""Reads DeepSpeed's own checkpoints: with ZeRO, put together by DeepSpeed's tools, and without ZeRO.

Those tools load pickles without restraint, of whatever name and depth, and build paths from parameters' names. So the
folder passed to them holds only files that torch's restrained loader has read before: tensors, plain values and the few
classes that DeepSpeed itself puts into its files.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivetrain.checkpoint.convert import universal
from drivetrain.checkpoint.convert.foreign import Note, Theirs, of_torch
from drivetrain.errors import problem
from drivetrain.launch.variables import variables
from drivetrain.runtime import scratch
from drivetrain.trust import pickles

LATEST = "latest"


def read(folder: Path) -> Theirs:
    """Reads a checkpoint. folder: the one passed to save_checkpoint, or the folder of a tag in it."""
    with variables({"DS_ACCELERATOR": "cpu"}):
        return _read(_tag(folder), _classes())


def _read(tag: Path, allowed: tuple[type, ...]) -> Theirs:
    if (tag / "zero").is_dir():
        return universal.read(tag, allowed)
    if not any(tag.glob("*_optim_states.pt")):
        return _without_zero(tag, allowed)
    found = {file: pickles.load(file, allowed) for file in sorted(tag.glob("*.pt"))}
    states = [each["optimizer_state_dict"] for each in found.values() if "optimizer_state_dict" in each]
    for name in (name for each in [*found.values(), *states] for name in _names(each)):
        universal.refuse_path(name)
    with scratch.make() as aside:
        known = aside / tag.name
        known.mkdir()
        for file in found:
            (known / file.name).symlink_to(file.resolve())
        return _merged(known, allowed) if all(map(_has_moments, states)) else _weights_alone(known, allowed)


def _names(states: dict[str, Any]) -> Iterator[str]:
    """Yields the names of parameters, from which DeepSpeed's tools build paths."""
    for key in ("param_shapes", "param_slice_mappings"):
        given = states.get(key) or ()
        for mapping in given if isinstance(given, list | tuple) else [given]:
            yield from map(str, mapping)


def _tag(folder: Path) -> Path:
    for name in (universal.LATEST, LATEST):
        if (folder / name).is_file():
            tag = folder / (folder / name).read_text(encoding="utf-8").strip()
            if tag.is_dir():
                return tag
            raise problem("PATH", f"{folder / name} names {tag.name}, which is not there", "give a complete folder")
    return folder


def _classes() -> tuple[type, ...]:
    """Returns the classes that DeepSpeed's files hold beside tensors and plain values."""
    try:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address
    except ImportError as error:
        why = f"deepspeed cannot be imported: {error}; its files hold objects of its own"
        raise problem("--from", why, "pip install 'drivetrain[deepspeed]'") from None
    return (ZeroStageEnum, fragment_address, LossScaler, DynamicLossScaler)


def _has_moments(optimizer: dict[str, Any]) -> bool:
    base = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict", {}))
    states = base["state"].values() if isinstance(base, dict) else base
    return any(universal.MOMENTS[0] in state for state in states)


def _without_zero(tag: Path, allowed: tuple[type, ...]) -> Theirs:
    """Reads one file that holds everything, the optimizer as torch has it."""
    states = universal.model_states(tag, allowed)[0]
    theirs = Theirs(states["module"])
    if states.get("optimizer"):
        theirs.moments, theirs.arguments = of_torch(states["optimizer"])
    universal.count(theirs, states)
    return theirs


def _merged(tag: Path, allowed: tuple[type, ...]) -> Theirs:
    """Merges by ds_to_universal, through a folder that is deleted afterwards."""
    from deepspeed.checkpoint import ds_to_universal

    with scratch.make() as aside:
        arguments = argparse.Namespace(
            input_folder=str(tag),
            output_folder=str(aside / "universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
        with _quietly():
            ds_to_universal.main(arguments)
        return universal.read(aside / "universal", allowed)


def _weights_alone(tag: Path, allowed: tuple[type, ...]) -> Theirs:
    """Reads weights by zero_to_fp32, which needs no moments; ds_to_universal supports only Adam's."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with _quietly():
        weights = get_fp32_state_dict_from_zero_checkpoint(str(tag.parent), tag.name)
    states = universal.model_states(tag, allowed)
    theirs = Theirs({**weights, **universal.untrained(states)})
    universal.count(theirs, states[0])
    what = "DeepSpeed's ds_to_universal knows Adam's moments alone, and these are others: they begin anew"
    theirs.notes.append(Note("optimizer's states", carried=False, what=what))
    return theirs


@contextlib.contextmanager
def _quietly() -> Any:
    """Silences DeepSpeed's tools, which print, and draw bars."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
