"""A conversation with one model: what was written so far, and what follows from a reply."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.data.language.conversations import Message
from drivetrain.errors import problem
from drivetrain.generation.replies import THINK, Call, Form, ReplyReader, form_of
from drivetrain.generation.requests import Request, Sampling
from drivetrain.inference.chat.functions import Function, result_of
from drivetrain.runtime.atomic_file import write_whole

if TYPE_CHECKING:
    from drivetrain.inference.loading import LoadedModel


@dataclass
class Settings:
    """Settings of a user for all models of a chat. temperature: None for each model's own; seed: None for another one
    with each reply."""

    system: str | None = None
    temperature: float | None = None
    seed: int | None = None
    most_tokens: int = 1024
    functions: list[Function] = field(default_factory=list)


class Talk:
    """A conversation with a model. Without a chat template the model continues each text, and remembers none."""

    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.messages: list[Message] = []
        self._thinking = False

    @cached_property
    def form(self) -> Form | None:
        """How the model writes calls of functions; None without functions, and where the template has no place."""
        template = self.model.template
        return form_of(template.text) if template is not None and self.settings.functions else None

    def request(self) -> Request:
        """Returns the request for the next reply. Raises UserError where the template refuses the conversation."""
        ids = self._ids()
        settings, own = self.settings, self.model.sampling
        heat = own.temperature if settings.temperature is None else settings.temperature
        seed = secrets.randbits(62) if settings.seed is None else settings.seed
        sampling: Sampling = replace(own, temperature=heat, seed=seed, draw=len(self.messages))
        room = settings.most_tokens
        if self.model.context_length is not None:
            room = max(1, min(room, self.model.context_length - len(ids)))
        return Request(tuple(ids), room, sampling, skip_special_tokens=self.form is None)

    def _ids(self) -> Sequence[int]:
        if self.model.template is None:
            return self.model.text_ids(self.messages[-1].content)
        system = [] if self.settings.system is None else [Message("system", self.settings.system)]
        tools = [] if self.form is None else [function.tool for function in self.settings.functions]
        try:
            ids = self.model.chat_ids([*system, *self.messages], tools)
        except Exception as error:  # templates raise what they like
            why = f"the chat template of {self.model.name} refuses the conversation: {error}"
            raise problem("message", why, "/reset begins anew") from None
        self._thinking = self.model.tokenizer.decode(list(ids[-8:])).rstrip().endswith(THINK)
        return ids

    def reader(self) -> ReplyReader:
        """Returns what reads the reply to the request that was made last."""
        return ReplyReader(self.form, self._thinking)

    def replied(self, text: str, calls: Sequence[Call]) -> list[tuple[Call, str]]:
        """Keeps a reply, runs the functions that it calls, and returns their results: the model reads them next."""
        functions = [{"name": call.name, "arguments": _object(call.arguments)} for call in calls]
        made = [{"type": "function", "function": function} for function in functions]
        self.messages.append(Message("assistant", text, tuple(made)))
        results = [(call, result_of(call, self.settings.functions)) for call in calls]
        self.messages += [Message("tool", result, name=call.name) for call, result in results]
        return results

    def undo(self) -> None:
        """Takes back the last message, which could not be answered."""
        self.messages.pop()

    def save(self, file: Path) -> None:
        """Writes the conversation as a line of OpenAI's format, which `drivetrain train` reads as data. Raises
        UserError where the file cannot be written."""
        system = [] if self.settings.system is None else [Message("system", self.settings.system)]
        row = {"messages": [message.as_template() for message in [*system, *self.messages]]}
        try:
            write_whole(file, json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            raise problem("/save", f"{file}: {error.strerror}", "give a file that can be written") from None


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
