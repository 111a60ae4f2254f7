"""The commands of a chat: lines that begin with /."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drivetrain.errors import UserError, problem

if TYPE_CHECKING:
    from drivetrain.inference.chat.chat import Chat


@dataclass(frozen=True)
class Command:
    takes: str
    about: str
    run: Callable[[Chat, str], None]


def _help(chat: Chat, _: str) -> None:
    for name, command in COMMANDS.items():
        chat.note(f"{name} {command.takes}".ljust(22) + command.about)
    chat.note("Enter sends, Esc Enter or Ctrl-J begins a new line. Ctrl-C stops an answer, Ctrl-D ends the chat.")


def _system(chat: Chat, text: str) -> None:
    before, chat.settings.system = chat.settings.system, text or None
    try:
        chat.reset()
    except UserError:
        chat.settings.system = before
        raise
    chat.note("system message set; the conversation begins anew" if text else "no system message any more")


def _reset(chat: Chat, _: str) -> None:
    chat.reset()
    chat.note("the conversation begins anew")


def _save(chat: Chat, file: str) -> None:
    if not file:
        raise problem("/save", "it has no file", "write /save talk.jsonl")
    chat.save(file)
    chat.note(f"{len(chat.talks[0].messages)} messages in {file}, a row that drivetrain train reads")


def _temperature(chat: Chat, text: str) -> None:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise problem("/temperature", f"{text!r} was given", "write a number from 0 (the likeliest word) to 2")
    chat.settings.temperature = value
    chat.note(f"temperature {value:g}")


def _compare(chat: Chat, place: str) -> None:
    if not place:
        raise problem("/compare", "it has no model", "write /compare FOLDER")
    chat.compare(place)
    chat.note(f"{chat.models[0].name} beside {chat.models[1].name}; the conversation begins anew")


def _quit(_: Chat, __: str) -> None:
    """Is handled where lines are read."""


COMMANDS = {
    "/help": Command("", "this list", _help),
    "/system": Command("TEXT", "a message that precedes all; without TEXT, none", _system),
    "/reset": Command("", "forget the conversation", _reset),
    "/save": Command("FILE", "write the conversation as a row of data", _save),
    "/temperature": Command("NUMBER", "0 takes the likeliest word, 1 draws by the model's own odds", _temperature),
    "/compare": Command("MODEL", "two models side by side, asked the same", _compare),
    "/quit": Command("", "end", _quit),
}
