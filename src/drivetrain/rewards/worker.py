"""The process that computes one reward: `python -m drivetrain.rewards.worker`.

It reads a JSON object a line and answers each with one. The first names the function; the others are calls. What the
function prints goes to stderr. It ends when its parent does.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drivetrain.errors import UserError, problem
from drivetrain.rewards import verifiers
from drivetrain.rewards.isolated import Limits, NotIsolated, check_isolation
from drivetrain.runtime.signals import end_with_parent
from drivetrain.trust.import_path import import_object

GIVEN = ("prompts", "completions", "references", "completion_ids")
OURS = str(Path(verifiers.__file__).parents[1])


def main() -> None:
    calls, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the function prints is no answer
    end_with_parent(os.getppid())
    call: Callable[[dict[str, Any]], Any] | None = None
    for line in calls:
        try:
            if call is None:
                call = _loaded(json.loads(line))
                found: dict[str, Any] = {"ready": True}
            else:
                found = {"values": _values(call(json.loads(line)))}
        except UserError as error:
            found = {"problem": [error.problems[0].why, error.problems[0].fix]}
        except Exception as error:  # the user's own code
            found = {"error": f"{type(error).__name__}: {_text(str, error)}{_place(error)}"}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def _loaded(settings: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """Returns the reward as a function of what is given. Raises UserError if it cannot be called so."""
    path, field = settings["path"], settings["field"]
    function = import_object(path, field) if ":" in path or "." in path else getattr(verifiers, path)
    options = settings["options"]
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {each.name for each in parameters if each.kind in by_name}
    columns = [each for each in settings["columns"] if each not in (*GIVEN, *options)]
    given = [name for name in (*GIVEN, *columns) if takes_all or name in names]
    try:
        inspect.signature(function).bind(**dict.fromkeys(given), **options)
    except TypeError as error:
        listed = ", ".join([*given, *options]) or "none of the lists that a reward gets"
        fix = "give what is missing in its options"
        if function.__module__ != verifiers.__name__:
            known = ", ".join([*GIVEN, *columns])
            fix += f", and name its lists as they are called: {known} (with **others it gets all)"
        raise problem(field, f"{path} cannot be called with {listed}: {error}", fix) from None

    if function is verifiers.code:
        _check_isolation(options, field)

    def call(arguments: dict[str, Any]) -> Any:
        count, row = len(arguments["completions"]), arguments["columns"]
        lists = {name: arguments[name] if name in GIVEN else [row.get(name)] * count for name in given}
        found = function(**lists, **options)
        return asyncio.run(found) if inspect.iscoroutine(found) else found

    return call


def _place(error: Exception) -> str:
    """Returns the file and line of the user's own code at which an error came up; empty where it came from no such
    code. Errors of installed packages have the line that called them."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    own = [
        each
        for each in traceback.extract_tb(error.__traceback__)
        if not each.filename.startswith((*installed, OURS, "<")) and os.path.isabs(each.filename)
    ]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _check_isolation(options: dict[str, Any], field: str) -> None:
    own = {name: value for name, value in options.items() if name != "tests"}
    try:
        check_isolation(Limits(**own))
    except NotIsolated as error:
        why = f"code that a model writes cannot be isolated here: {error}"
        raise problem(field, why, "install what is missing, allow larger limits, or use another reward") from None


def _values(found: Any) -> list[tuple[float | None, str | None]]:
    """Returns each value, and the reason why it is None though the function meant something else. Arrays and tensors
    have a method that makes numbers of them."""
    listed = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(listed, list | tuple):
        raise TypeError(f"it returned {type(found).__name__}, not a list of numbers")
    return [_checked(each.item() if hasattr(each, "item") else each) for each in listed]


def _checked(value: Any) -> tuple[float | None, str | None]:
    if value is None:
        return None, None
    if isinstance(value, int | float):
        number = _float(value)
        if number is None:
            return None, "it returned an integer that is larger than any float"
        if math.isfinite(number):
            return number, None
    return None, f"it returned {_text(repr, value):.60}, no finite number"


def _float(value: float) -> float | None:
    try:
        return float(value)
    except OverflowError:
        return None


def _text(words: Callable[[Any], str], value: Any) -> str:
    """Returns the text that a user's own object has for itself, which may fail too."""
    try:
        return words(value)
    except Exception:
        return f"a {type(value).__name__}"


if __name__ == "__main__":
    main()
