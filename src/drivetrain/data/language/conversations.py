"""A conversation that every format is read as, with the keys of OpenAI's messages and of Transformers' chat
templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class Message:
    """A message. tool_calls: {"type": "function", "function": {"name": ..., "arguments": {...}}} each, of an assistant;
    with an "id" where the data have one."""

    role: Role
    content: str
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    trained: bool = True  # of an assistant's message: whether its tokens may be targets (OpenAI's weight, 0 or 1)
    tool_call_id: str | None = None  # of a tool's message: which call it answers
    name: str | None = None  # who speaks, or which tool
    reasoning_content: str | None = None  # of an assistant: what it thinks before it answers

    def as_template(self) -> dict[str, Any]:
        """Returns the message in the form that a chat template takes."""
        calls = {"tool_calls": list(self.tool_calls)} if self.tool_calls else {}
        others = {key: getattr(self, key) for key in ("tool_call_id", "name", "reasoning_content")}
        given = {key: value for key, value in others.items() if value is not None}
        return {"role": self.role, "content": self.content, **calls, **given}


@dataclass(frozen=True)
class Conversation:
    """A conversation. tools: {"type": "function", "function": its JSON schema} each. where: file and row, for
    errors.

    rejected: of a pair of preferences the other side: the same messages up to the answer, then one that is worse.
    desirable: of an answer that is labelled by itself, whether it is to be learned or avoided.
    margin: of a pair, by how much the chosen answer is better.
    steps: of an answer that is marked step by step, each step's text and whether it is right; the last message has all.
    columns: of a prompt that is answered in training, the row's values but its messages, by name.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    where: str = field(default="", compare=False)
    rejected: tuple[Message, ...] = ()
    desirable: bool | None = None
    margin: float = 0.0
    steps: tuple[tuple[str, bool], ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sides(self) -> tuple[Conversation, Conversation]:
        """Returns the two conversations of a pair: with the chosen answer, and with the rejected one."""
        own = replace(self, rejected=(), margin=0.0)
        return own, replace(own, messages=self.rejected)
