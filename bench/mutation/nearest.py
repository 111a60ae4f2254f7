"""Finds which tests are near a mutation, in rounds from the nearest on, read off names and imports.

Round 0: the files that mirror the module, src/<package>/a/b.py → tests/a/test_b.py and tests/a/test_b_*.py. Round 1:
those that import it, and those of tests/a that reach it in any way. Round n: those that reach it by n imports. What a
test's helpers import counts as its own, and a dotted path in a string as an import: tables of lazy imports and
processes started with -m name modules so.

Within a round the files of the mirrored folder come first, then those whose tests start no process, being quick; among
equals the ones that name the mutated class or function, then those that reach fewest modules. Before all rounds come
single tests: those of rounds 0 and 1 that start no process and name the mutated function, its class or what calls it in
its module. A map of which test runs which line would be nearer still; measuring it takes longer than the suite itself.
"""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

from bench.mutation.operators import Mutation

FARTHEST = 6
MOST_NAMING = 30  # single tests before all rounds
STARTS_PROCESSES = re.compile(r"\branks\(|subprocess|Popen|multiprocessing|spawned|processes=")


class Nearest:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules = {_module(root / "src", file): file for file in sorted((root / "src").rglob("*.py"))}
        for folder in ("tests", "bench"):
            self._modules |= {_module(root, file): file for file in sorted((root / folder).rglob("*.py"))}
        self._named = re.compile(rf"\b(?:{'|'.join(sorted({name.split('.')[0] for name in self._modules}))})(?:\.\w+)+")
        self._texts = {name: file.read_text() for name, file in self._modules.items()}
        self._imports = {name: self._imported(name) for name in self._modules}

    def rounds(self, mutation: Mutation) -> list[list[str]]:
        """Test files (relative to the root) by round, nearest first; no file twice, and a round may be empty."""
        module = _module(self._root / "src", self._root / mutation.file)
        folder = ".".join(["tests", *module.split(".")[1:-1]])
        found: list[list[str]] = [[] for _ in range(FARTHEST + 1)]
        for test in self._tests:
            distance = 0 if self._mirrors(test, module) else self._distances(test).get(module)
            if distance is not None and distance <= FARTHEST:
                is_beside = folder != "tests" and test.rpartition(".")[0] == folder
                found[min(distance, 1) if is_beside else distance].append(test)
        names = [name for name in mutation.scope.split(".") if not name.startswith("__")]

        def order(test: str) -> tuple[bool, bool, int, int, str]:
            naming = sum(name in self._texts[test] for name in names)
            elsewhere = test.rpartition(".")[0] != folder
            return elsewhere, self.starts_processes(self._path(test)), -naming, len(self._distances(test)), test

        return [[self._path(test) for test in sorted(each, key=order)] for each in found]

    def naming(self, mutation: Mutation, files: Iterable[str]) -> list[str]:
        """Those tests that start no process and name the mutated function, its class or what calls it in its module,
        those with most of the names first."""
        names = _callers(ast.parse((self._root / mutation.file).read_text()), mutation.scope.split("."))
        found: dict[str, int] = {}
        for file in files:
            for test, text in _test_functions((self._root / file).read_text()):
                if not STARTS_PROCESSES.search(text):
                    found[f"{file}::{test}"] = len(names & set(re.findall(r"\w+", text)))
        return sorted((test for test, count in found.items() if count), key=lambda test: -found[test])[:MOST_NAMING]

    def starts_processes(self, test: str) -> bool:
        """Returns whether tests of a file (or the one of a pytest node id) may start processes, which a busy machine
        delays."""
        text = self._texts[_module(self._root, self._root / test.partition("::")[0])]
        return STARTS_PROCESSES.search(text) is not None

    @cached_property
    def _tests(self) -> list[str]:
        return [name for name in self._modules if name.startswith("tests.") and name.split(".")[-1].startswith("test_")]

    def _path(self, module: str) -> str:
        return self._modules[module].relative_to(self._root).as_posix()

    def _mirrors(self, test: str, module: str) -> bool:
        _, *folders, name = module.split(".")
        mirror = ".".join(["tests", *folders, f"test_{name}"])
        return test == mirror or test.startswith(mirror + "_")

    def _distances(self, test: str) -> dict[str, int]:
        """Module → over how many imports a test file reaches it. Steps between the tests' own files are free."""
        distances = {test: 0}
        waiting = deque([test])
        while waiting:
            name = waiting.popleft()
            for other in self._imports[name]:
                step = 0 if other.startswith(("tests.", "bench.")) else 1
                if other not in distances or distances[other] > distances[name] + step:
                    distances[other] = distances[name] + step
                    (waiting.append if step else waiting.appendleft)(other)
        return distances

    def _imported(self, name: str) -> set[str]:
        text = self._texts[name]
        named = set(self._named.findall(text))
        for source, names in re.findall(r"^\s*from ([\w.]+) import (\([^)]*\)|[^\n]*)", text, flags=re.M):
            named |= {source} | {f"{source}.{each}" for each in re.findall(r"\w+", names)}
        if name.startswith("tests.") and "drivetrain(" in text:  # the command line, called by a fixture of that name
            named.add("drivetrain.cli")
        modules = {self._known(each) for each in named}
        return {module for module in modules if module is not None and module != name}

    def _known(self, dotted: str) -> str | None:
        """The longest part in front that is a module."""
        parts = dotted.split(".")
        while parts and ".".join(parts) not in self._modules:
            parts.pop()
        return ".".join(parts) or None


def _callers(module: ast.Module, scope: list[str]) -> set[str]:
    """The names in `scope`, and of the module's functions that mention one of them, whatever the number of steps."""
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    mentioned = {each.name: set(re.findall(r"\w+", ast.unparse(each))) for each in functions}
    names = {name for name in scope if name and not name.startswith("__")}
    while more := {name for name, words in mentioned.items() if words & names} - names:
        names |= {name for name in more if not name.startswith("__")}
        mentioned = {name: words for name, words in mentioned.items() if name not in more}
    return names


def _test_functions(text: str) -> Iterator[tuple[str, str]]:
    """Each test's name and source, with that of the file's functions and classes that it uses by name."""
    own = {
        node.name: ast.unparse(node)
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    uses = {name: set(re.findall(r"\w+", source)) & own.keys() for name, source in own.items()}
    for name in own:
        if name.startswith("test_"):
            used = {name}
            while more := set().union(*(uses[each] for each in used)) - used:
                used |= more
            yield name, "\n".join(own[each] for each in used)


def _module(root: Path, file: Path) -> str:
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
