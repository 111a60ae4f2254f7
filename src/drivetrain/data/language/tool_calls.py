"""Converts tools and calls of them, as JSON text or as objects, to the form that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from drivetrain.data.language.row_schema import RowError, kind

Call = dict[str, Any]


def read_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Returns {"type": "function", "function": {...}} each; bare functions are wrapped. None and empty: no tools."""
    given = _parsed(value, "tools") or []
    if not isinstance(given, list):
        raise RowError(f"tools is {kind(given)}, not a list")
    return tuple(_tool(tool, number) for number, tool in enumerate(given, start=1))


def _tool(tool: Any, number: int) -> Mapping[str, Any]:
    if not isinstance(tool, dict):
        raise RowError(f"tool {number} is {kind(tool)}, not an object")
    if "function" not in tool:
        tool = {"type": "function", "function": tool}
    function = tool["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(f"tool {number} has no name")
    return {"type": "function", **tool}


def read_function_call(value: Any, what: str) -> tuple[Call, ...]:
    """Reads sharegpt's calls: one {"name", "arguments"} or a list of them, usually as JSON text."""
    given = _parsed(value, what)
    calls = given if isinstance(given, list) else [given]
    if not given:
        raise RowError(f"{what} holds no call")
    return tuple(_call(call, what) for call in calls)


def read_tool_calls(value: Any, what: str) -> tuple[Call, ...]:
    """Reads OpenAI's tool_calls: {"type": "function", "function": {"name", "arguments"}} each, with their ids."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RowError(f"tool_calls of {what} is {kind(value)}, not a list")
    return tuple(_tool_call(call, what) for call in value)


def _tool_call(call: Any, what: str) -> Call:
    if not isinstance(call, dict):
        return _call(call, what)
    named = {"id": call["id"]} if isinstance(call.get("id"), str) and call["id"] else {}
    return {**named, **_call(call.get("function") or call, what)}


def _call(call: Any, what: str) -> Call:
    if not isinstance(call, dict):
        raise RowError(f"{what} calls {kind(call)}, not an object with name and arguments")
    name = call.get("name")
    if not isinstance(name, str) or not name:
        raise RowError(f"a call of {what} has no name")
    arguments = _parsed(call.get("arguments"), f"arguments of {name} in {what}")
    arguments = {} if arguments in (None, []) else arguments  # [] is an empty map of Arrow's
    if not isinstance(arguments, dict):
        raise RowError(f"arguments of {name} in {what} is {kind(arguments)}, not an object")
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _parsed(value: Any, what: str) -> Any:
    """Parses a JSON text; an empty text is None. Other values are unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (RecursionError, ValueError) as error:
        reason = f"{error.msg} (character {error.pos + 1})" if isinstance(error, json.JSONDecodeError) else str(error)
        raise RowError(f"{what} is broken JSON: {reason}") from None
