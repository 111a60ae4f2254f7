"""Tests what predictions are asked for: a path, typed texts, or lines of stdin."""

from __future__ import annotations

import io
import sys

import pytest

from drivetrain.errors import UserError
from drivetrain.inference.request import asked_for


def stdin(monkeypatch: pytest.MonkeyPatch, given: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))


def test_a_path_and_typed_texts_are_taken_as_they_are() -> None:
    assert asked_for("new.csv", []) == ("new.csv", [])
    assert asked_for(None, ["one", "two"]) == (None, ["one", "two"])


def test_stdin_holds_a_text_a_line_with_blank_ones_between(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, "\ufeff很好\r\n\n  \nnot\u2028good\x0c\n".encode())
    assert asked_for("-", []) == (None, ["很好", "not\u2028good\x0c"])


@pytest.mark.parametrize(("given", "words"), [(b"\n \n", "holds no text"), (b"\xff\xfe", "not UTF-8")])
def test_stdin_without_texts_is_refused(given: bytes, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, given)
    with pytest.raises(UserError, match=words):
        asked_for("-", [])


def test_a_path_beside_typed_texts_is_refused() -> None:
    with pytest.raises(UserError, match=r"--data \(new.csv\) was given as well"):
        asked_for("new.csv", ["one"])
