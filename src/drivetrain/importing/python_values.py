"""Computes expressions of a configuration written in Python, from constants and earlier names alone."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

MOST_BITS = 512  # of a whole number: 10**10**10 would take all memory
MOST_POWER = 64
LONGEST = 100_000  # of a text or list
_NOT_COMPUTED = object()


class Name(str):
    """A dotted name that the file imports, such as torch.optim.AdamW. Nothing is imported."""


@dataclass(frozen=True)
class Unknown:
    """An expression that is not computed."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"{self.text} (not computed: files are read, never run)"


def clipped(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass
class Scope:
    """The names and their values at this point of the file."""

    values: dict[str, Any] = field(default_factory=dict)
    imported: dict[str, Name] = field(default_factory=dict)
    read_by: dict[str, set[str]] = field(default_factory=dict)  # name → names whose values it is part of
    target: str = ""  # the name that is being assigned

    def value(self, node: ast.expr) -> Any:
        """Returns the value, or `Unknown`."""
        handler = _VALUES.get(type(node))
        found = handler(self, node) if handler is not None else None
        if handler is None or found is _NOT_COMPUTED:
            return Unknown(clipped(ast.unparse(node)))
        return found

    def keywords(self, keywords: Iterable[ast.keyword]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for keyword in keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                found[keyword.arg] = value
            elif isinstance(value, dict):
                found |= value
            else:
                found[f"**{value}"] = Unknown(str(value))
        return found

    def _constant(self, node: Any) -> Any:
        return node.value if isinstance(node.value, str | int | float | bool | None) else _NOT_COMPUTED

    def _name(self, node: Any) -> Any:
        if node.id in self.values:
            if self.target and self.target != node.id:
                self.read_by.setdefault(node.id, set()).add(self.target)
            return self.values[node.id]
        return self.imported.get(node.id, _NOT_COMPUTED)

    def _attribute(self, node: Any) -> Any:
        owner = self.value(node.value)
        if isinstance(owner, Name):
            return Name(f"{owner}.{node.attr}")
        return owner.get(node.attr, _NOT_COMPUTED) if isinstance(owner, dict) else _NOT_COMPUTED

    def _subscript(self, node: Any) -> Any:
        owner, key = self.value(node.value), self.value(node.slice)
        try:
            return owner[key] if isinstance(owner, dict | list) else _NOT_COMPUTED
        except (KeyError, IndexError, TypeError):
            return _NOT_COMPUTED

    def _list(self, node: Any) -> Any:
        found: list[Any] = []
        for part in node.elts:
            value = self.value(part.value if isinstance(part, ast.Starred) else part)
            if not isinstance(part, ast.Starred):
                found.append(value)
            elif isinstance(value, list):
                found += value
            else:
                return _NOT_COMPUTED
        return found

    def _dict(self, node: Any) -> Any:
        found: dict[str, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            part = self.value(value)
            if key is None and isinstance(part, dict):
                found |= part
            elif key is None:
                return _NOT_COMPUTED
            else:
                found[str(self.value(key))] = part
        return found

    def _call(self, node: Any) -> Any:
        """Evaluates dict(...) only."""
        if not (isinstance(node.func, ast.Name) and node.func.id == "dict" and "dict" not in self.values):
            return _NOT_COMPUTED
        if not node.args:
            return self.keywords(node.keywords)
        first = self.value(node.args[0])
        if len(node.args) == 1 and isinstance(first, dict):
            return {**first, **self.keywords(node.keywords)}
        return _NOT_COMPUTED

    def _unary(self, node: Any) -> Any:
        return _computed(_OPERATORS.get(type(node.op)), self.value(node.operand))

    def _binary(self, node: Any) -> Any:
        return _computed(_OPERATORS.get(type(node.op)), self.value(node.left), self.value(node.right))

    def _compare(self, node: Any) -> Any:
        if len(node.ops) != 1:
            return _NOT_COMPUTED
        left, right = self.value(node.left), self.value(node.comparators[0])
        if isinstance(left, Unknown | Name) or isinstance(right, Unknown | Name):
            return _NOT_COMPUTED
        try:
            return _COMPARED[type(node.ops[0])](left, right)
        except (KeyError, TypeError):
            return _NOT_COMPUTED

    def _either(self, node: Any) -> Any:
        test = self.value(node.test)
        if isinstance(test, Unknown | Name):
            return _NOT_COMPUTED
        return self.value(node.body if test else node.orelse)

    def _both(self, node: Any) -> Any:
        stops_at = isinstance(node.op, ast.Or)
        value: Any = None
        for part in node.values:
            value = self.value(part)
            if isinstance(value, Unknown | Name):
                return _NOT_COMPUTED
            if bool(value) == stops_at:
                break
        return value

    def _text(self, node: Any) -> Any:
        """Evaluates f"{name}_e3" if all its parts are known."""
        parts = []
        for part in node.values:
            value = self.value(part.value) if isinstance(part, ast.FormattedValue) else part.value
            plain = isinstance(part, ast.Constant) or (part.conversion == -1 and part.format_spec is None)
            if not plain or not isinstance(value, str | int | float) or isinstance(value, Name):
                return _NOT_COMPUTED
            parts.append(str(value))
        return "".join(parts)


# --- arithmetic ------------------------------------------------------------------------------------------------------


def _computed(operation: Callable[..., Any] | None, *operands: Any) -> Any:
    if operation is None or any(isinstance(operand, Unknown | Name) for operand in operands):
        return _NOT_COMPUTED
    numbers = all(isinstance(operand, int | float) for operand in operands)
    texts = operation is operator.add and (_all(operands, str) or _all(operands, list))
    if operation is operator.not_ or (numbers and _small(operation, *operands)):
        pass
    elif not texts or sum(map(len, operands)) > LONGEST:
        return _NOT_COMPUTED
    try:
        return operation(*operands)
    except (ArithmeticError, ValueError, TypeError):
        return _NOT_COMPUTED


def _all(operands: Iterable[Any], kind: type) -> bool:
    return all(isinstance(operand, kind) for operand in operands)


def _small(operation: Callable[..., Any], *operands: Any) -> bool:
    whole = [operand for operand in operands if isinstance(operand, int)]
    if any(operand.bit_length() > MOST_BITS for operand in whole):
        return False
    return operation is not operator.pow or abs(operands[1]) <= MOST_POWER


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}
_COMPARED: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_VALUES: dict[type, Callable[[Scope, Any], Any]] = {
    ast.Constant: Scope._constant,
    ast.Name: Scope._name,
    ast.Attribute: Scope._attribute,
    ast.Subscript: Scope._subscript,
    ast.List: Scope._list,
    ast.Tuple: Scope._list,
    ast.Dict: Scope._dict,
    ast.Call: Scope._call,
    ast.UnaryOp: Scope._unary,
    ast.BinOp: Scope._binary,
    ast.Compare: Scope._compare,
    ast.IfExp: Scope._either,
    ast.BoolOp: Scope._both,
    ast.JoinedStr: Scope._text,
}
