"""Docstrings are sentences: they begin with a verb or name a thing, in words that a stranger reads once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [file for file in sorted((ROOT / "src").rglob("*.py")) if "recipes" not in file.parts]

FRAGMENT = re.compile(r"(What|Of|Whatever|Whoever|Whom|Whose|Such|Thereof)\b")
QUESTION = re.compile(r"(Whether|Where)\b")  # a property may name a truth value by it; a function returns one
WORDS = re.compile(r"\b(told|said|nobody|whoever|lest|nought|thereof)\b", re.IGNORECASE)
PARAMETER = re.compile(r"\b(told|said): ")  # the name of an argument, which a docstring explains


def docstrings(file: Path) -> Iterator[tuple[str, bool, str]]:
    """Yields the place of each docstring, whether it is a plain function's, and its text on one line."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            decorators = [ast.unparse(each) for each in getattr(node, "decorator_list", [])]
            is_function = isinstance(node, ast.FunctionDef) and not any("property" in each for each in decorators)
            if text:
                where = f"{file.relative_to(ROOT)}:{node.body[0].lineno}"
                yield where, is_function, " ".join(text.split())


def faults(text: str, is_function: bool) -> Iterator[str]:
    if FRAGMENT.match(text) or (is_function and QUESTION.match(text)):
        yield "begins with a fragment"
    yield from (f"says {word[0]!r}" for word in WORDS.finditer(PARAMETER.sub("", text)))


def test_docstrings_of_the_package_are_sentences_in_plain_words() -> None:
    found = [
        f"{where} {fault}: {text[:80]}"
        for file in SOURCES
        for where, is_function, text in docstrings(file)
        for fault in faults(text, is_function)
    ]
    assert not found, "\n".join(found)


def test_a_fragment_and_an_odd_word_are_found() -> None:
    assert list(faults("What is told already of a run that had come to its end.", is_function=True)) == [
        "begins with a fragment",
        "says 'told'",
    ]
    assert list(faults("Whether the folder is empty.", is_function=True)) == ["begins with a fragment"]
    assert not list(faults("Whether the folder is empty.", is_function=False)), "a property names a truth value"
    assert not list(faults("Ends the run. told: when each rank reported how it ended.", is_function=True))
