"""Train a PyTorch model under any precision and any parallel engine from one run file, or from Python.

    import drivetrain

    report = drivetrain.train("run.yaml", precision="bf16-mixed")
    net = drivetrain.load("runs/digits")

docs/reference/python.md has the rest. Importing this package does not import torch: a name's module is imported at its
first use. What is not in __all__ is private.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from drivetrain.errors import Problem, RunError, UserError

if TYPE_CHECKING:
    from drivetrain.api.comparing import ComparisonTable, compare
    from drivetrain.api.inference import evaluate, predict
    from drivetrain.api.loading import load
    from drivetrain.api.own_loop import LoopEngine, engine
    from drivetrain.api.training import train
    from drivetrain.training.report import RunReport

__version__ = "0.1.0"
__all__ = [
    "ComparisonTable",
    "LoopEngine",
    "Problem",
    "RunError",
    "RunReport",
    "UserError",
    "compare",
    "engine",
    "evaluate",
    "load",
    "predict",
    "train",
]
_PLACES = {
    "train": "api.training",
    "load": "api.loading",
    "predict": "api.inference",
    "evaluate": "api.inference",
    "compare": "api.comparing",
    "ComparisonTable": "api.comparing",
    "engine": "api.own_loop",
    "LoopEngine": "api.own_loop",
    "RunReport": "training.report",
}


class _Package(ModuleType):
    """This package. Python puts each imported subpackage into it as an attribute, and the subpackage `compare` would
    take the place of the function of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")
    return getattr(import_module(f"drivetrain.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
