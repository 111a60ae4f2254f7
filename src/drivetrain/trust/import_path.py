"""Imports objects that the user names by import path."""

from __future__ import annotations

import difflib
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from drivetrain.errors import problem


def import_object(path: str, field: str) -> Any:
    """Returns the object that `package.module:Name` or `package.module.Name` names. Raises UserError, on `field`, with
    what is missing.

    A module or package that lies in the current folder is found there, as a script beside it would find it.
    """
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not name:
        raise problem(field, f"{path!r} is no import path", "write package.module:Name")
    here = str(Path.cwd())
    if in_current_folder(module_name) and here not in sys.path:
        sys.path.append(here)  # at the end: what is installed comes first, as find_spec says
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise problem(
            field,
            f"{path!r} cannot be imported: {error}",
            "install the package, start where its file lies, or add its folder to PYTHONPATH",
        ) from None
    except Exception as error:  # the user's own code runs here
        raise problem(
            field, f"{module_name} fails when it is imported: {type(error).__name__}: {error}", "correct it"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        near = difflib.get_close_matches(name, dir(module), n=1)
        fix = f"did you mean {module_name}:{near[0]}?" if near else "check the name"
        raise problem(field, f"{module_name} has no {name}", fix) from None


def in_current_folder(module_name: str) -> Path | None:
    """Returns the file of a module's outermost package in the current folder, if it lies there."""
    top = Path.cwd() / module_name.partition(".")[0]
    found = (top.with_name(f"{top.name}.py"), top / "__init__.py")
    return next((file for file in found if file.is_file()), None)
