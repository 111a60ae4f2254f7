"""Python code that lies beside a model or tokenizer, and the run file's permission to run it.

Transformers asks at the terminal where `trust_remote_code` is left out, so every call here passes it. A model whose
architecture Transformers has itself needs no permission: its own class is taken, whatever stands beside the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivetrain.errors import UserError, problem

PERMISSIONS = {"path": "trust_remote_code", "tokenizer": "trust_tokenizer_code"}  # of a model block's keys
NAMING = ("config.json", "tokenizer_config.json")  # files that may name code


def permission_of(field: str) -> str:
    """Returns the run file's key that allows the code of the path at `field`: workload.model.trust_remote_code."""
    block, _, key = field.rpartition(".")
    return f"{block}.{PERMISSIONS[key]}"


def is_refusal(error: Exception) -> bool:
    """Returns whether Transformers raised this because it needs code that it was not allowed to run."""
    return isinstance(error, ValueError) and "trust_remote_code" in str(error)


def refusal(path: str, field: str) -> UserError:
    """Returns the problem of a folder or hub id that needs its own code."""
    asked = "; ".join(f"{file} names {code} ({key} of auto_map)" for file, key, code in code_named(path))
    why = f"{path} runs Python code of its own, which could do anything on this machine"
    fix = f"read that code, and where you trust it give {permission_of(field)}=true; else give another"
    return problem(field, f"{why}: {asked}" if asked else why, fix)


def check_allowed_code(path: str, field: str) -> None:
    """Raises UserError if a permitted path names code of another repository, which the permission does not cover."""
    for file, key, code in code_named(path):
        repository, separator, name = code.partition("--")
        if separator and repository != path:
            why = f"{file} in {path} names code of {repository}, another repository ({key} of auto_map)"
            fix = f"put the files of {repository} beside it and write {name} there, or give {repository} itself"
            raise problem(field, why, fix)


def refuse_kernels(config: Any, path: str, field: str) -> None:
    """Raises UserError for a configuration that would download and run a compiled attention kernel from the hub."""
    blocks = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
    for kernel in (getattr(block, "_attn_implementation", None) for block in blocks):
        if isinstance(kernel, str) and "/" in kernel:
            why = f"config.json in {path} asks for {kernel}, compiled code of the hub (attn_implementation)"
            fix = "take attn_implementation out of config.json, and give workload.model.attention"
            raise problem(field, why, fix)


def code_named(path: str) -> Iterator[tuple[str, str, str]]:
    """Yields file, class of Transformers and its replacement, for each entry of auto_map."""
    for name in NAMING:
        mapping = _mapping(path, name).get("auto_map")
        entries = mapping.items() if isinstance(mapping, dict) else [("AutoTokenizer", mapping)]
        for key, given in entries:
            for code in given if isinstance(given, list) else [given]:
                if isinstance(code, str):
                    yield name, str(key), code


def _mapping(path: str, name: str) -> dict[str, Any]:
    """Returns a JSON file of a folder, or of a hub id's downloaded files. Empty if there is none to read."""
    file: Path | None = Path(path).expanduser() / name
    if file is not None and not file.parent.is_dir():
        file = _downloaded(path, name)
    try:
        held = json.loads(file.read_text(encoding="utf-8")) if file is not None else None
    except (OSError, ValueError, RecursionError):
        return {}
    return held if isinstance(held, dict) else {}


def _downloaded(repository: str, name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repository, name)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
