"""Describes what is in a checkpoint, from manifest, headers and trees; of tensors only the optimizer's counters are
read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from safetensors import safe_open

from drivetrain.checkpoint.directory import MANIFEST, read_manifest
from drivetrain.checkpoint.tensor_file import DTYPES
from drivetrain.errors import last_line, problem
from drivetrain.runtime.storage import local_file

LARGEST = 5
BYTES = {name: dtype.itemsize for dtype, name in DTYPES.items()}
WORDS = {name: str(dtype).removeprefix("torch.") for dtype, name in DTYPES.items()}


def contents(path: Path) -> dict[str, Any]:
    """Returns JSON-able contents. Raises UserError if manifest, headers or trees cannot be read. Checksums are left to
    `verify`."""
    try:
        return _contents(path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        why = f"{path} cannot be read: {last_line(error)}"
        raise problem("PATH", why, "see drivetrain checkpoint verify") from error


def _contents(path: Path) -> dict[str, Any]:
    manifest = read_manifest(path)
    heads = {name: _header(local_file(path, f"{name}.safetensors")) for name in manifest.parts}
    trees = {name: json.loads(local_file(path, f"{name}.json").read_text(encoding="utf-8")) for name in manifest.parts}
    training = trees.get("training", {})
    sizes = {name: record.bytes for name, record in manifest.files.items()}
    return {
        "path": str(path),
        "step": manifest.step,
        "format": manifest.format,
        **manifest.facts,
        "progress": _progress(training),
        "parts": {name: _part(head) for name, head in heads.items()},
        "optimizer": _optimizer(trees.get("optimizer", {}), heads.get("optimizer", {}), training),
        "random_streams": training.get("streams", list(range(len(training.get("generators", []))))),
        "loss_scale": training.get("engine", {}).get("scaler", {}).get("scale"),
        "adapters": _adapters(path),
        "files": {**sizes, MANIFEST: (path / MANIFEST).stat().st_size},
    }


def _header(file: Path) -> dict[str, tuple[str, list[int]]]:
    """Returns name → dtype, shape."""
    try:
        with safe_open(file, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  it is no dict
            return {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    except Exception as error:  # safetensors' own derives from Exception alone
        raise ValueError(f"{file.name}: {error}") from error


def _numbers(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _part(head: dict[str, tuple[str, list[int]]]) -> dict[str, Any]:
    by_dtype: dict[str, dict[str, int]] = {}
    for dtype, shape in head.values():
        kind = by_dtype.setdefault(WORDS[dtype], {"tensors": 0, "numbers": 0, "bytes": 0})
        kind["tensors"] += 1
        kind["numbers"] += _numbers(shape)
        kind["bytes"] += _numbers(shape) * BYTES[dtype]
    ranked = sorted(head.items(), key=lambda item: -_numbers(item[1][1]) * BYTES[item[1][0]])
    largest = [
        {"name": name, "shape": shape, "dtype": WORDS[dtype], "bytes": _numbers(shape) * BYTES[dtype]}
        for name, (dtype, shape) in ranked[:LARGEST]
    ]
    whole = {key: sum(kind[key] for kind in by_dtype.values()) for key in ("tensors", "numbers", "bytes")}
    return {**whole, "by_dtype": by_dtype, "largest": largest}


def _progress(training: dict[str, Any]) -> dict[str, Any]:
    progress, order = training.get("progress", {}), training.get("order", {})
    samples, size = progress.get("samples"), order.get("num_samples")
    return {
        "updates": progress.get("updates"),
        "samples": samples,
        "epochs": samples / size if samples is not None and size else None,
        "elapsed_seconds": progress.get("elapsed_seconds"),
        "metrics": progress.get("metrics", {}),
        "best": progress.get("best"),
        "order": order,
    }


def _optimizer(
    tree: dict[str, Any], head: dict[str, tuple[str, list[int]]], training: dict[str, Any]
) -> dict[str, Any]:
    forms: dict[str, Counter[str]] = {}
    for values in tree.get("state", {}).values():
        for key, value in values.items():
            forms.setdefault(key, Counter())[_form(value, head)] += 1
    groups = [
        {"parameters": len(group["params"]), **{k: _plain(v) for k, v in group.items() if k != "params"}}
        for group in tree.get("param_groups", [])
    ]
    states = {key: dict(found) for key, found in forms.items()}
    return {"name": training.get("optimizer"), "groups": groups, "states": states}


def _form(value: Any, head: dict[str, tuple[str, list[int]]]) -> str:
    """Returns the form of a state: a dtype, a number, codes of a kind."""
    if isinstance(value, dict) and "quantised" in value:
        codes = value["codes"]["$tensor"]["key"] if "codes" in value else None
        return f"{value['quantised']}: " + (WORDS[head[codes][0]] if codes in head else "codes") + " codes and scales"
    if isinstance(value, dict) and "$tensor" in value:
        dtype, shape = head[value["$tensor"]["key"]]
        return WORDS[dtype] + ("" if shape else ", one number")
    return "parts" if isinstance(value, dict | list) else "a number"


def _plain(value: Any) -> Any:
    """Returns the parts of the tree's own forms that JSON can hold."""
    if isinstance(value, dict) and len(value) == 1:
        return next(iter(value.values()))
    return value


def _adapters(path: Path) -> list[str]:
    return sorted(str(file.parent.relative_to(path)) for file in path.rglob("adapter_config.json"))
