"""Others' pickled files, read without running what is in them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from enum import EnumMeta
from pathlib import Path
from typing import Any

import torch

from drivetrain.errors import UserError, last_line, problem

GETATTR = "builtins.getattr"


def member(kind: Any, name: str) -> Any:
    """What stands for getattr in a pickle: early Pythons 3.11 write a member of an enum so. Of nothing else."""
    if not isinstance(kind, EnumMeta) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"it asks for {name} of {kind!r}, which is no member of an enum")
    return kind[name]


def load(file: Path, allowed: Sequence[type] = ()) -> Any:
    """A torch.save'd file: tensors and plain values, and objects of the classes that are allowed.

    UserError for what needs more, which could run code, and for a file that is cut short.
    """
    with torch.serialization.safe_globals([*allowed, (member, GETATTR)]):
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise problem("PATH", f"{file} is missing", "give a complete folder") from None
        except pickle.UnpicklingError as error:
            raise _unsafe(file) from error
        except (RuntimeError, EOFError, OSError, KeyError) as error:
            raise problem("PATH", f"{file} cannot be read: {last_line(error)}", "copy or save it again") from error


def _unsafe(file: Path) -> UserError:
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except (RuntimeError, pickle.UnpicklingError, ValueError):  # a pickle of another make
        names = []
    found = ", ".join([name for name in names if name != GETATTR][:5]) or "a pickle that torch.save did not write"
    why = f"{file} holds more than tensors and plain values ({found}): reading it could run code that came with it"
    return problem("PATH", why, "save it again without those objects")
