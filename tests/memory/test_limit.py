"""How much memory a machine still has."""

from __future__ import annotations

import psutil
import pytest

from drivetrain.memory import limit


def test_a_machine_whose_processes_have_no_common_limit_has_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit, "_cgroup_left", lambda **_: [])
    assert 0 < limit.attainable_memory() <= psutil.virtual_memory().total + psutil.swap_memory().total
    assert limit.safe_limit(1) > 0
