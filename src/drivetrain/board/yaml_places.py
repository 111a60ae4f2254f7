"""Places in the text of a run file at which its problems stand, for an editor that marks them there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from drivetrain.errors import Problem


@dataclass(frozen=True)
class PlacedProblem(Problem):
    """A problem, and the part of a line at which it stands. line, column, end_column: from 1 on, the last one behind
    the part; columns in UTF-16 units, as browsers count."""

    line: int = 1
    column: int = 1
    end_column: int = 1

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "line": self.line, "column": self.column, "end_column": self.end_column}


def placed(text: str, problems: Sequence[Problem]) -> list[Problem]:
    """Returns the problems of a run file with the places of their fields. A field that is missing is marked at the
    block that lacks it; one that lacks it at the top, at the first key. text: valid YAML."""
    root = YAML(typ="safe", pure=True).compose(text) if problems else None
    return [at(each, text, *_marks(root, each.field)) for each in problems]


def at(problem: Problem, text: str, first: int | None, end: int) -> Problem:
    """Returns a problem with the place of a part of the text, of which its first line counts. first, end: indices of
    the text; None where it has no place."""
    if first is None:
        return problem
    before = text[:first].rpartition("\n")[2]
    part = text[first:end].partition("\n")[0]
    column = _units(before) + 1
    return PlacedProblem(
        problem.field,
        problem.why,
        problem.fix,
        text.count("\n", 0, first) + 1,
        column,
        column + max(_units(part), 1),
    )


def _marks(node: Any, path: str) -> tuple[int | None, int]:
    """Returns where a field begins and ends, as indices of the text; None for a text without keys."""
    found: tuple[int | None, int] = (None, 0)
    if isinstance(node, MappingNode) and node.value:
        key, _ = node.value[0]
        found = key.start_mark.index, key.end_mark.index
    for part in path.split("."):
        key, node = _child(node, part)
        if node is None:
            break
        begins = node if key is None else key
        found = begins.start_mark.index, (node if isinstance(node, ScalarNode) else begins).end_mark.index
    return found


def _child(node: Any, part: str) -> tuple[Any, Any]:
    """Returns the key and the value at one part of a path; of an item of a list, no key."""
    if isinstance(node, MappingNode):
        return next(((key, value) for key, value in node.value if key.value == part), (None, None))
    if isinstance(node, SequenceNode) and part.isdigit() and int(part) < len(node.value):
        return None, node.value[int(part)]
    return None, None


def _units(text: str) -> int:
    return len(text.encode("utf-16-le")) // 2
