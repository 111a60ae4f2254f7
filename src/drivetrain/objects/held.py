"""The objects that a run of this process is made from, by name. Free of torch.

A run file names an optimizer, a schedule or a tracker by import path; one that the caller passed as an object is named
`drivetrain.objects.held:<name>`, which this module resolves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from drivetrain.errors import UserError, problem

PREFIX = f"{__name__}:"
_held: dict[str, Any] = {}


@contextmanager
def holding(objects: Mapping[str, Any]) -> Iterator[None]:
    """While the block runs, the objects are found under their names."""
    before = dict(_held)
    _held.update(objects)
    try:
        yield
    finally:
        _held.clear()
        _held.update(before)


def held() -> Mapping[str, Any]:
    return _held


def missing() -> UserError:
    """Returns the error of a run that was trained on objects which this process does not have."""
    why = "this run was trained on Python objects (drivetrain.train(model=...)), which its folder does not hold"
    fix = (
        "go on from Python: drivetrain.train(..., resume=True) with the same objects, "
        "drivetrain.load(folder, model=net), drivetrain.predict(drivetrain.load(folder, model=net), data), "
        "drivetrain.evaluate(folder, model=net, ...)"
    )
    return problem("workload", why, fix)


def __getattr__(name: str) -> Any:
    if name in _held:
        return _held[name]
    if name.startswith("__"):
        raise AttributeError(name)
    raise missing()
