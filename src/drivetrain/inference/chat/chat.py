"""The chat: reads messages and commands, asks the models, prints their replies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from drivetrain.data.language.conversations import Message
from drivetrain.errors import UserError, last_line
from drivetrain.generation.replies import Call, Part
from drivetrain.inference.chat.commands import COMMANDS
from drivetrain.inference.chat.functions import STOPPED
from drivetrain.inference.chat.replies import Replies
from drivetrain.inference.chat.screen import MarkdownScreen, PlainScreen, Screen, SideBySide, visible, without_echo
from drivetrain.inference.chat.talk import Settings, Talk

if TYPE_CHECKING:
    from drivetrain.inference.loading import LoadedModel

MOST_ROUNDS = 8  # of calls that follow each other before the user is asked again

ReadLine = Callable[[], str]  # raises EOFError at the end, KeyboardInterrupt for Ctrl-C, UserError for no text


@dataclass
class Chat:
    """A chat with one model or with two. load: loads another model by its place, for /compare; notes: where what is no
    reply is printed."""

    models: list[LoadedModel]
    settings: Settings
    load: Callable[[str], LoadedModel]
    console: Console
    notes: Console
    talks: list[Talk] = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begins anew with all models. Raises UserError where one cannot heed the settings."""
        self.talks = self._talks(self.models)

    def _talks(self, models: list[LoadedModel]) -> list[Talk]:
        """Offers functions to a model alone: two models that are compared would each run them."""
        talks = [Talk(model, self.settings, offers=len(models) == 1) for model in models]
        for talk in talks:
            talk.check()
        if len(models) > 1 and self.settings.functions:
            self.note("functions are not offered while two models are compared")
        return talks

    def compare(self, place: str) -> None:
        """Loads another model beside the first, in place of an earlier one, and begins anew. Raises UserError."""
        other = self.load(place)
        try:
            talks = self._talks([self.models[0], other])
        except UserError:
            other.close()
            raise
        for model in self.models[1:]:
            model.close()
        self.models, self.talks = [self.models[0], other], talks

    def note(self, text: str) -> None:
        self.notes.print(f"[dim]{escape(visible(text))}[/]", soft_wrap=True)

    def run(self, read_line: ReadLine) -> bool:
        """Reads and answers until the end of the input or /quit. Returns whether every message was answered."""
        answered = True
        try:
            while True:
                try:
                    line = read_line()
                except EOFError:
                    return answered
                except KeyboardInterrupt:
                    self.note("Ctrl-D or /quit ends the chat")
                    continue
                except UserError as error:  # what was read is no message
                    self._report(error)
                    answered = False
                    continue
                if line.strip() == "/quit":
                    return answered
                answered = self._handle(line) and answered
        finally:
            for model in self.models:
                model.close()

    def _handle(self, line: str) -> bool:
        word, _, rest = line.strip().partition(" ")
        try:
            if not word:
                return True
            if word.startswith("/") and not word.startswith("//"):
                self._command(word, rest.strip())
                return True
            return self.say(line[1:] if word.startswith("//") else line)
        except KeyboardInterrupt:
            self.note("stopped")
            return False
        except UserError as error:
            self._report(error)
            return False

    def _report(self, error: UserError) -> None:
        for each in error.problems:
            self.notes.print(f"[red]{escape(str(each))}[/]", soft_wrap=True)

    def _command(self, word: str, rest: str) -> None:
        command = COMMANDS.get(word)
        if command is None:
            self.note(f"there is no command {word}: /help lists them; // begins a message with /")
        else:
            command.run(self, rest)

    # --- replies ------------------------------------------------------------------------------------------------------

    def say(self, text: str) -> bool:
        """Sends a message to all models and prints their replies. Returns False where one could not be made. Raises
        UserError where a model refuses it, or the results of its functions; all from the message on is taken back
        then."""
        begun = [len(talk.messages) for talk in self.talks]
        for talk in self.talks:
            talk.messages.append(Message("user", text))
        for _ in range(MOST_ROUNDS):
            try:
                replies = Replies([(talk.model.generator, talk.request()) for talk in self.talks])
            except (UserError, KeyboardInterrupt):
                for talk, length in zip(self.talks, begun, strict=True):
                    talk.undo(length)
                raise
            complete, waiting = self._receive(replies)
            if not complete or not waiting:
                return complete
        self.note(f"the model called functions {MOST_ROUNDS} times in a row: your turn")
        return True

    def _receive(self, replies: Replies) -> tuple[bool, bool]:
        """Prints replies until they end, or Ctrl-C ends them. Returns whether all are complete, and whether the results
        of functions wait to be read. A reply that was cut short calls no function."""
        readers = [talk.reader() for talk in self.talks]
        texts, calls = ["" for _ in self.talks], [list[Call]() for _ in self.talks]
        complete = True

        def show(place: int, parts: list[Part]) -> None:
            for part in parts:
                texts[place] += part.text
                calls[place] += [part.call] if part.call else []
                screen.add(place, part.text, part.thought)

        with closing(_Cancelled(replies)), without_echo(), self._screen() as screen:
            try:
                for step in replies.steps():
                    show(step.place, readers[step.place].feed(step.text))
                    if step.error is not None:
                        complete = False
                        self.note(f"the model failed: {last_line(step.error)}")
            except KeyboardInterrupt:
                complete = False
            for place, reader in enumerate(readers):
                show(place, reader.end())
        if not complete:
            self.note("stopped")
        results = [
            talk.replied(texts[place], calls[place] if complete else []) for place, talk in enumerate(self.talks)
        ]
        for call, result in (each for found in results for each in found):
            self.note(f"{call.name}({call.arguments}) = {result}")
            complete = complete and result != STOPPED
        return complete, any(results)

    def _screen(self) -> Screen:
        names = [model.name for model in self.models]
        if not self.console.is_terminal:
            return PlainScreen(self.console, names)
        return MarkdownScreen(self.console) if len(names) == 1 else SideBySide(self.console, names)

    def save(self, place: str) -> None:
        """Writes the conversation with the first model. Raises UserError."""
        self.talks[0].save(Path(place))


class _Cancelled:
    """Replies that end with the block that reads them."""

    def __init__(self, replies: Replies) -> None:
        self.close = replies.cancel
