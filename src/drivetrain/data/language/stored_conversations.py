"""Conversations of large data sets, kept on disk."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from drivetrain.data.language.conversation_formats import check_columns, check_names, read_conversation
from drivetrain.data.language.conversations import Conversation, Message
from drivetrain.data.language.placeholders import placeholders_left
from drivetrain.data.language.row_schema import RowSchema
from drivetrain.data.language.stored_rows import Reading, StoredItems, StoredRead, stored_rows
from drivetrain.data.rows import Rows

FEW = {field.name: field.default for field in dataclasses.fields(Message) if field.name not in ("role", "content")}


class StoredConversations(StoredItems[Conversation]):
    """Conversations as JSON, a text each."""

    @staticmethod
    def encoded(item: Conversation) -> str:
        """Write of each message its role and content, and of its other fields those that are given."""
        messages = [
            [each.role, each.content, {name: given for name in FEW if (given := getattr(each, name)) != FEW[name]}]
            for each in item.messages
        ]
        return json.dumps([messages, list(item.tools)], ensure_ascii=False, separators=(",", ":"))

    @staticmethod
    def decoded(content: str, where: str) -> Conversation:
        messages, tools = json.loads(content)
        made = []
        for role, text, few in messages:
            if "tool_calls" in few:
                few["tool_calls"] = tuple(few["tool_calls"])
            made.append(Message(role, text, **few))
        return Conversation(tuple(made), tuple(tools), where)

    @property
    def has_placeholders(self) -> bool:
        """Whether any of the store's conversations has some."""
        return bool(self.store.facts["counted"]["placeholders"])


def stored_conversations(
    rows: Rows, files: Sequence[Path], form: RowSchema, field: str, replace: Mapping[str, str], root: Path
) -> StoredRead[Conversation]:
    """As `read_conversations`, with the conversations on disk below `root`. files: what the rows are read from.

    UserError also for lines that cannot be read.
    """
    check_names(form, replace, field)
    reading = Reading(
        rows,
        files,
        field,
        lambda row, index: read_conversation(row, form, rows.where(index), replace),
        repr((form, dict(replace))),
        lambda conversations: {"placeholders": placeholders_left(conversations)[0]},
        lambda keys: check_columns(form, keys, field),
    )
    return stored_rows(StoredConversations, "conversations", reading, root)
