"""Mutation testing tells changes that tests notice from those they do not; on a project of three lines."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from bench import mutants
from bench.mutation import records
from bench.mutation.nearest import Nearest
from bench.mutation.operators import Mutation, mutations
from bench.mutation.page import page
from bench.mutation.records import Record
from bench.mutation.sample import of_project, ordered
from bench.mutation.tree import Tree

ROOT = Path(__file__).resolve().parents[2]
LARGER = '''"""A module."""


def larger(a: int, b: int) -> int:
    """The larger one."""
    if a > b:
        return a
    return b
'''
TESTS = """
from toy.sums import larger


def test_that_fails_anyway():
    assert larger(1, 1) == 2


def test_the_larger_one_is_found():
    assert (larger(2, 1), larger(1, 2)) == (2, 2)
"""


HANGS = """
import subprocess
import sys
import time
from pathlib import Path

from toy.sums import larger


def test_first():
    assert True


def test_that_waits():
    if larger(1, 0) == 2:
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], start_new_session=True)
        Path("{left}").write_text(str(started.pid))
        time.sleep(99)
"""
TIE = """

def test_a_tie_is_the_second():
    assert type(larger(True, 1)) is int
"""


def changed(source: str) -> set[tuple[str, str]]:
    """(operator, what the source becomes) of every mutation."""
    found = mutations("src/toy/a.py", source)
    return {(each.operator, each.applied(source.encode()).decode()) for each in found}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("c = a <= (b)", {("comparison negated", "c = a > (b)"), ("boundary moved", "c = a < (b)")}),
        ("c = a  is not b", {("comparison negated", "c = a  is b")}),
        ("c = a and not b", {("and, or swapped", "c = a or not b"), ("not dropped", "c = a and (b)")}),
        ("c = ä + -b", {("arithmetic swapped", "c = ä - -b"), ("arithmetic swapped", "c = ä + (b)")}),
        ("c = a ** b", {("arithmetic swapped", "c = a * b")}),
        ("a -= b", {("arithmetic swapped", "a += b"), ("statement removed", "pass")}),
        ("a = 1", {("constant off by one", "a = 2"), ("constant off by one", "a = 0")}),
        ("a = 0.5, b", {("constant doubled", "a = 1.0, b")}),
        ("a = True", {("True, False swapped", "a = False")}),
        ("f(a)", {("statement removed", "pass")}),
        ("a.b = c", {("statement removed", "pass")}),
        ("def f():\n    raise a(1)", {("raise removed", "def f():\n    pass")}),
        ("def f():\n    return a", {("None returned", "def f():\n    return None")}),
        ("if a:\n    b = c", {("condition forced", f"if {value}:\n    b = c") for value in (True, False)}),
        ("while a:\n    b = c", {("condition forced", "while False:\n    b = c")}),
        ("b = {c for c in d if e}", {("condition forced", f"b = {{c for c in d if {v}}}") for v in (True, False)}),
        ("b = a[c:d]", {("slice off by one", "b = a[(c) - 1:d]"), ("slice off by one", "b = a[c:(d) - 1]")}),
        ("b = f(a, c=d, e='text', **g)", {("keyword argument dropped", "b = f(a,  e='text', **g)")}),
    ],
)
def test_an_operator_makes_its_changes_and_no_others(source: str, expected: set[tuple[str, str]]) -> None:
    assert changed(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""Text 1."""',
        "import a",
        "a: list[1] | None",
        "Kind = Literal[1, 2] | None",
        "@dataclass(frozen=True)\nclass A:\n    b: int",
        "def __repr__(self):\n    return 1 + 2",
        "if TYPE_CHECKING:\n    a = 1",
        'if __name__ == "__main__":\n    main(1)',
        'a = f"{b + 1:.2f}" + "c"',
        "assert a > 1",
        "a = problem('field', 'why', fix=1), Problem(1), KeyError(2)",
    ],
)
def test_words_types_and_declarations_are_left_alone(source: str) -> None:
    assert changed(source) == set()


def test_every_change_of_this_project_differs_and_compiles() -> None:
    for mutation in ordered(ROOT, of_project(ROOT), seed=1)[:150]:
        source = (ROOT / mutation.file).read_bytes()
        assert mutation.applied(source) != source
        compile(mutation.applied(source), mutation.file, "exec", dont_inherit=True)


def test_a_key_outlives_edits_elsewhere_and_tells_alike_statements_apart() -> None:
    def keys(source: str) -> set[str]:
        return {mutation.key for mutation in mutations("src/toy/a.py", source)}

    assert keys("# more\n\nb = c\n" + LARGER) == keys(LARGER)
    assert not keys(LARGER.replace("a > b", "b < a")) >= keys(LARGER)
    assert len(keys("f(a)\nf(a)")) == 2


def test_a_files_share_of_the_sample_is_its_lines_not_its_constants(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "long.py").write_text("".join(f"a{line} = b == c\n" for line in range(300)))
    (tmp_path / "src" / "table.py").write_text("".join(f"a{line} = [1, 2, 3, 4, 5]\n" for line in range(100)))
    found = of_project(tmp_path)
    sample = ordered(tmp_path, found, seed=3)
    assert sample == ordered(tmp_path, found, seed=3) != ordered(tmp_path, found, seed=4)
    assert 60 <= sum(mutation.file == "src/long.py" for mutation in sample[:100]) <= 90


def project(folder: Path) -> Path:
    root = folder / "project"
    for path, text in {
        "src/toy/__init__.py": "",
        "src/toy/sums.py": LARGER,
        "tests/test_sums.py": TESTS,
        "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["slow: slow"]\n',
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def results(root: Path) -> dict[str, Record]:
    """Returns what is changed into what → its record."""
    found = records.read(root / "bench" / "results" / "mutants.jsonl")
    return {f"{record.before} → {record.after}": record for record in found.values()}


@pytest.mark.slow  # a quarter of a minute for a tool of this project's own tests
def test_kills_and_survivors_are_distinguished_over_several_calls(tmp_path: Path) -> None:
    root = project(tmp_path)
    mutants.main(["--number", "3"], root)
    first = results(root)
    assert len(first) == 3
    mutants.main(["--number", "99"], root)
    found = results(root)
    assert first.items() <= found.items()
    survived = {change for change, record in found.items() if not record.killed}
    assert survived == {"> → >="}
    assert {record.by for record in found.values() if record.killed} == {
        "tests/test_sums.py::test_the_larger_one_is_found"
    }
    assert len(found) == len(mutations("src/toy/sums.py", LARGER))
    assert (root / "src" / "toy" / "sums.py").read_text() == LARGER
    text = (root / "bench" / "results" / "mutants.md").read_text()
    assert f"`{found['> → >='].key}` src/toy/sums.py, larger: boundary moved" in text

    (root / "tests" / "test_sums.py").write_text(TESTS + TIE)
    key = found["> → >="].key
    mutants.main(["--again", "survived", "--first", f"{key}=tests/test_sums.py::test_a_tie_is_the_second"], root)
    again = results(root)["> → >="]
    assert (again.result, again.first) == ("killed", "survived")
    assert (again.by, again.tests) == ("tests/test_sums.py::test_a_tie_is_the_second", 1)

    # an edit ends the records of what it changes, and no others
    (root / "src" / "toy" / "sums.py").write_text("# edited\n" + LARGER.replace("a > b", "b < a"))
    mutants.main(["--number", "0"], root)
    kept = results(root)
    assert "> → >=" not in kept
    assert kept.keys() == {change for change, record in found.items() if not record.statement.startswith("if")}


def mutation(file: Path, before: str, after: str) -> Mutation:
    start = file.read_text().index(before)
    return Mutation("src/toy/sums.py", "larger", "", "any", start, start + len(before), before, after)


def test_a_test_that_hangs_with_a_change_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    root = project(tmp_path)
    (root / "tests" / "test_sums.py").write_text(HANGS.format(left=tmp_path / "left"))
    tree = Tree(root, tmp_path, test_seconds=3)
    with tree.mutated(mutation(root / "src" / "toy" / "sums.py", "return a", "return 2")):
        outcome = tree.run(["tests/test_sums.py"], seconds=60)
    assert (outcome.verdict, outcome.tests) == ("hung", ("tests/test_sums.py::test_that_waits",))
    assert tree.passes(outcome.tests, seconds=30)
    tree.close()
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "left").read_text())).wait(timeout=10)


def test_the_mirror_is_nearest_and_tables_of_lazy_imports_are_imports(tmp_path: Path) -> None:
    root = project(tmp_path)
    for path, text in {
        "src/toy/table.py": 'TABLE = {"sums": "toy.sums:larger"}',
        "tests/test_sums_of_more.py": "from toy.sums import other",
        "tests/test_first.py": "import subprocess\nfrom toy.sums import larger",
        "tests/test_second.py": "import toy.sums",
        "tests/test_third.py": "from tests.helper import *",
        "tests/helper.py": "from toy import (\n    table,\n)",
        "tests/test_fourth.py": "import json",
    }.items():
        (root / path).write_text(text + "\n")
    nearest = Nearest(root)
    assert nearest.rounds(mutation(root / "src" / "toy" / "sums.py", ">", "<")) == [
        ["tests/test_sums.py", "tests/test_sums_of_more.py"],
        ["tests/test_second.py", "tests/test_first.py"],
        ["tests/test_third.py"],
        *([[]] * 4),
    ]
    assert nearest.starts_processes("tests/test_first.py::test_any")


def test_single_tests_that_name_the_function_or_what_calls_it_are_nearest_of_all(tmp_path: Path) -> None:
    root = project(tmp_path)
    (root / "src" / "toy" / "sums.py").write_text(LARGER + "\n\ndef largest(*all):\n    return larger(*all)\n")
    (root / "tests" / "test_sums.py").write_text(
        "from toy.sums import *\ndef made(): return largest(1, 2), larger(1, 2)\n"
        "def test_other(): assert True\ndef test_caller(): assert largest(1, 2)\ndef test_helped(): assert made()\n"
        "def test_process(): subprocess.run([str(larger(1, 2))])\n"
    )
    found = Nearest(root).naming(mutation(root / "src" / "toy" / "sums.py", ">", "<"), ["tests/test_sums.py"])
    assert found == ["tests/test_sums.py::test_helped", "tests/test_sums.py::test_caller"]


def record(key: str, result: str, first: str = "", by: str | None = "tests/test_a.py::test_b") -> Record:
    return Record(
        key, f"src/toy/{key}/a.py", "f", "operator", "f(a)", "f(a)", "pass", result, first or result, by, 3, 2.0, True
    )


def test_the_score_counts_equivalents_apart_and_names_what_it_was_before_tests_were_added() -> None:
    found = {
        "a": record("a", "killed"),
        "b": record("b", "hung"),
        "c": record("c", "killed", first="survived"),
        "d": record("d", "survived", by=None),
        "e": replace(record("e", "survived", by=None), whole=False),
    }
    text = page(found, {"e": "The reason."}, "setting")
    assert "5 mutations tried; 1 judged equivalent (20.0%; at most 10% may be)" in text
    assert "Of the other 4, 3 are killed: **75.0%**" in text
    assert "it was 50.0%" in text
    survivors, equivalent, later = text.split("## ")[1:]
    assert [part.count(f"`{key}`") for part in (survivors, equivalent, later) for key in "dec"] == [
        1,
        0,
        0,
        0,
        1,
        0,
        0,
        0,
        1,
    ]
    assert "Open; passed 3 tests." in survivors
    assert "The reason." in equivalent
    assert "Killed by `tests/test_a.py::test_b`." in later


def test_a_judgement_needs_a_reason_and_a_survivor(tmp_path: Path) -> None:
    file, known = tmp_path / "mutants.toml", {"a": record("a", "killed"), "b": record("b", "survived", by=None)}
    file.write_text("[equivalent]\n" + "\n".join(f"{key} = {json.dumps('why')}" for key in ("b", "gone")))
    assert records.equivalents(file, known) == {"b": "why"}
    file.write_text('[equivalent]\nb = " "\n')
    with pytest.raises(ValueError, match="b has no reason"):
        records.equivalents(file, known)
    file.write_text('[equivalent]\na = "why"\n')
    with pytest.raises(ValueError, match=r"a is judged equivalent, but tests/test_a.py::test_b kills it"):
        records.equivalents(file, known)
