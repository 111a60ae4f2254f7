"""Functions of a user's Python file that a model may call: their schemas, and their calls."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from drivetrain.errors import Problem, UserError, last_line, problem
from drivetrain.generation.replies import Call
from drivetrain.workloads.user_file import imported

FIELD = "--tools"
STOPPED = "error: the user stopped it"  # the result of a call that Ctrl-C ended


@dataclass(frozen=True)
class Function:
    """A function, and the model of its arguments."""

    name: str
    run: Callable[..., Any]
    arguments: type[BaseModel]

    @property
    def tool(self) -> Mapping[str, Any]:
        """Its description, as chat templates take it: name, docstring and the JSON schema of its arguments."""
        schema = self.arguments.model_json_schema()
        schema.pop("title", None)
        about = {"name": self.name, "description": inspect.getdoc(self.run) or "", "parameters": schema}
        return {"type": "function", "function": about}


def read_functions(file: Path) -> list[Function]:
    """Returns the public functions that a file defines. It runs the file. Raises UserError if the file fails, or has
    none, or a parameter has no type that JSON knows."""
    if not file.is_file():
        raise problem(FIELD, f"there is no file {file}", "give a Python file that defines functions")
    try:
        module = imported(file)
    except Exception as error:  # the user's own code runs here
        raise problem(FIELD, f"{file} fails: {last_line(error)}", "correct it") from error
    own = [value for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
    found, problems = [], []
    for function in own:
        if function.__module__ != module.__name__:
            continue  # imported
        try:
            found.append(Function(function.__name__, function, _arguments(function)))
        except Exception as error:  # pydantic's, for a type without a schema
            why = f"the parameters of {function.__name__} have no JSON schema: {last_line(error)}"
            problems.append(Problem(FIELD, why, "annotate them with str, int, float, bool, list or dict"))
    if problems:
        raise UserError(problems)
    if not found:
        raise problem(FIELD, f"{file} defines no public function", "define one: def weather(town: str) -> str: ...")
    return found


def _arguments(function: Callable[..., Any]) -> type[BaseModel]:
    hints = get_type_hints(function)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"{parameter} cannot be given by its name")
        if name not in hints:
            raise TypeError(f"{name} has no annotation")
        fields[name] = hints[name], ... if parameter.default is parameter.empty else parameter.default
    made = create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
    made.model_json_schema()
    return made


def result_of(call: Call, functions: list[Function]) -> str:
    """Returns the result of a call as text, or why it has none: the model reads either."""
    function = next((each for each in functions if each.name == call.name), None)
    if function is None:
        return f"error: there is no function {call.name}; there are {', '.join(each.name for each in functions)}"
    try:
        given = function.arguments.model_validate_json(call.arguments)
        result = function.run(**{name: getattr(given, name) for name in type(given).model_fields})
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, each['loc'])) or 'arguments'}: {each['msg']}" for each in error.errors()]
        return f"error: {'; '.join(lines)}"
    except Exception as error:  # the user's own code runs here
        return f"error: {last_line(error)}"
