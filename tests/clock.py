"""A clock that tests set, in place of the module `time` of a module that reads it."""

from __future__ import annotations

from types import ModuleType

import pytest


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def clock_of(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Returns the clock that the module reads until the test ends."""
    found = Clock()
    monkeypatch.setattr(module, "time", found)
    return found
