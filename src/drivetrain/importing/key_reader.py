"""Reads the keys of a file, one by one or several together, and records what becomes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from drivetrain.config.translation import Fate, Handler, agree, translated
from drivetrain.errors import Problem, UserError, problem
from drivetrain.importing.translated_file import Default, TranslatedFile, shown

SWITCHES = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0", ""), False),
}
# what a handler of junk raises: it was asked for a number of a text, or for the keys of a number
OF_JUNK = (TypeError, AttributeError, ValueError, ArithmeticError, LookupError)


@dataclass
class KeyReader:
    """Reads keys. prefix: of the keys, with its dot. usual: defaults of this file's class that differ from those of the
    class it extends; they win over the default that a reading function names. A key that is null counts as missing."""

    raw: Mapping[str, Any]
    found: TranslatedFile
    prefix: str = ""
    used: set[str] = field(default_factory=set)
    usual: Mapping[str, Any] = field(default_factory=dict)

    def take(self, name: str, default: Any = None) -> Any:
        self.used.add(name)
        value = self.raw.get(name)
        return self.usual.get(name, default) if value is None else value

    def has(self, name: str) -> bool:
        self.used.add(name)
        return self.raw.get(name) is not None

    def has_value(self, name: str) -> bool:
        """Returns whether the key is there, or has a default of this file's class."""
        return self.has(name) or name in self.usual

    def number(self, name: str, default: float) -> float:
        return number(self.prefix + name, self.take(name, default))

    def count(self, name: str, default: int, least: int | None = None) -> int:
        found = count(self.prefix + name, self.take(name, default))
        if least is not None and found < least:
            raise problem(self.prefix + name, f"{found} was given", f"give {least} or more")
        return found

    def weights(self, name: str, wanted: int, things: str) -> list[float]:
        """Returns the weights, as many as are wanted; none if none are given. things: what they are of ("2 losses")."""
        values, key = self.take(name, []), self.prefix + name
        listed = values if isinstance(values, list) else [values]
        if listed and len(listed) != wanted:
            why = f"{len(listed)} were given for {things}"
            raise problem(key, why, "give as many weights, or leave it out")
        return [number(key, value) for value in listed]

    def switch(self, name: str, default: bool = False) -> bool:
        return switch(self.prefix + name, self.take(name, default))

    def word(self, name: str, default: str = "") -> str:
        return str(self.take(name, default)).strip().lower()

    def block(self, name: str) -> KeyReader:
        """Returns a reader of the keys within a key."""
        return KeyReader(mapping(self.prefix + name, self.take(name, {})), self.found, f"{self.prefix}{name}.")

    def set(self, name: str, to: str, value: Any, why: str = "", default: Any = None, is_soft: bool = False) -> None:
        """Makes the key the field `to`; if it is missing, the field's default is that of the other software.

        default: that value; is_soft: the key states only what happens anyway.
        """
        if not self.has(name):
            self.found.defaults[to] = Default(self.prefix + name, value)
            return
        self.found.translation.set(self.prefix + name, to, value, why)
        default = self.usual.get(name, default)
        if is_soft or (default is not None and agree(value, default)):
            self.found.soft.add(to)

    def note(self, name: str, fate: Fate, why: str, alters: bool = False) -> None:
        """Adds a note, only if the key is there. alters: it is dropped, and without it something else is trained."""
        self.used.add(name)
        if name in self.raw:
            self.found.translation.note(self.prefix + name, fate, why, alters)

    def lose(self, name: str, why: str) -> None:
        """Refuses a key that has no counterpart, and without which something else is trained."""
        self.note(name, "refused", why, alters=True)

    def off(self, *names: str, why: str = "it is off") -> None:
        for name in names:
            self.note(name, "unneeded", why)

    def rest(self, handlers: Mapping[str, Handler]) -> None:
        """Passes every key not read yet to its handler; an unknown one is refused."""
        noted = {note.key for note in self.found.notes}
        for name, value in self.raw.items():
            if name in self.used:
                if value is None and self.prefix + name not in noted:
                    self.off(name, why="it is not given")
                continue
            with_errors(self.found, partial(self._by_handler, name, value, handlers))

    def _by_handler(self, name: str, value: Any, handlers: Mapping[str, Handler]) -> None:
        if name in handlers:
            try:
                handlers[name](self.prefix + name, value, self.found.translation)
            except UserError:
                raise
            except OF_JUNK:
                raise junk(self.prefix + name, value) from None
        else:
            translated({name: None}, handlers, self.found.translation, self.prefix)


def in_turn(given: KeyReader, groups: Sequence[Callable[[KeyReader], None]]) -> None:
    """Lets each group read its keys. What one cannot read, whichever error it raises, becomes a problem."""
    for group in groups:
        with_errors(given.found, partial(_read, group, given))


def _read(group: Callable[[KeyReader], None], given: KeyReader) -> None:
    before, given.used = given.used, set()
    try:
        group(given)
    except UserError:
        raise
    except OF_JUNK:
        read = {key: value for key, value in given.raw.items() if key in given.used and value is not None}
        if not read:  # no value of the file can be the reason
            raise
        values = ", ".join(f"{key}={shown(value)}" for key, value in read.items())
        keys = ", ".join(given.prefix + key for key in read)
        raise problem(keys, f"no sense can be made of {values}", "correct them, or leave them out") from None
    finally:
        given.used |= before


def with_errors(found: TranslatedFile, work: Callable[[], None]) -> None:
    """Collects keys that cannot be read, so that all are reported at once."""
    try:
        work()
    except UserError as error:
        found.problems += [Problem(one.field, one.why, one.fix) for one in error.problems]


# --- values --------------------------------------------------------------------------------------------------------


def number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise problem(key, f"{shown(value)} was given", "give a number")
    try:
        found = float(value)
    except (ValueError, OverflowError):
        raise problem(key, f"{shown(value)} was given", "give a number") from None
    if not math.isfinite(found):
        raise problem(key, f"{shown(value)} was given", "give a finite number")
    return found


def count(key: str, value: Any) -> int:
    found = number(key, value)
    if found != int(found):
        raise problem(key, f"{shown(value)} was given", "give a whole number")
    return int(found)


def switch(key: str, value: Any) -> bool:
    text = str(value).strip().lower()
    if isinstance(value, bool | int | str) and text in SWITCHES:
        return SWITCHES[text]
    raise problem(key, f"{shown(value)} was given", "give true or false")


def mapping(key: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise problem(key, f"{shown(value)} was given", "give a mapping of keys")


def junk(key: str, value: Any) -> UserError:
    return problem(key, f"{shown(value)} was given, which is no value for it", "correct it, or leave it out")
