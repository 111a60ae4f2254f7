"""Imports objects that the user names by import path."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Literal

from drivetrain.config.near_names import suggestion
from drivetrain.errors import problem


def import_object(path: str, field: str, kind: Literal["function", "class"] = "function") -> Any:
    """Returns the object that `package.module:Name` or `package.module.Name` names. Raises UserError, on `field`, with
    what is missing. kind: that it should be, by which a remedy calls it.

    A module or package that lies in the current folder is found there, as a script beside it would find it.
    """
    _refuse_file(path, field, kind)
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not name:
        raise problem(field, f"{path!r} is no import path", "write package.module:Name")
    here = str(Path.cwd())
    if in_current_folder(module_name) and here not in sys.path:
        sys.path.append(here)  # at the end: what is installed comes first, as find_spec says
    try:
        module = import_module(module_name)
    except ImportError as error:
        fix = "install the package, start where its file lies, or add its folder to PYTHONPATH"
        question = _near_module(module_name, error.name)
        raise problem(
            field, f"{path!r} cannot be imported: {error}", f"{question} Else {fix}" if question else fix
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


def _refuse_file(path: str, field: str, kind: str) -> None:
    """Raises UserError for the path of a Python file, with the import path that is probably meant."""
    place, _, name = path.partition(":")
    if not place.endswith(".py") and "/" not in place:
        return
    file, here = Path(os.path.abspath(place.removesuffix(".py"))), Path.cwd()
    dotted = ".".join(file.relative_to(here).parts) if file.is_relative_to(here) else ""
    is_found = bool(dotted) and (file.parent == here or in_current_folder(dotted) is not None)
    module_name = dotted if is_found else file.name
    fix = f"write {module_name}:{name}" if name else f"name a {kind}: {module_name}:{kind.upper()}"
    way = "" if is_found else f", and add {Path(place).parent} to PYTHONPATH"
    raise problem(field, f"{path!r} is the path of a file, not an import path", fix + way)


def _near_module(module_name: str, missing: str | None) -> str:
    """Returns the question whether a module is meant whose name is near a missing one: in the current folder, or in its
    package. "" where there is none, and where the named module is there and imports another one that is missing."""
    if missing is None or not f"{module_name}.".startswith(f"{missing}."):
        return ""
    package = missing.rpartition(".")[0]
    places: Iterable[str] = getattr(sys.modules.get(package), "__path__", ()) if package else [str(Path.cwd())]
    names = [each.name for each in iter_modules(places)]
    whole = {f"{package}.{name}" if package else name for name in names}
    return suggestion(missing, sorted(whole))
