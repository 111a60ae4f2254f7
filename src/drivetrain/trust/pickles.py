"""Reads others' pickled files without running code in them.

torch's restrained loader refuses objects that could run code, and then advises to load them without restraint. The
errors raised here name the objects found instead, and how to make safetensors of weights whose source is trusted.
"""

from __future__ import annotations

import pickle
import shlex
import warnings
from collections.abc import Sequence
from enum import EnumMeta
from pathlib import Path
from typing import IO, Any

import torch

from drivetrain.errors import UserError, last_line, problem

GETATTR = "builtins.getattr"
SHOWN = 5
CONVERSION = (
    "import sys, torch; from safetensors.torch import save_file; "
    "weights = torch.load(sys.argv[1], map_location='cpu', weights_only=False); "
    "save_file({name: each.clone().contiguous() for name, each in weights.items()}, sys.argv[2], {'format': 'pt'})"
)


def member(kind: Any, name: str) -> Any:
    """Stands for getattr in a pickle, and serves enum members only: early Pythons 3.11 write them so."""
    if not isinstance(kind, EnumMeta) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"it asks for {name} of {kind!r}, which is no member of an enum")
    return kind[name]


def load(file: Path, allowed: Sequence[type] = (), are_weights: bool = False) -> Any:
    """Loads a torch.save'd file: tensors and plain values, and objects of the allowed classes.

    are_weights: whether it holds a model's weights, which could be safetensors instead. Raises UserError for other
    objects, which could run code, and for a truncated file.
    """
    try:
        return restrained(file, allowed)
    except FileNotFoundError:
        raise problem("PATH", f"{file} is missing", "give a complete folder") from None
    except pickle.UnpicklingError as error:
        raise unsafe(file, "PATH", are_weights) from error
    except Exception as error:  # a broken pickle can raise nearly anything
        raise problem("PATH", f"{file} cannot be read: {last_line(error)}", "copy or save it again") from error


def restrained(file: Path | IO[bytes], allowed: Sequence[type] = ()) -> Any:
    """Returns the content of a pickled file. Raises pickle.UnpicklingError for objects that could run code."""
    with torch.serialization.safe_globals([*allowed, (member, GETATTR)]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)  # of which torch is only not sure
        return torch.load(file, map_location="cpu", weights_only=True)


def unsafe(file: Path, field: str, are_weights: bool) -> UserError:
    """Returns the problem of a file that the restrained loader refused."""
    found = ", ".join(_named(file)[:SHOWN]) or "a pickle that torch.save did not write"
    why = f"{file} holds more than tensors and plain values ({found}): reading it could run code that came with it"
    if not are_weights:
        return problem(field, why, "save it again without those objects")
    target = file.with_name(file.stem.replace("pytorch_model", "model") + ".safetensors")
    files = " ".join(shlex.quote(str(each)) for each in (file, target))
    fix = f'take weights in safetensors; or, only where you trust their source: python -c "{CONVERSION}" {files}'
    return problem(field, why, fix)


def unsafe_weights(folder: Path, field: str) -> UserError | None:
    """Returns the problem of the first of a folder's pickled weights that could run code; None if all are tensors."""
    for file in sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]):
        try:
            restrained(file)
        except pickle.UnpicklingError:
            return unsafe(file, field, are_weights=True)
        except Exception:  # what else is wrong with it is for its reader to say
            continue
    return None


def _named(file: Path) -> list[str]:
    """Returns the names of a file's objects other than tensors' own classes."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # a pickle of another make, in which torch's search ends in errors of many kinds
        return []
    return [name for name in names if name != GETATTR]
