"""Reads a configuration written in Python, without running any of it.

Names that are assigned constants, dict(...), lists, earlier names and arithmetic of them get their values. Imported
objects stay names. Any other expression is not computed: it becomes `Unknown`, and is reported.

Running the file would be shorter, but imports XTuner and mmengine, which are rarely installed where a file is imported,
and a foreign file's code. `ast.literal_eval` reads no names, and such files give their values names first.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.config.files import MOST_YAML_BYTES, read_text
from drivetrain.errors import problem
from drivetrain.importing.python_values import Name, Scope, Unknown, clipped
from drivetrain.runtime.atomic_file import followed

MOST_BASES = 20
SKIPPED = "statements not run"  # among the values: where → what stands there
READ_BY = "names read by"  # among the values: name → names whose values it is part of


def read_python(path: Path) -> dict[str, Any]:
    """Returns top-level names and their values, in order, with SKIPPED and READ_BY. Raises UserError if it is no Python
    file."""
    reader = _Reader([followed(path)])
    reader.read(path)
    read_by = {name: sorted(by) for name, by in reader.scope.read_by.items()}
    return {**reader.scope.values, SKIPPED: reader.skipped, READ_BY: read_by}


@dataclass
class _Reader:
    under_way: list[Path]  # bases that are being read: none may come back to itself
    scope: Scope = field(default_factory=Scope)
    skipped: dict[str, str] = field(default_factory=dict)

    def read(self, path: Path) -> None:
        self.folder = path.parent
        try:
            for statement in _parsed(path).body:
                self._run(statement)
        except RecursionError:
            raise problem(str(path), "is nested too deeply", "write it plainly") from None
        bases = self.scope.values.pop("_base_", None)
        if bases is not None:
            self.scope.values = _merged(self._of_files(bases), self.scope.values)

    # --- statements ---

    def _run(self, node: ast.stmt) -> None:
        handler = _STATEMENTS.get(type(node))
        if handler is None or not handler(self, node):
            self._skip(node)

    def _skip(self, node: ast.stmt) -> None:
        """Skips a statement: the names that it would set are unknown from here on."""
        text = clipped(ast.unparse(node).splitlines()[0])
        self.skipped[f"line {node.lineno}"] = text
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return  # what it assigns stays within
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                self.scope.values[part.id] = Unknown(text)

    def _import(self, node: Any) -> bool:
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module else ""
        for alias in node.names:
            whole = module + alias.name if alias.asname or module else alias.name.split(".")[0]
            self.scope.imported[alias.asname or alias.name.split(".")[0]] = Name(whole)
        return True

    def _definition(self, node: Any) -> bool:
        self.scope.imported[node.name] = Name(node.name)
        return False

    def _expression(self, node: Any) -> bool:
        """Reads a docstring, or a list or dict that grows; returns whether it could."""
        if isinstance(node.value, ast.Constant):
            return True
        call = node.value
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            return False
        root = call.func.value.id if isinstance(call.func.value, ast.Name) else ""
        self.scope.target = root
        owner, given = self.scope.value(call.func.value), [self.scope.value(argument) for argument in call.args]
        if call.func.attr == "update" and isinstance(owner, dict):
            parts = [part for part in given if isinstance(part, dict)]
            if len(parts) == len(given):
                owner.update(*parts, **self.scope.keywords(call.keywords))
                return True
        if call.func.attr in ("append", "extend") and isinstance(owner, list) and len(given) == 1 and not call.keywords:
            added = [given[0]] if call.func.attr == "append" else given[0]
            if isinstance(added, list):
                owner.extend(added)
                return True
        return False

    def _assign(self, node: Any) -> bool:
        if isinstance(node, ast.AnnAssign) and node.value is None:
            return True
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        self.scope.target = next((part.id for part in ast.walk(targets[0]) if isinstance(part, ast.Name)), "")
        value = self.scope.value(node.value)
        return all([self._bind(target, value) for target in targets])

    def _bind(self, target: ast.expr, value: Any) -> bool:
        if isinstance(target, ast.Name):
            self.scope.values[target.id] = value
            self.scope.imported.pop(target.id, None)
            return True
        if isinstance(target, ast.Tuple | ast.List):
            parts = value if isinstance(value, list) and len(value) == len(target.elts) else None
            return parts is not None and all([self._bind(*pair) for pair in zip(target.elts, parts, strict=True)])
        if isinstance(target, ast.Attribute | ast.Subscript):
            owner = self.scope.value(target.value)
            key = target.attr if isinstance(target, ast.Attribute) else self.scope.value(target.slice)
            if isinstance(owner, dict) and isinstance(key, str):
                owner[key] = value
                return True
            if isinstance(owner, list) and isinstance(key, int) and -len(owner) <= key < len(owner):
                owner[key] = value
                return True
        return False

    def _augment(self, node: Any) -> bool:
        if not isinstance(node.target, ast.Name):
            return False
        self.scope.target = node.target.id
        old = ast.copy_location(ast.Name(node.target.id, ast.Load()), node)
        self.scope.values[node.target.id] = self.scope.value(
            ast.copy_location(ast.BinOp(old, node.op, node.value), node)
        )
        return True

    def _if(self, node: Any) -> bool:
        test = self.scope.value(node.test)
        if isinstance(test, Unknown | Name):
            return False
        for statement in node.body if test else node.orelse:
            self._run(statement)
        return True

    def _with(self, node: Any) -> bool:
        """Reads other configurations for `with read_base():`; returns False for any other block, which is skipped."""
        opened = [ast.unparse(item.context_expr) for item in node.items]
        if opened != ["read_base()"] or not all(isinstance(part, ast.ImportFrom) for part in node.body):
            return False
        for part in node.body:
            self._read_base(part)
        return True

    def _delete(self, node: Any) -> bool:
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        for name in names:
            self.scope.values.pop(name, None)
        return len(names) == len(node.targets)

    def _pass(self, node: Any) -> bool:  # noqa: ARG002 - of a table
        return True

    # --- bases ---

    def _read_base(self, node: Any) -> None:
        module = "." * node.level + (node.module or "")
        if not node.level:
            why = f"{module} is part of an installed package, which is not looked into"
            raise problem(str(self.under_way[-1]), why, "copy that file here and import it as .its_name")
        folder = self.folder
        for _ in range(node.level - 1):
            folder = folder.parent
        base = self._base(folder.joinpath(*(node.module or "").split(".")).with_suffix(".py"))
        for alias in node.names:
            names = (
                base.scope.values
                if alias.name == "*"
                else {alias.name: base.scope.values.get(alias.name, Unknown(alias.name))}
            )
            self.scope.values |= {alias.asname or name: value for name, value in names.items()}
        self.scope.imported |= base.scope.imported

    def _of_files(self, bases: Any) -> dict[str, Any]:
        """Reads the files of `_base_ = "../base.py"`, or several."""
        names = bases if isinstance(bases, list) else [bases]
        values: dict[str, Any] = {}
        for name in names:
            if not isinstance(name, str) or not name.endswith(".py") or ":" in name:
                raise problem(str(self.under_way[-1]), f"_base_ is {name}", "give the path of a .py file")
            base = self._base(self.folder / name)
            values = _merged(values, base.scope.values)
        return values

    def _base(self, path: Path) -> _Reader:
        resolved = followed(path)
        if resolved in self.under_way or len(self.under_way) > MOST_BASES:
            raise problem(str(path), "takes in itself", "take the base out")
        base = _Reader([*self.under_way, resolved])
        base.read(path)
        for line, text in base.skipped.items():
            self.skipped[f"{path.name}, {line}"] = text
        for name, readers in base.scope.read_by.items():
            self.scope.read_by.setdefault(name, set()).update(readers)
        return base


def _parsed(path: Path) -> ast.Module:
    text = read_text(path, MOST_YAML_BYTES)
    try:
        with warnings.catch_warnings(action="ignore"):  # a stray backslash in someone's text
            return ast.parse(text)
    except SyntaxError as error:
        why = f"broken Python at line {error.lineno}: {error.msg}"
        raise problem(str(path), why, "correct the line and try again") from None
    except (ValueError, MemoryError, RecursionError) as error:
        raise problem(str(path), f"broken Python: {error}", "correct the file and try again") from None


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Applies `_base_`: a mapping is changed key by key, unless it has _delete_."""
    merged = dict(base)
    for name, value in own.items():
        below = merged.get(name)
        if isinstance(value, dict) and isinstance(below, dict) and not value.get("_delete_"):
            merged[name] = _merged(below, value)
        elif isinstance(value, dict):
            merged[name] = {key: part for key, part in value.items() if key != "_delete_"}
        else:
            merged[name] = value
    return merged


_STATEMENTS: dict[type, Callable[[_Reader, Any], bool]] = {
    ast.Import: _Reader._import,
    ast.ImportFrom: _Reader._import,
    ast.FunctionDef: _Reader._definition,
    ast.AsyncFunctionDef: _Reader._definition,
    ast.ClassDef: _Reader._definition,
    ast.Expr: _Reader._expression,
    ast.Assign: _Reader._assign,
    ast.AnnAssign: _Reader._assign,
    ast.AugAssign: _Reader._augment,
    ast.If: _Reader._if,
    ast.With: _Reader._with,
    ast.Delete: _Reader._delete,
    ast.Pass: _Reader._pass,
}
