"""Conversations of large data sets as arrays on disk: read and checked once, decoded one by one when asked for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import numpy as np

from drivetrain.data.array_store import Store, Writer, check_room, stored
from drivetrain.data.bad_rows import BadRow
from drivetrain.data.block_work import Progress
from drivetrain.data.language.conversation_form import Form, RowError
from drivetrain.data.language.conversation_formats import check_columns, check_names, read_conversation
from drivetrain.data.language.conversations import Conversation, Message
from drivetrain.data.language.placeholders import placeholders_left
from drivetrain.data.rows import Rows
from drivetrain.data.source_files import SourceFile
from drivetrain.data.text_rows import MappedTexts
from drivetrain.errors import Problem, UserError

T = TypeVar("T")
FORMAT = 1
AT_ONCE = 1_000  # rows read from the data set together
MOST_TOLD = 5  # blocks of rows with lines that cannot be read


class StoredConversations(Sequence[Conversation]):
    """The conversations of a finished store, or those of them that `indices` names."""

    def __init__(self, store: Store, indices: np.ndarray | None = None) -> None:
        self.store, self._indices = store, indices

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredConversations, (self.store, self._indices)  # another process maps the arrays itself

    def __len__(self) -> int:
        return len(self._contents)

    @overload
    def __getitem__(self, index: int) -> Conversation: ...

    @overload
    def __getitem__(self, index: slice) -> list[Conversation]: ...

    def __getitem__(self, index: int | slice) -> Conversation | list[Conversation]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return _decoded(self._contents[index], self.places[index])

    @cached_property
    def places(self) -> MappedTexts:
        """Of each, `Conversation.where`."""
        return self._texts("places")

    @cached_property
    def _contents(self) -> MappedTexts:
        return self._texts("contents")

    def _texts(self, name: str) -> MappedTexts:
        return MappedTexts(self.store.array(name), self.store.array(f"{name}_ends"), self._indices)

    def taken(self, indices: np.ndarray) -> StoredConversations:
        return StoredConversations(self.store, indices if self._indices is None else self._indices[indices])

    @property
    def sizes(self) -> np.ndarray:
        """(N,) int64: bytes of each."""
        sizes = np.diff(self.store.array("contents_ends"), prepend=0)
        return sizes if self._indices is None else sizes[self._indices]

    @property
    def identity(self) -> list[str | None]:
        """What no other conversations have."""
        chosen = self._indices
        return [
            self.store.folder.name,
            None if chosen is None else blake2b(chosen.astype(np.int64).tobytes(), digest_size=20).hexdigest(),
        ]

    @property
    def has_placeholders(self) -> bool:
        """Whether any of the store's conversations has some."""
        return bool(self.store.facts["placeholders"])


def taken(items: Sequence[T], indices: np.ndarray) -> Sequence[T]:
    """Those of the items, in the order of the indices."""
    if isinstance(items, StoredConversations):
        return cast(Sequence[T], items.taken(indices))
    return [items[index] for index in indices]


@dataclass(frozen=True)
class StoredRead:
    """rows: how many the data set has; problems: those that are no conversation; warning: if the cache is not used."""

    conversations: StoredConversations
    rows: int
    problems: list[BadRow]
    warning: str | None


def stored_conversations(
    rows: Rows, files: Sequence[Path], form: Form, field: str, replace: Mapping[str, str], root: Path
) -> StoredRead:
    """As `read_conversations`, with the conversations on disk below `root`. files: what the rows are read from.

    UserError also for lines that cannot be read.
    """
    check_names(form, replace, field)
    sources = [SourceFile(file, field) for file in files]
    described = json.dumps([FORMAT, repr(form), dict(replace), rows.where(0), [each.digest(root) for each in sources]])
    key = blake2b(described.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()
    store, warning = stored(
        root, f"conversations-{key}", lambda folder: _build(folder, rows, sources, form, field, replace)
    )
    bad = [BadRow(where, why) for where, why in store.facts["bad"]]
    return StoredRead(StoredConversations(store), store.facts["rows"], bad, warning)


def _build(
    folder: Path, rows: Rows, sources: Sequence[SourceFile], form: Form, field: str, replace: Mapping[str, str]
) -> None:
    size = sum(source.file.stat().st_size for source in sources)
    check_room(folder, size, "reading the conversations")
    keys: dict[str, None] = {}
    bad: list[BadRow] = []
    unreadable: list[Problem] = []
    num_placeholders, num_rows = 0, len(rows)
    shown = Progress(f"reading {rows.where(0).rsplit(' ', 2)[0]}", size)
    with Writer(folder) as writer:
        _append(writer, [])
        for start in range(0, num_rows, AT_ONCE):
            stop = min(start + AT_ONCE, num_rows)
            try:
                read = rows.read(start, stop)
            except UserError as error:  # the other blocks' lines are told of too
                unreadable += error.problems
                continue
            conversations = []
            for index, row in enumerate(read, start=start):
                keys.update(dict.fromkeys(row))
                where = rows.where(index)
                try:
                    conversations.append(read_conversation(row, form, where, replace))
                except RowError as error:
                    bad.append(BadRow(where, str(error)))
            num_placeholders += placeholders_left(conversations)[0]
            _append(writer, conversations)
            shown.add(size * stop // num_rows - size * start // num_rows)
        shown.end()
        if unreadable:
            raise UserError(_told(unreadable, field))
        check_columns(form, list(keys), field)
        for source in sources:
            source.check_unchanged()  # before the store is finished, which no later start would doubt
        told = [(each.where, each.why) for each in bad]
        writer.finish({"rows": num_rows, "bad": told, "placeholders": num_placeholders})


def _told(unreadable: Sequence[Problem], field: str) -> list[Problem]:
    more = len(unreadable) - MOST_TOLD
    told = list(unreadable[:MOST_TOLD])
    if more > 0:
        told.append(Problem(field, f"and {more} more blocks of {AT_ONCE:,} rows have such lines", unreadable[0].fix))
    return told


def _append(writer: Writer, conversations: Sequence[Conversation]) -> None:
    for name, texts in (
        ("contents", [_encoded(each) for each in conversations]),
        ("places", [each.where.encode("utf-8", "surrogatepass") for each in conversations]),
    ):
        writer.append(name, np.frombuffer(b"".join(texts), np.uint8))
        writer.append_ends(f"{name}_ends", [len(text) for text in texts])


def _encoded(conversation: Conversation) -> bytes:
    """Contents, and what else a message has that few have."""
    messages = [
        [each.role, each.content, {name: given for name in FEW if (given := getattr(each, name)) != FEW[name]}]
        for each in conversation.messages
    ]
    held = [messages, list(conversation.tools)]
    return json.dumps(held, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _decoded(content: str, where: str) -> Conversation:
    messages, tools = json.loads(content)
    made = []
    for role, text, few in messages:
        if "tool_calls" in few:
            few["tool_calls"] = tuple(few["tool_calls"])
        made.append(Message(role, text, **few))
    return Conversation(tuple(made), tuple(tools), where)


FEW = {field.name: field.default for field in dataclasses.fields(Message) if field.name not in ("role", "content")}
