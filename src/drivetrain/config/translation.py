"""The result of translating a foreign configuration: run-file fields, settings its own library still reads, a note a
key."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

AUTO = "auto"

# mapped: has a field here; passed: its own library gets it as it is; changed: mapped, but not quite the same;
# unneeded: what it does happens here anyway, or has no meaning; refused: cannot be had; later: not built yet
Fate = Literal["mapped", "passed", "changed", "unneeded", "refused", "later"]


@dataclass(frozen=True)
class Note:
    key: str  # dotted, as in the foreign file
    fate: Fate
    why: str  # the field it became, or the reason
    to: str = ""  # the field it became
    value: Any = field(default=None, compare=False)  # of that field
    is_readable: bool = True  # False: nothing can be made of what was given
    alters: bool = False  # it is dropped, and without it something else is trained


@dataclass
class Translation:
    settings: dict[str, Any] = field(default_factory=dict)  # dotted run-file field → value
    passed: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def set(self, key: str, to: str, value: Any, why: str = "") -> None:
        """Records that the key became the field `to`; why: what is not quite the same."""
        self.settings[to] = value
        description = f"{to}: {value}" + (f"; {why}" if why else "")
        self.notes.append(Note(key, "changed" if why else "mapped", description, to, value))

    def note(self, key: str, fate: Fate, why: str, alters: bool = False) -> None:
        self.notes.append(Note(key, fate, why, alters=alters))

    def unreadable(self, key: str, value: Any) -> None:
        text = repr(value)
        why = f"its value makes no sense: {text if len(text) <= 40 else text[:37] + '...'}"
        self.notes.append(Note(key, "refused", why, is_readable=False))

    def conflicts(self) -> Iterator[list[Note]]:
        """Yields the keys that became one field and differ on it."""
        about: dict[str, list[Note]] = {}
        for note in self.notes:
            about.setdefault(note.to, []).append(note)
        about.pop("", None)
        yield from (notes for notes in about.values() if any(not agree(notes[0].value, n.value) for n in notes))

    def with_fate(self, *fates: Fate) -> list[Note]:
        return [note for note in self.notes if note.fate in fates]


Handler = Callable[[str, Any, Translation], None]  # key as written, value, where it goes


def field_of(to: str) -> Handler:
    """Returns a handler that sets the field to the same value."""
    return lambda key, value, into: into.set(key, to, value)


def fated(fate: Fate, why: str, alters: bool = False) -> Handler:
    return lambda key, _, into: into.note(key, fate, why, alters)


def lost(why: str) -> Handler:
    """Returns a handler that refuses a key which has no counterpart here and changes what is trained."""
    return fated("refused", why, alters=True)


def if_on(handler: Handler) -> Handler:
    """Returns a handler that acts only if the value is on; a key that is switched off needs no note."""

    def handle(key: str, value: Any, into: Translation) -> None:
        off = isinstance(value, dict) and value.get("enabled") is False
        if not off and value not in (None, False, 0, "", "no", "none", "NO", {}, []):
            handler(key, value, into)
        else:
            into.note(key, "unneeded", "it is off")

    return handle


def translated(raw: Mapping[str, Any], handlers: Mapping[str, Handler], into: Translation, prefix: str = "") -> None:
    """Passes every key to its handler. "auto" leaves the choice to the run file; an unknown key is refused."""
    for name, value in raw.items():
        key = f"{prefix}{name}"
        if name not in handlers:
            into.note(key, "refused", "no such key is known")
        elif value == AUTO:
            into.note(key, "mapped", "auto: the run file's value")
        elif value is None:
            into.note(key, "unneeded", "it is empty")
        else:
            _handled(handlers[name], key, value, into)


def _handled(handler: Handler, key: str, value: Any, into: Translation) -> None:
    """Refuses a value of another shape than the handler reads, whichever error the handler raised."""
    try:
        handler(key, value, into)
    except (AttributeError, TypeError, ValueError, ArithmeticError, LookupError):
        into.unreadable(key, value)


def agree(wanted: Any, actual: Any) -> bool:
    """Returns whether two settings are the same."""
    if isinstance(wanted, list | tuple) and isinstance(actual, list | tuple):
        return len(wanted) == len(actual) and all(map(agree, wanted, actual))
    if isinstance(wanted, int | float) and isinstance(actual, int | float):
        return math.isclose(wanted, actual, rel_tol=1e-6)
    return bool(wanted == actual)
