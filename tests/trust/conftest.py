"""A place for a payload's mark, and a terminal that would answer yes to whatever asks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import pytest


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Written by payloads when they run."""
    return tmp_path / "owned"


@pytest.fixture(autouse=True)
def _modules_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers copies a model's own code into a folder of the user's before it imports it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture(autouse=True)
def _nothing_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(prompt: str = "") -> NoReturn:
        pytest.fail(f"something asks at the terminal: {prompt}")

    monkeypatch.setattr("builtins.input", asked)
