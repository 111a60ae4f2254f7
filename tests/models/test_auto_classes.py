"""Classes of Transformers are imported without passes of Python's collector, where a process runs nothing else."""

from __future__ import annotations

import gc
import sys
from types import ModuleType

import pytest

from drivetrain.memory import garbage
from drivetrain.models.auto_classes import imported_auto_class


class Watched(ModuleType):
    """Stands in for Transformers, which imports a class when it is asked for."""

    collects: bool

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        self.collects = gc.isenabled()
        return name


@pytest.mark.parametrize("owns", [True, False])
def test_no_pass_is_taken_over_an_import_in_an_own_process(owns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched("transformers")
    monkeypatch.setitem(sys.modules, "transformers", watched)
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", ModuleType("transformers.modeling_utils"))
    monkeypatch.setattr(garbage, "_owns_process", owns)
    assert imported_auto_class("AutoModelForCausalLM") == "AutoModelForCausalLM"
    assert watched.collects is not owns
    assert gc.isenabled()
