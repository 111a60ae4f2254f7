"""Python configurations are computed as Python would, and nothing in them is run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drivetrain.errors import UserError
from drivetrain.importing.python_file import READ_BY, SKIPPED, read_python
from drivetrain.importing.python_values import Name, Unknown
from tests.properties import examples

SAME = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=examples(150))


def values(tmp_path: Path, text: str) -> dict[str, Any]:
    path = tmp_path / "config.py"
    path.write_text(text, encoding="utf-8")
    return read_python(path)


AS_PYTHON = [
    "a = 1\nb = a + 2 * 3 - 4 / 5\nc = -b\nd = not a\ne = 7 // 2 % 2\nf = 2 ** 10",
    "a = 'x'\nb = a + 'y'\nc = f'{a}_{1}_e'\nd = [1, *[2, 3]]\ne = d + [4]",
    "a = dict(x=1, **dict(y=2))\nb = {'k': a, **a}\nc = a['x']\nd = b['k']['y']",
    "a, b = 1, [2]\nc = d = 3\na += 4\nb.append(5)\nb.extend([6])",
    "a = {}\na['k'] = {'l': 1}\na['k']['l'] = 2\na.update(m=3)\na.update({'n': 4})\nb = [1, 2]\nb[0] = 9\nb[-1] = 8",
    "a = 3\nif a > 2:\n    b = 'more'\nelif a:\n    b = 'some'\nelse:\n    b = 'none'",
    "a = 0\nb = a or 5\nc = a and 6\nd = 1 if a == 0 else 2\ne = a is None\nf = a != 1",
    "a = 1\ndel a\nb = 2\npass\n'''text'''",
]


@pytest.mark.parametrize("text", AS_PYTHON)
def test_values_are_those_that_python_gives(text: str, tmp_path: Path) -> None:
    space: dict[str, Any] = {}
    exec(text, {}, space)  # our own text
    found = values(tmp_path, text)
    assert {name: value for name, value in found.items() if name not in (SKIPPED, READ_BY)} == {
        name: list(value) if isinstance(value, tuple) else value for name, value in space.items()
    }
    assert found[SKIPPED] == {}


def test_what_is_imported_stays_a_name(tmp_path: Path) -> None:
    text = "import torch\nimport a.b as c\nfrom x.y import Z as W\nd = torch.optim.AdamW\ne = c.D\nf = W\n"
    found = values(tmp_path, text)
    assert (found["d"], found["e"], found["f"]) == ("torch.optim.AdamW", "a.b.D", "x.y.Z")
    assert isinstance(found["d"], Name)


@pytest.mark.parametrize(
    "expression",
    [
        "open('trace', 'w').write('run')",
        "__import__('os').system('touch trace')",
        "(lambda: open('trace', 'w'))()",
        "[open('trace', 'w') for _ in range(1)]",
        "f\"{open('trace', 'w')}\"",
        "dict(open('trace', 'w'))",
        "eval(\"open('trace', 'w')\")",
        "{}.__class__.__base__.__subclasses__()",
        "'%s' % 3",
        "10 ** 10 ** 10",
        "9 ** 9 ** 9 ** 9",
        "'a' * 10 ** 9",
        "[0] * 10 ** 9",
        "1 << 10 ** 9",
        "1 / 0",
        "undefined",
        "1e308 * 10 ** 400",
        "2.0 ** 5000",
        "b'bytes'",
        "3j",
        "...",
        "(3).real",
    ],
)
def test_what_is_no_constant_is_not_computed_and_leaves_no_trace(
    expression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = values(tmp_path, f"a = {expression}\n{expression}\n")
    assert isinstance(found["a"], Unknown)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    "statement",
    [
        "import os\nos.system('touch trace')",
        "for i in [1]:\n    open('trace', 'w')",
        "while True:\n    pass",
        "class A:\n    open('trace', 'w')",
        "def f(x=open('trace', 'w')):\n    pass",
        "@open('trace', 'w').write\ndef f():\n    pass",
        "with open('trace', 'w') as file:\n    file.write('run')",
        "try:\n    open('trace', 'w')\nexcept OSError:\n    pass",
        "assert open('trace', 'w')",
        "raise SystemExit",
        "if open('trace', 'w'):\n    a = 1",
        "x = {}\nx[open('trace', 'w')] = 1",
        "a = [1]\na.append(open('trace', 'w'))",
        "dict = print\nx = dict('run', file=open('trace', 'w'))",
        "match open('trace', 'w'):\n    case _:\n        pass",
        "(y := open('trace', 'w'))",
    ],
)
def test_no_statement_is_run(statement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values(tmp_path, statement + "\n")
    assert not (tmp_path / "trace").exists()


def test_a_text_that_doubles_does_not_fill_the_memory(tmp_path: Path) -> None:
    found = values(tmp_path, "a = 'x'\n" + "a = a + a\n" * 60)
    assert isinstance(found["a"], Unknown)


@SAME
@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(tmp_path: Path, text: str) -> None:
    with contextlib.suppress(UserError):
        values(tmp_path, text.encode("utf-8", "ignore").decode())


NAMES = st.sampled_from(["a", "b", "train_cfg", "dict", "os"])
ATOMS = st.one_of(st.integers(-9, 9).map(str), st.floats(allow_nan=False, allow_infinity=False).map(repr), NAMES)
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/%|") | st.sampled_from(["**", "//", "==", "<", "or"]), inner).map(
            lambda parts: f"({' '.join(parts)})"
        ),
        st.lists(inner, max_size=3).map(lambda parts: f"[{', '.join(parts)}]"),
        inner.map(lambda part: f"dict(k={part})"),
        inner.map(lambda part: f"{{'k': {part}}}"),
        st.tuples(NAMES, inner).map(lambda parts: f"{parts[0]}[{parts[1]}]"),
        st.tuples(NAMES, inner).map(lambda parts: f"{parts[0]}.f({parts[1]})"),
        inner.map(lambda part: f"-{part}"),
    ),
    max_leaves=12,
)


@SAME
@given(st.lists(st.tuples(NAMES, EXPRESSIONS), max_size=6))
def test_any_program_of_assignments_is_read_without_error(tmp_path: Path, lines: list[tuple[str, str]]) -> None:
    values(tmp_path, "".join(f"{name} = {expression}\n" for name, expression in lines))


@pytest.mark.parametrize(
    "text", ["a = (", "a = 1\n b = 2", "\0", "a = " + "(" * 500 + ")" * 500, "x" + "[0]" * 5000, "-" * 20000 + "1"]
)
def test_broken_python_is_refused_with_its_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        values(tmp_path, text)
