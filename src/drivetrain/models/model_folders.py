"""Folders and hub ids of Transformers models: finds them, reads their configuration, and explains why one cannot be
loaded."""

from __future__ import annotations

import pickle
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from drivetrain.config.files import MOST_JSON_BYTES, BrokenText, parsed_json, read_text
from drivetrain.errors import UserError, problem
from drivetrain.runtime.hub import ask_hub
from drivetrain.runtime.model_places import refuse_absent_model
from drivetrain.trust import pickles, remote_code

SAFE = "give a model whose weights are safetensors"
QUANTISED = (
    "give the same model in 16 or 32 bits (the one that it was quantised from); quantised_base={format: nf4} with an "
    "adapter holds it in 4 bits while it trains"
)


def config_of(path: str | None, given: Mapping[str, Any] | None, field: str, trusted: bool = False) -> Any:
    """Returns the Transformers config that `build_classifier` would use, without building anything."""
    if path is None:
        from transformers import CONFIG_MAPPING

        fields = dict(given or {})
        return CONFIG_MAPPING[fields.pop("model_type")](**fields)
    path, local = located(path, field)
    try:
        return config_at(path, f"{field}.path", trusted)
    except UserError:
        raise
    except Exception as error:  # OSError for what is missing, others for what is broken
        raise unloadable(path, local, f"{field}.path", error) from error


def config_at(path: str, field: str, trusted: bool) -> Any:
    """Returns the config of a model that was located."""
    import transformers

    if trusted:
        remote_code.check_allowed_code(path, field)
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trusted)
    if not trusted:
        remote_code.refuse_kernels(config, path, field)
    return config


def shapes_of_weights(path: str) -> dict[str, tuple[int, ...]] | None:
    """Returns name → shape of a folder's weights, as its safetensors files have them; None where there are none."""
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(path).glob("model*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return found or None


def save_description(model: Any, folder: Path) -> None:
    """Writes config.json and, for a model whose class came with it, the Python files of that class.

    Not by Transformers' own saving, which takes a sharded model's class for one of PyTorch's.
    """
    from transformers.dynamic_module_utils import get_relative_import_files

    model.config.save_pretrained(folder)
    for kind in type(model).__mro__:
        if vars(kind).get("_auto_class") is not None:
            code = str(sys.modules[kind.__module__].__file__)
            for file in (code, *get_relative_import_files(code)):
                shutil.copy(file, folder / Path(file).name)


def located(path: str, field: str) -> tuple[str, bool]:
    """Returns the path with ~ filled in, and whether it is a folder here (else it can only be a hub id)."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            fix = "give its base here, and this folder as adapter.path"
            raise problem(field, f"{path} holds an adapter without the model it belongs to", fix)
        if not (folder / "config.json").is_file():
            raise problem(field, f"{path} holds no config.json", "give a folder that save_pretrained or a hub wrote")
        return str(folder), True
    if folder.exists():
        raise problem(field, f"{path} is a file", "give the folder that holds config.json and the weights")
    refuse_absent_model(path, field)
    ask_hub(path, field)
    return path, False


def unloadable(path: str, local: bool, field: str, error: Exception) -> UserError:
    """Returns the problem for a library's error about a folder or hub id, with the remedy."""
    if remote_code.is_refusal(error):
        return remote_code.refusal(path, field)
    if isinstance(error, pickle.UnpicklingError):
        unsafe = pickles.unsafe_weights(Path(path), field) if local else None
        return unsafe or problem(field, f"the weights of {path} hold more than tensors, which could run code", SAFE)
    if local and (method := _quantised_by(Path(path))):
        why = f"the weights of {path} are quantised ({method}) and cannot be trained here"
        if not isinstance(error, ImportError):  # which names a package that would not help: these weights are frozen
            why += f": {one_line(error)}"
        return problem(field, why, QUANTISED)
    if local:
        return problem(field, f"{path} cannot be loaded: {one_line(error)}", "give a complete model folder")
    return problem(
        field,
        f"{path} is no folder here, and could not be had from the hub: {one_line(error)}",
        "download it where there is a network (hf download ID --local-dir FOLDER) and give the folder's path",
    )


def _quantised_by(folder: Path) -> str | None:
    """Returns the method by which a folder's weights were quantised, as its config.json names it; None for none."""
    try:
        config = parsed_json(read_text(folder / "config.json", MOST_JSON_BYTES))
    except (UserError, BrokenText):
        return None
    found = config.get("quantization_config") if isinstance(config, dict) else None
    return str(found.get("quant_method", "by a method without a name")) if isinstance(found, dict) else None


def one_line(error: Exception) -> str:
    """Returns a library's message without line breaks, with its type if the message alone is unclear (KeyError:
    'x')."""
    text = re.sub(r"^(Class v|V)alidation error for (field|validator) '\w+': \w+: ", "", " ".join(str(error).split()))
    plain = isinstance(error, ValueError | TypeError | OSError) or type(error).__name__.startswith("StrictDataclass")
    return f"{'' if plain else type(error).__name__ + ': '}{text[:300]}{'…' if len(text) > 300 else ''}"
