"""Where a chat's messages come from: a terminal, with editing and history, or a pipe, a line each."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from drivetrain.errors import problem
from drivetrain.inference.chat.chat import ReadLine

CONTINUES = b"\\"  # at the end of a piped line: the message goes on


def history_file() -> Path:
    """Returns the file of what was typed: under $XDG_STATE_HOME, or ~/.local/state (XDG Base Directory
    Specification)."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser())
    return state / "drivetrain" / "chat_history"


def terminal_lines(history: Path, commands: Sequence[str]) -> ReadLine:
    """Returns what reads a message at a terminal. history: a file that the own user alone may read."""
    history.parent.mkdir(parents=True, exist_ok=True)
    history.touch(mode=0o600)
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        history=FileHistory(str(history)),
        key_bindings=keys,
        multiline=True,
        prompt_continuation="  ",
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
    )
    return lambda: session.prompt("> ")


def piped_lines(source: IO[bytes] | None = None) -> ReadLine:
    """Returns what reads messages of a pipe. It raises UserError for one that is not UTF-8, and reads the next then."""
    stream = sys.stdin.buffer if source is None else source

    def one() -> bytes:
        line = stream.readline()
        if not line:
            raise EOFError
        return line.rstrip(b"\r\n")

    def message() -> str:
        given = one()
        while given.endswith(CONTINUES):
            given = given[: -len(CONTINUES)]
            try:
                given += b"\n" + one()
            except EOFError:  # the last line ends with the mark: it is a message all the same
                break
        try:
            return given.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            why = f"a message is not UTF-8: {error.reason} at byte {error.start + 1}"
            raise problem("stdin", why, "convert it to UTF-8; it was not answered") from None

    return message
