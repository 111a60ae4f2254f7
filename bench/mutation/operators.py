"""The operators: each changes one expression or statement of a source file into another that still compiles.

`mutations` lists every mutation of a file, with exact positions from `ast`. Left alone, because a change there is no
change of what the program does, or only of its words:

- strings and f-strings, keyword arguments that are a text, and all within an error that is raised or made;
- annotations, type expressions, decorators, imports, `assert`, `__repr__` and `__str__`;
- blocks under `if TYPE_CHECKING` and `if __name__ == "__main__"`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

COMPARISONS: dict[type[ast.cmpop], list[tuple[str, str, str]]] = {  # operator, as it is written, as it becomes
    ast.Eq: [("comparison negated", "==", "!=")],
    ast.NotEq: [("comparison negated", "!=", "==")],
    ast.Lt: [("comparison negated", "<", ">="), ("boundary moved", "<", "<=")],
    ast.LtE: [("comparison negated", "<=", ">"), ("boundary moved", "<=", "<")],
    ast.Gt: [("comparison negated", ">", "<="), ("boundary moved", ">", ">=")],
    ast.GtE: [("comparison negated", ">=", "<"), ("boundary moved", ">=", ">")],
    ast.Is: [("comparison negated", "is", "is not")],
    ast.IsNot: [("comparison negated", r"is\s+not", "is")],
    ast.In: [("comparison negated", "in", "not in")],
    ast.NotIn: [("comparison negated", r"not\s+in", "in")],
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
Placed = ast.expr | ast.stmt | ast.keyword
TYPES = {"bool", "bytes", "dict", "float", "int", "list", "object", "set", "str", "tuple", "type"}
TEXTS = {"__repr__", "__str__"}


@dataclass(frozen=True)
class Mutation:
    """Bytes `start` to `end` of a file replaced by `after`. `ordinal` counts those that read the same."""

    file: str
    scope: str  # the class and function it lies in, e.g. "Cutting.windows"
    statement: str  # the statement it lies in, in one line; of a compound one the head
    operator: str
    start: int
    end: int
    before: str
    after: str
    ordinal: int = 0

    @property
    def key(self) -> str:
        """The same wherever the statement stands in its function, so that results outlive edits elsewhere."""
        parts = [self.file, self.scope, self.statement, self.operator, self.before, self.after, self.ordinal]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:10]

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def mutations(file: str, source: str) -> list[Mutation]:
    """Every mutation of a file, in the order of the source."""
    collector = _Collector(file, source)
    collector.visit(ast.parse(source))
    seen: Counter[str] = Counter()
    numbered = []
    for mutation in sorted(collector.found, key=lambda each: (each.start, each.end, each.operator, each.after)):
        numbered.append(replace(mutation, ordinal=seen[mutation.key]))
        seen[mutation.key] += 1
    return numbered


class _Collector(ast.NodeVisitor):
    """Walks a file and notes what each node's operators make of it."""

    def __init__(self, file: str, source: str) -> None:
        self.found: list[Mutation] = []
        self._file = file
        self._source = source.encode()
        self._lines = [0]
        for line in self._source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._scope: list[str] = []
        self._statement = ""

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self._statement = self._head(node)
        for change in OPERATORS.get(type(node), []):
            for operator, start, end, after in change(self, node):
                self._note(operator, start, end, after)
        outer = self._scope
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._scope = [*outer, node.name]
        for child in _children(node):
            statement = self._statement
            self.visit(child)
            self._statement = statement
        self._scope = outer

    def start(self, node: Placed) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def end(self, node: Placed) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: Placed) -> str:
        return self._source[self.start(node) : self.end(node)].decode()

    def between(self, left: Placed, right: Placed, pattern: str) -> tuple[int, int] | None:
        """Returns where the operator stands between two operands; None where a comment there could hold one too."""
        gap = self._source[self.end(left) : self.start(right)].decode()
        found = re.search(pattern, gap)
        if "#" in gap or found is None:
            return None
        before = self.end(left) + len(gap[: found.start()].encode())
        return before, before + len(found.group().encode())

    def after_comma(self, end: int) -> int:
        """The position behind a comma that follows, else `end`."""
        found = re.match(rb"\s*,", self._source[end:])
        return end + found.end() if found else end

    def _head(self, node: ast.stmt) -> str:
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        end = self.start(first) if first is not None and not isinstance(node, ast.ClassDef) else self.end(node)
        if isinstance(node, ast.ClassDef):
            return f"class {node.name}"
        return " ".join(self._source[self.start(node) : end].decode().split())

    def _note(self, operator: str, start: int, end: int, after: str) -> None:
        before = self._source[start:end].decode()
        self.found.append(
            Mutation(self._file, ".".join(self._scope), self._statement, operator, start, end, before, after)
        )


def _children(node: ast.AST) -> Iterable[ast.AST]:
    """The nodes within that may be mutated."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            defaults = [*node.args.defaults, *(each for each in node.args.kw_defaults if each is not None)]
            return [] if node.name in TEXTS else [*defaults, *node.body]
        case ast.ClassDef():
            return node.body
        case ast.AnnAssign():
            return [node.target, node.value] if node.value else []
        case ast.Import() | ast.ImportFrom() | ast.Raise() | ast.Assert() | ast.JoinedStr():
            return []
        case ast.If() if _is_guard(node.test):
            return []
        case ast.Call() if _makes_an_error(node):
            return []
        case ast.Subscript() if _is_type(node.value):
            return []
    return ast.iter_child_nodes(node)


def _is_guard(test: ast.expr) -> bool:
    names = {child.id for child in ast.walk(test) if isinstance(child, ast.Name)}
    return bool(names & {"TYPE_CHECKING", "__name__"})


def _makes_an_error(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name.lower() == "problem" or name.endswith("Error")


def _is_type(node: ast.expr) -> bool:
    """Returns whether an expression names a type: int, Annotated, nn.Module, but neither a constant nor a variable."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in TYPES or (name[0].isupper() and not name.isupper())
        case ast.Constant(value=None):
            return True
        case ast.Subscript(value=value):
            return _is_type(value)
        case ast.BinOp(left=left, op=ast.BitOr()):
            return _is_type(left)
    return False


Change = tuple[str, int, int, str]


def _comparison(at: _Collector, node: ast.Compare) -> Iterator[Change]:
    operands = [node.left, *node.comparators]
    for left, kind, right in zip(operands, node.ops, operands[1:], strict=False):
        for operator, written, becomes in COMPARISONS[type(kind)]:
            place = at.between(left, right, written)
            if place:
                yield operator, *place, becomes


def _boolean(at: _Collector, node: ast.BoolOp) -> Iterator[Change]:
    written, becomes = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
    for left, right in zip(node.values, node.values[1:], strict=False):
        place = at.between(left, right, rf"\b{written}\b")
        if place:
            yield "and, or swapped", *place, becomes


def _unary(at: _Collector, node: ast.UnaryOp) -> Iterator[Change]:
    if isinstance(node.op, ast.Not):
        yield "not dropped", at.start(node), at.end(node), f"({at.text(node.operand)})"
    elif isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield "arithmetic swapped", at.start(node), at.end(node), f"({at.text(node.operand)})"


def _arithmetic(at: _Collector, node: ast.BinOp) -> Iterator[Change]:
    texts = [side for side in (node.left, node.right) if isinstance(side, ast.JoinedStr) or _is_text(side)]
    if texts or type(node.op) not in ARITHMETIC or (isinstance(node.op, ast.BitOr) and _is_type(node)):
        return
    written, becomes = ARITHMETIC[type(node.op)]
    place = at.between(node.left, node.right, re.escape(written))
    if place:
        yield "arithmetic swapped", *place, becomes


def _augmented(at: _Collector, node: ast.AugAssign) -> Iterator[Change]:
    if isinstance(node.value, ast.JoinedStr) or _is_text(node.value) or type(node.op) not in ARITHMETIC:
        return
    written, becomes = ARITHMETIC[type(node.op)]
    place = at.between(node.target, node.value, re.escape(written) + "=")
    if place:
        yield "arithmetic swapped", *place, becomes + "="
    yield "statement removed", at.start(node), at.end(node), "pass"


def _constant(at: _Collector, node: ast.Constant) -> Iterator[Change]:
    place = at.start(node), at.end(node)
    if isinstance(node.value, bool):
        yield "True, False swapped", *place, str(not node.value)
    elif isinstance(node.value, int):
        yield "constant off by one", *place, str(node.value + 1)
        if node.value > 0:
            yield "constant off by one", *place, str(node.value - 1)
    elif isinstance(node.value, float):
        yield "constant doubled", *place, repr(node.value * 2 or 1.0)


def _call_statement(at: _Collector, node: ast.Expr) -> Iterator[Change]:
    value = node.value.value if isinstance(node.value, ast.Await) else node.value
    if isinstance(value, ast.Call):
        yield "statement removed", at.start(node), at.end(node), "pass"


def _stored(at: _Collector, node: ast.Assign) -> Iterator[Change]:
    """An assignment to a name is left: without it the next use of the name fails in any test."""
    if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
        yield "statement removed", at.start(node), at.end(node), "pass"


def _removed(at: _Collector, node: ast.Raise) -> Iterator[Change]:
    yield "raise removed", at.start(node), at.end(node), "pass"


def _returned(at: _Collector, node: ast.Return) -> Iterator[Change]:
    if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
        yield "None returned", at.start(node), at.end(node), "return None"


def _condition(at: _Collector, node: ast.If | ast.IfExp | ast.While) -> Iterator[Change]:
    if isinstance(node, ast.If) and _is_guard(node.test):
        return
    if not isinstance(node, ast.While):  # it would only ever hang
        yield "condition forced", at.start(node.test), at.end(node.test), "True"
    if not isinstance(node.test, ast.Constant):
        yield "condition forced", at.start(node.test), at.end(node.test), "False"


def _filter(at: _Collector, node: ast.comprehension) -> Iterator[Change]:
    for test in node.ifs:
        for value in ("True", "False"):
            yield "condition forced", at.start(test), at.end(test), value


def _slice(at: _Collector, node: ast.Slice) -> Iterator[Change]:
    """A bound that is a number is a constant, off by one already."""
    for bound in (node.lower, node.upper):
        if bound is None or isinstance(bound, ast.Constant):
            continue
        if isinstance(bound, ast.UnaryOp) and isinstance(bound.operand, ast.Constant):
            continue
        yield "slice off by one", at.start(bound), at.end(bound), f"({at.text(bound)}) - 1"


def _keywords(at: _Collector, node: ast.Call) -> Iterator[Change]:
    if _makes_an_error(node):
        return
    for keyword in node.keywords:
        if keyword.arg and not _is_text(keyword.value) and not isinstance(keyword.value, ast.JoinedStr):
            yield "keyword argument dropped", at.start(keyword), at.after_comma(at.end(keyword)), ""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


OPERATORS: dict[type[ast.AST], list[Callable[..., Iterator[Change]]]] = {
    ast.Compare: [_comparison],
    ast.BoolOp: [_boolean],
    ast.UnaryOp: [_unary],
    ast.BinOp: [_arithmetic],
    ast.AugAssign: [_augmented],
    ast.Constant: [_constant],
    ast.Expr: [_call_statement],
    ast.Assign: [_stored],
    ast.Raise: [_removed],
    ast.Return: [_returned],
    ast.If: [_condition],
    ast.IfExp: [_condition],
    ast.While: [_condition],
    ast.comprehension: [_filter],
    ast.Slice: [_slice],
    ast.Call: [_keywords],
}
