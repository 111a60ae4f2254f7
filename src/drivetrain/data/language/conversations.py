"""A conversation as every format becomes it, in the words of OpenAI's messages and of Transformers' chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class Message:
    """tool_calls: {"type": "function", "function": {"name": ..., "arguments": {...}}} each, of an assistant;
    with an "id" where the data have one."""

    role: Role
    content: str
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    trained: bool = True  # of an assistant's message: whether its tokens may be targets (OpenAI's weight, 0 or 1)
    tool_call_id: str | None = None  # of a tool's message: which call it answers

    def as_template(self) -> dict[str, Any]:
        """What a chat template takes."""
        calls = {"tool_calls": list(self.tool_calls)} if self.tool_calls else {}
        answers = {} if self.tool_call_id is None else {"tool_call_id": self.tool_call_id}
        return {"role": self.role, "content": self.content, **calls, **answers}


@dataclass(frozen=True)
class Conversation:
    """tools: {"type": "function", "function": its JSON schema} each. where: file and row, for errors."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    where: str = field(default="", compare=False)
