"""A workload of objects that the caller of drivetrain.train() passed, under the names that a user's file has."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

import drivetrain
from drivetrain.config.workload import UserObjects
from drivetrain.objects import held
from drivetrain.workloads.user_file import UserFile
from drivetrain.workloads.user_module import UserModuleWorkload

OWN = Path(drivetrain.__file__).parent
INSTALLED = ("site-packages", "dist-packages")


class PassedObjects(UserFile):
    """The objects, as a user's file would define them. Raises UserError if this process has none."""

    def __init__(self, objects: Mapping[str, Any], called: str = "drivetrain.train()") -> None:
        """called: their name in messages."""
        self.path, self.text, self._options = Path(called), b"", {}
        if not objects:
            raise held.missing()
        self._module = ModuleType("objects")
        vars(self._module).update(objects)
        self._check()

    def misnamed(self) -> list[str]:
        return []  # the caller's arguments have the names that are read

    def _line(self, error: BaseException) -> str:
        """Returns the last line of the user's own that led to the error, in any file or notebook."""
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            file = Path(frame.filename)
            installed = file.is_relative_to(OWN) or any(part in INSTALLED for part in file.parts)
            if not installed and linecache.getline(frame.filename, frame.lineno or 0):
                source = f" ({frame.line})" if frame.line else ""
                return f" at line {frame.lineno} of {file.name}{source}"
        return ""


class UserObjectsWorkload(UserModuleWorkload):
    def __init__(self, config: UserObjects, seed: int) -> None:
        del config  # it says no more than that there are objects
        self._use(PassedObjects(held.held()), seed)

    def build_model(self) -> nn.Module:
        """Returns a copy of the model, on the CPU: the caller's own is not changed."""
        return super().build_model().cpu()

    @property
    def facts(self) -> dict[str, Any]:
        return {name: fact for name, fact in super().facts.items() if name != "file"}

    def save_assets(self, model: nn.Module, folder: Path) -> None:
        del model, folder  # the objects are the caller's
