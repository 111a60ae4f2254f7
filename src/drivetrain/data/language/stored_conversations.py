"""Conversations of large data sets, kept on disk."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from drivetrain.data.language.conversation_formats import check_columns, check_names, conversations_of
from drivetrain.data.language.conversations import Conversation, Message
from drivetrain.data.language.placeholders import placeholders_left
from drivetrain.data.language.row_schema import RowSchema
from drivetrain.data.language.stored_rows import Reading, StoredItems, StoredRead, stored_rows
from drivetrain.data.row_blocks import RowFile

FEW = {field.name: field.default for field in dataclasses.fields(Message) if field.name not in ("role", "content")}


class StoredConversations(StoredItems[Conversation]):
    """Conversations as JSON, a text each."""

    @staticmethod
    def encoded(item: Conversation) -> str:
        """Writes each message's role and content, and those of its other fields that are set; of a pair both sides, of
        an answer in steps the marks, of a prompt the row's columns."""
        sides = [
            [
                [each.role, each.content, {name: given for name in FEW if (given := getattr(each, name)) != FEW[name]}]
                for each in side
            ]
            for side in (item.messages, item.rejected)
        ]
        return json.dumps(
            [list(item.tools), item.desirable, item.margin, item.steps, item.columns, *sides],
            ensure_ascii=False,
            separators=(",", ":"),
        )

    @staticmethod
    def decoded(content: str, where: str) -> Conversation:
        tools, desirable, margin, marked, columns, *sides = json.loads(content)
        made: list[list[Message]] = [[], []]
        for messages, side in zip(made, sides, strict=True):
            for role, text, few in side:
                if "tool_calls" in few:
                    few["tool_calls"] = tuple(few["tool_calls"])
                messages.append(Message(role, text, **few))
        steps = tuple((text, label) for text, label in marked)
        return Conversation(tuple(made[0]), tuple(tools), where, tuple(made[1]), desirable, margin, steps, columns)

    @property
    def has_placeholders(self) -> bool:
        """Returns whether any of the store's conversations has placeholders."""
        return bool(self.store.facts["counted"]["placeholders"])


def stored_conversations(
    files: Sequence[RowFile], form: RowSchema, field: str, replace: Mapping[str, str], root: Path
) -> StoredRead[Conversation]:
    """Reads conversations like `read_conversations`, on disk below `root`.

    Raises UserError also for lines that cannot be read.
    """
    check_names(form, replace, field)
    reading = Reading(
        files,
        lambda row, where: conversations_of(row, form, where, replace),
        repr((form, dict(replace))),
        lambda conversations: {"placeholders": placeholders_left(conversations)[0]},
        lambda keys: check_columns(form, keys, field),
    )
    return stored_rows(StoredConversations, "conversations", reading, root)
