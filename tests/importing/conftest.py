from __future__ import annotations

from pathlib import Path

import pytest

from tests.importing.made import model_and_data


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model of bytes and a registry of conversations and texts."""
    monkeypatch.chdir(tmp_path)
    model_and_data()
    return tmp_path
