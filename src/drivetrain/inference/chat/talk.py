"""A conversation with one model: what was written so far, and what follows from a reply."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.data.language.conversations import Message
from drivetrain.errors import Problem, UserError, problem
from drivetrain.generation.replies import THINK, Call, Form, ReplyReader, form_of
from drivetrain.generation.requests import Request, Sampling
from drivetrain.inference.chat.functions import FIELD, STOPPED, Function, result_of
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
    """A conversation with a model. Without a chat template the model continues each text, and remembers none. offers:
    whether the model may call the functions of the settings."""

    def __init__(self, model: LoadedModel, settings: Settings, offers: bool = True) -> None:
        self.model, self.settings = model, settings
        self._functions = settings.functions if offers else []
        self.messages: list[Message] = []
        self._thinking = False

    @cached_property
    def form(self) -> Form | None:
        """How the model writes calls of functions; None without functions, and where the template has no place."""
        template = self.model.template
        return form_of(template.text) if template is not None and self._functions else None

    def check(self) -> None:
        """Raises UserError where the model's template has no place for the functions or the system message."""
        name, system = self.model.name, self.settings.system
        problems = []
        if self._functions and self.form is None:
            why = f"{name} has no chat template with a place for functions"
            problems.append(Problem(FIELD, why, "leave them out, or give a model that was trained to call functions"))
        if system and not self._heeds(system):
            why = f"{name} has no chat template with a place for a system message"
            problems.append(Problem("system message", why, "leave it out, or write it into the first message"))
        if problems:
            raise UserError(problems)

    def _heeds(self, system: str) -> bool:
        if self.model.template is None:
            return False
        asks = Message("user", "a")
        try:
            alone, both = (self.model.chat_ids(each) for each in ([asks], [Message("system", system), asks]))
        except Exception:  # the reason is reported with the first message, as for any conversation
            return True
        return alone != both

    def request(self) -> Request:
        """Returns the request for the next reply. Raises UserError where the template refuses the conversation, or the
        context has no room for it."""
        ids = self._fitting_ids()
        self._check_room(len(ids))
        settings, own = self.settings, self.model.sampling
        heat = own.temperature if settings.temperature is None else settings.temperature
        seed = secrets.randbits(62) if settings.seed is None else settings.seed
        sampling: Sampling = replace(own, temperature=heat, seed=seed, draw=len(self.messages))
        room = settings.most_tokens
        if self.model.context_length is not None:
            room = max(1, min(room, self.model.context_length - len(ids)))
        return Request(tuple(ids), room, sampling, skip_special_tokens=self.form is None)

    def _fitting_ids(self) -> Sequence[int]:
        """Returns the prompt. Where it has no room in the context, results of functions at its end are replaced by a
        line that reports their lengths: the model, and the conversation, can go on."""
        ids, longest = self._ids(self.messages), self.model.context_length
        place = len(self.messages) - 1
        while longest is not None and len(ids) >= longest and self.messages[place].role == "tool":
            long = self.messages[place]
            why = f"error: the result has {len(long.content):,} characters, for which the context has no room"
            self.messages[place] = replace(long, content=why)
            ids, place = self._ids(self.messages), place - 1
        return ids

    def _check_room(self, tokens: int) -> None:
        """Raises UserError where the context has no room for the conversation, but for its last message alone; one that
        is too long by itself is refused by the generator. tokens: of the conversation."""
        longest = self.model.context_length
        if longest is None or tokens < longest:
            return
        last = max(place for place, message in enumerate(self.messages) if message.role == "user")
        if last and self.model.template is not None and len(self._ids(self.messages[last:])) < longest:
            why = f"with it the conversation has {tokens:,} tokens, which fill the model's context of {longest:,}"
            raise problem("message", why, "/reset begins anew")

    def _ids(self, messages: Sequence[Message]) -> Sequence[int]:
        if self.model.template is None:
            return self.model.text_ids(messages[-1].content)
        system = [] if self.settings.system is None else [Message("system", self.settings.system)]
        tools = [] if self.form is None else [function.tool for function in self._functions]
        try:
            ids = self.model.chat_ids([*system, *messages], tools)
        except Exception as error:  # templates raise what they like
            why = f"the chat template of {self.model.name} refuses the conversation: {error}"
            raise problem("message", why, "/reset begins anew") from None
        self._thinking = self.model.tokenizer.decode(list(ids[-8:])).rstrip().endswith(THINK)
        return ids

    def reader(self) -> ReplyReader:
        """Returns what reads the reply to the request that was made last."""
        return ReplyReader(self.form, self._thinking)

    def replied(self, text: str, calls: Sequence[Call]) -> list[tuple[Call, str]]:
        """Keeps a reply, runs the functions that it calls, and returns their results: the model reads them next.
        Ctrl-C ends the function that runs; it and those behind it have the result STOPPED."""
        functions = [{"name": call.name, "arguments": _object(call.arguments)} for call in calls]
        made = [{"type": "function", "function": function} for function in functions]
        self.messages.append(Message("assistant", text, tuple(made)))
        results: list[tuple[Call, str]] = []
        try:
            for call in calls:
                results.append((call, result_of(call, self._functions)))
        except KeyboardInterrupt:
            results += [(call, STOPPED) for call in calls[len(results) :]]
        self.messages += [Message("tool", result, name=call.name) for call, result in results]
        return results

    def undo(self, length: int) -> None:
        """Takes back all messages beyond the first `length`: they could not be answered."""
        del self.messages[length:]

    def save(self, file: Path) -> None:
        """Writes the conversation as a line of OpenAI's format, which `drivetrain train` reads as data. Raises
        UserError before the first message, and where the file is there already or cannot be written."""
        if not self.messages:
            raise problem("/save", "there is nothing to save yet", "write a message first")
        if os.path.lexists(file):
            raise problem("/save", f"{file} is there already", "give the name of a new file")
        system = [] if self.settings.system is None else [Message("system", self.settings.system)]
        row = {"messages": [message.as_template() for message in [*system, *self.messages]]}
        try:
            write_whole(file, json.dumps(row, ensure_ascii=False) + "\n")
        except (OSError, ValueError) as error:  # ValueError: a NUL character in its name
            why = getattr(error, "strerror", None) or error
            raise problem("/save", f"{file}: {why}", "give a file that can be written") from None


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
