"""Objects of the user's, named by import path."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Any

from drivetrain.errors import problem


def import_object(path: str, field: str) -> Any:
    """`package.module:Name` or `package.module.Name` → the object. UserError, on `field`, says what was missing."""
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not name:
        raise problem(field, f"{path!r} is no import path", "write package.module:Name")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise problem(
            field, f"{path!r} cannot be imported: {error}", "install the package, or add its folder to PYTHONPATH"
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
