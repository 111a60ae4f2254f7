"""The tables of docs/reference/compatibility.md are what the rules say."""

from __future__ import annotations

import pytest

from bench.compatibility import PAGE, page
from drivetrain.config.engines import FsdpEngine


def test_the_page_is_what_the_rules_say() -> None:
    assert PAGE.read_text() == page(), "write it anew: python -m bench.compatibility"


def test_a_rule_that_changes_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FsdpEngine, "gives_pieces", False)
    assert PAGE.read_text() != page()
