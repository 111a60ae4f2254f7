"""Conversations as OpenAI's API sends them: messages, functions, and which of these has to be called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from drivetrain.data.language.conversations import Message
from drivetrain.data.language.openai_messages import read_openai
from drivetrain.data.language.row_schema import RowError, RowSchema
from drivetrain.data.language.tool_calls import read_tools
from drivetrain.errors import shown
from drivetrain.inference.serve.served import Served
from drivetrain.web.refusals import Refusal

FORM = RowSchema("openai")
MOST_MESSAGES, MOST_TOOLS = 4096, 256


class ChatMessage(BaseModel):
    """A message. content: a text, or parts of text."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
Tools = Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS, fail_fast=True)] | None
ToolChoice = Literal["none", "auto", "required"] | dict[str, Any] | None


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Returns the messages in the form of chat templates. Raises Refusal (400) for one that is none."""
    try:
        return read_openai({"messages": list(messages)}, FORM)
    except RowError as error:
        raise Refusal(400, str(error), "invalid_message", "messages") from None


def check_texts(served: Served, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises Refusal (400) for texts that are too long for the context whatever they are, and for one that holds a
    control token of the model's, in a message, a call or a function's description: it would end the message there and
    begin another, as another speaker."""
    control = _control_tokens(served.model.tokenizer)
    written: list[tuple[str, str, Any]] = []
    for place, each in enumerate(messages):
        given = (each.content, each.tool_calls, each.tool_call_id, each.name, each.reasoning_content)
        written.append((f"message {place + 1}", f"messages[{place}]", given))
    written += [(f"tool {place + 1}", f"tools[{place}]", tool) for place, tool in enumerate(tools)]
    texts = [(name, field, text) for name, field, value in written for text in _texts_in(value)]
    served.check_length((text for *_, text in texts), "messages")
    for name, field, text in texts:
        token = next((each for each in control if each in text), None)
        if token is not None:
            why = f"{name} has the control token {token}, which only the chat template may write"
            raise Refusal(400, why, "control_token", field)


def _texts_in(value: Any) -> Iterator[str]:
    """Yields all texts in JSON, keys among them."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            left += [*each, *each.values()]
        elif isinstance(each, list | tuple):
            left += each


def _control_tokens(tokenizer: Any) -> list[str]:
    return [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special and str(token).strip()]


def offered(tools: Tools, choice: ToolChoice) -> tuple[tuple[Mapping[str, Any], ...], dict[str, Any] | None]:
    """Returns the functions that the model may call, and the JSON schema that its reply obeys where it has to call.

    Raises Refusal (400) for what is no function.
    """
    other = next((kind for tool in tools or [] if (kind := tool.get("type", "function")) != "function"), None)
    if other is not None:
        raise Refusal(400, f"tools of type {shown(other)} are not supported: functions are", "invalid_tool", "tools")
    try:
        found = read_tools(tools)
    except RowError as error:
        raise Refusal(400, str(error), "invalid_tool", "tools") from None
    odd = next(
        (n for n, tool in enumerate(found, 1) if not isinstance(tool["function"].get("parameters") or {}, dict)), 0
    )
    if odd:
        raise Refusal(400, f"the parameters of tool {odd} are no JSON schema: an object", "invalid_tool", "tools")
    if choice in (None, "auto"):
        return found, None
    if choice == "none":
        return (), None
    wanted = found if choice == "required" else _named(found, choice)
    if not wanted:
        raise Refusal(400, "tool_choice wants a function that tools does not have", "invalid_tool", "tool_choice")
    return found, _schema_of_a_call(wanted)


def _named(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> list[Mapping[str, Any]]:
    given = choice if isinstance(choice, dict) else {}
    function = given.get("function", given)
    name = function.get("name") if isinstance(function, dict) else None
    return [tool for tool in tools if tool["function"]["name"] == name]


def _schema_of_a_call(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the schema of a reply that is a bare call: generation/replies.py reads it in any form."""
    definitions: dict[str, Any] = {}
    calls = []
    for number, tool in enumerate(tools):
        arguments, own = _lifted(tool["function"].get("parameters") or {"type": "object"}, f"{number}.")
        definitions |= own
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool["function"]["name"]}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    whole: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {**whole, "$defs": definitions} if definitions else whole


def _lifted(schema: Mapping[str, Any], prefix: str) -> tuple[Any, dict[str, Any]]:
    """Returns a function's schema for a place within another schema, and the definitions that the other has to hold.

    References begin at the root of a document: `#/$defs/Town` becomes `#/$defs/0.Town` with the prefix "0.", and so do
    those to `definitions`, the older name; `#`, the schema itself, becomes `#/$defs/0.`, and places in it follow.
    """
    held = [name for name in ("$defs", "definitions") if isinstance(schema.get(name), dict)]
    is_recursive = False

    def moved(reference: str) -> str:
        nonlocal is_recursive
        for name in held:
            if reference.startswith(f"#/{name}/"):
                return f"#/$defs/{prefix}{reference.removeprefix(f'#/{name}/')}"
        if reference != "#" and not reference.startswith("#/"):
            return reference
        is_recursive = True
        return f"#/$defs/{prefix}{reference[1:]}"

    def rewritten(node: Any) -> Any:
        if isinstance(node, list):
            return [rewritten(each) for each in node]
        if not isinstance(node, dict):
            return node
        return {
            key: moved(value) if key == "$ref" and isinstance(value, str) else rewritten(value)
            for key, value in node.items()
        }

    own = {f"{prefix}{key}": rewritten(value) for name in held for key, value in schema[name].items()}
    body = rewritten({key: value for key, value in schema.items() if key not in held})
    if is_recursive:
        own[prefix] = body
        return {"$ref": f"#/$defs/{prefix}"}, own
    return body, own


def constraint_of(format_: Any, field: str = "response_format") -> dict[str, Any] | None:
    """Returns the JSON schema that a format asks for. field: its name in the request. Raises Refusal (400)."""
    if format_ is not None and not isinstance(format_, dict):
        raise Refusal(400, f"{field} is an object, and {shown(format_)} was given", "invalid_format", field)
    kind = (format_ or {"type": "text"}).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        assert format_ is not None, "a format of this kind was given"
        inner = format_.get("json_schema", format_)  # the Responses API has its fields one level up
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if isinstance(schema, dict):
            return schema
        raise Refusal(400, "a format of type json_schema needs a schema: an object", "invalid_format", field)
    why = f"{kind!r} was given; known are text, json_object and json_schema"
    raise Refusal(400, f"{field}.type: {why}", "invalid_format", field)


def prompt_ids(served: Served, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the tokens of the prompt. Raises Refusal (400) where the model's template refuses the conversation."""
    if served.model.template is None:
        why = f"{served.name} has no chat template: it continues texts (/v1/completions)"
        raise Refusal(400, why, "no_chat_template", "model")
    if tools and served.form is None:
        raise Refusal(400, "the model's chat template has no place for tools", "no_tools", "tools")
    try:
        return list(served.model.chat_ids(messages, tools))
    except Exception as error:  # templates raise what they like
        why = f"the model's chat template refuses the conversation: {error}"
        raise Refusal(400, why, "template_refused", "messages") from None
