"""Reads rows in the formats of alpaca, ShareGPT and OpenAI as conversations."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.data.bad_rows import BadRow
from drivetrain.data.language.alpaca import read_alpaca
from drivetrain.data.language.conversations import Conversation, Message
from drivetrain.data.language.openai_messages import read_openai
from drivetrain.data.language.prompt_replies import (
    STAND_IN,
    columns_of,
    ends_with_reply,
    own_reply,
    prompt_of,
    reference_of,
    with_reply,
)
from drivetrain.data.language.row_schema import (
    TAGS,
    USED,
    RowError,
    RowSchema,
    check_is_to_learn_from,
    check_utf8,
    finite,
    optional_text,
    truth,
)
from drivetrain.data.language.scored_rows import pairs_of_scored
from drivetrain.data.language.sharegpt import read_sharegpt
from drivetrain.data.language.step_rows import read_steps
from drivetrain.data.language.tool_calls import read_tools
from drivetrain.data.language.trl_rows import read_trl, with_prompt
from drivetrain.data.rows import Rows
from drivetrain.errors import Problem, UserError

READERS: dict[str, Callable[[Mapping[str, Any], RowSchema], list[Message]]] = {
    "alpaca": read_alpaca,
    "sharegpt": read_sharegpt,
    "openai": read_openai,
    "trl": read_trl,
}
AT_ONCE = 1_000  # rows read from the data set together


@dataclass(frozen=True)
class Read:
    """A data set's conversations in its order, and the problems of its other rows."""

    conversations: list[Conversation]
    problems: list[BadRow]


def read_conversations(rows: Rows, form: RowSchema, field: str, replace: Mapping[str, str]) -> Read:
    """Reads every row. replace: texts put in the place of others, such as {"{{name}}": "Ada"}, in all contents.

    In preference data (`form.ranking`) the chosen answer is the reply. Raises UserError, with the nearest name, for
    names in `form` that no row or no format has; any other fault of a row is one of the `problems`, for the caller to
    judge.
    """
    check_names(form, replace, field)
    read = Read([], [])
    keys: dict[str, None] = {}
    for start in range(0, len(rows), AT_ONCE):
        for index, row in enumerate(rows.read(start, start + AT_ONCE), start=start):
            keys.update(dict.fromkeys(row))
            where = rows.where(index)
            try:
                read.conversations.extend(conversations_of(row, form, where, replace))
            except RowError as error:
                read.problems.append(BadRow(where, str(error)))
    check_columns(form, list(keys), field)
    return read


def conversations_of(
    row: Mapping[str, Any], form: RowSchema, where: str, replace: Mapping[str, str]
) -> list[Conversation]:
    """Reads one row, like `read_conversations`: one conversation, or one for each pair that its scored answers make.
    Raises RowError with the reason if it has none."""
    if not form.scored:
        return [read_conversation(row, form, where, replace)]
    return [_read_pair(each, form.unscored, where, replace) for each in pairs_of_scored(row, form)]


def read_conversation(row: Mapping[str, Any], form: RowSchema, where: str, replace: Mapping[str, str]) -> Conversation:
    """Reads a row that is one conversation, or with `form.prompts` one without its reply, which ends with another
    message. Raises RowError with the reason if it is none."""
    if form.steps:
        return _read_steps(row, form, where, replace)
    if form.labels:
        return _read_labelled(row, form, where, replace)
    if form.prompts:
        return _read_prompt(row, form, where, replace)
    if form.replies_apart:
        return _read_answered(row, form, where, replace)
    return _read_pair(row, form, where, replace) if form.pairs else _read_one(row, form, where, replace)


def _read_prompt(row: Mapping[str, Any], form: RowSchema, where: str, replace: Mapping[str, str]) -> Conversation:
    """Reads a prompt with the row's columns, and with its reply where the row has one, at its end or in a column."""
    columns = columns_of(row, form)
    if ends_with_reply(row, form):
        found = _read_one(row, form, where, replace)
        if form.required["messages"] == "prompt" and reference_of(row, form) is not None:
            raise RowError("its prompt ends with a reply, and a column beside it has another: one of them has to go")
        return dataclasses.replace(found, columns=columns)
    reference = reference_of(row, form)
    whole = _read_one(with_reply(row, form, reference or STAND_IN), form, where, replace)
    prompt = prompt_of(whole)
    messages = prompt.messages if reference is None else (*prompt.messages, whole.messages[-1])
    return dataclasses.replace(prompt, messages=messages, columns=columns)


def _read_answered(row: Mapping[str, Any], form: RowSchema, where: str, replace: Mapping[str, str]) -> Conversation:
    """Reads messages whose reply stands in a column of its own. Of the replies that one alone is trained on, as of
    TRL's prompt and completion."""
    reply = own_reply(row, form)
    if reply is None:
        raise RowError(f"{form.columns['response']} is missing or empty")
    if not isinstance(row.get(form.required["messages"]), list):
        return _read_one(row, form, where, replace)  # raises what is wrong with it
    found = _read_one(with_reply(row, form, reply), form, where, replace)
    first = len(found.messages) - (len(reply) if isinstance(reply, list) else 1)
    context = tuple(dataclasses.replace(each, trained=False) for each in found.messages[:first])
    if not any(each.role != "system" for each in context):
        raise RowError(f"{form.required['messages']} has no message but the system's: nothing is asked")
    return dataclasses.replace(found, messages=context + found.messages[first:])


def _read_steps(row: Mapping[str, Any], form: RowSchema, where: str, replace: Mapping[str, str]) -> Conversation:
    """Reads an answer that is marked step by step: its reply has all steps, a line each."""
    steps = read_steps(row, form)
    answer = {**row, form.required["completions"]: "\n".join(step for step, _ in steps)}
    found = _read_one(answer, form.of_answer, where, replace)
    if replace:
        filled = _filling(replace)
        steps = tuple((filled(step), label) for step, label in steps)
    return dataclasses.replace(found, steps=steps)


def _read_labelled(row: Mapping[str, Any], form: RowSchema, where: str, replace: Mapping[str, str]) -> Conversation:
    """Reads a conversation whose last reply is labelled; earlier ones are not trained."""
    label = truth(row.get(form.required["kto_tag"]), form.required["kto_tag"])
    found = _read_one(row, form, where, replace)
    last = len(found.messages) - 1
    messages = tuple(dataclasses.replace(each, trained=place == last) for place, each in enumerate(found.messages))
    return dataclasses.replace(found, messages=messages, desirable=label)


def _read_pair(row: Mapping[str, Any], form: RowSchema, where: str, replace: Mapping[str, str]) -> Conversation:
    """Reads both sides of a pair. Raises RowError if they are no two answers to one prompt.

    Of the messages that both sides have, none is trained: what is learned begins where they differ.
    """
    if form.formatting == "trl":
        row = with_prompt(row, form)
    sides = []
    for name, own in zip(("chosen", "rejected"), form.sides, strict=True):
        try:
            sides.append(_read_one(row, own, where, replace))
        except RowError as error:
            raise error if name in str(error) else RowError(f"the {name} side: {error}") from None
    chosen, rejected = (side.messages for side in sides)
    shared = next((n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if shared is None:
        raise RowError("chosen and rejected are the same: there is nothing to prefer")
    if not any(each.role != "system" for each in chosen[:shared]):
        raise RowError("chosen and rejected have no prompt in common")
    if "assistant" not in (chosen[shared].role, rejected[shared].role):
        raise RowError(f"chosen and rejected differ in message {shared + 1}, which is no reply")
    prompt = tuple(dataclasses.replace(each, trained=False) for each in chosen[:shared])
    whole = dataclasses.replace(sides[0], messages=prompt + chosen[shared:], margin=_margin(row, form))
    return dataclasses.replace(whole, rejected=prompt + rejected[shared:])


def _margin(row: Mapping[str, Any], form: RowSchema) -> float:
    """Returns 0 where the stage reads no margins, and where the row has none."""
    column = form.columns.get("margin", "margin")
    value = row.get(column) if form.margins else None
    if value is None:
        return 0.0
    number = finite(value)
    if number is None:
        raise RowError(f"{column} is {str(value)[:40]!r}, no finite number")
    return number


def _read_one(row: Mapping[str, Any], form: RowSchema, where: str, replace: Mapping[str, str]) -> Conversation:
    check_is_to_learn_from(row, form)
    given = READERS[form.formatting](row, form)
    messages = [each for each in given if each.role != "system" or each.content.strip()]
    system = optional_text(form.value(row, "system"), form.named.get("system", "system")) or form.default_system
    if system and not (messages and messages[0].role == "system"):
        messages.insert(0, Message("system", system))
    if not any(each.role == "assistant" for each in messages):
        raise RowError("no message is the assistant's")
    if messages[-1].role != "assistant":
        raise RowError(f"it ends with a message of the {messages[-1].role}, where the assistant's reply must stand")
    if replace:
        filled = _filling(replace)
        messages = [_filled(each, filled) for each in messages]
    tools = read_tools(form.value(row, "tools"))
    _check_can_be_written(messages, tools)
    return Conversation(tuple(messages), tools, where)


def _filling(replace: Mapping[str, str]) -> Callable[[str], str]:
    """Returns what replaces the keys of `replace` in a text, the longest first."""
    pattern = re.compile("|".join(re.escape(each) for each in sorted(replace, key=len, reverse=True)))
    return lambda text: pattern.sub(lambda found: replace[found[0]], text)


def _filled(message: Message, fill: Callable[[str], str]) -> Message:
    thought = message.reasoning_content
    return dataclasses.replace(
        message, content=fill(message.content), reasoning_content=None if thought is None else fill(thought)
    )


def _check_can_be_written(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises RowError for halves of characters, and for values that no JSON can hold: a call's NaN, a date from
    parquet."""
    try:
        "".join(each.content + (each.reasoning_content or "") for each in messages).encode()
    except UnicodeEncodeError:
        for number, message in enumerate(messages, start=1):
            check_utf8(message.content + (message.reasoning_content or ""), f"the {message.role}'s message {number}")
    called = [call for message in messages for call in message.tool_calls]
    if called or tools:
        try:
            check_utf8(json.dumps([*called, *tools], ensure_ascii=False, allow_nan=False), "a call or a tool")
        except (TypeError, ValueError) as error:
            if isinstance(error, RowError):
                raise
            raise RowError(f"a call or a tool cannot be written as JSON: {error}") from None


OF_PREFERENCES = ("chosen", "rejected", "completions", "scores", "ranks", "labels", "kto_tag", "margin")


def check_names(form: RowSchema, replace: Mapping[str, str], field: str) -> None:
    """Raises UserError for columns and tags that the format does not have, and for an invalid placeholder."""
    problems = []
    apart = ("response",) if form.replies_apart else ()
    known = {"columns": (*USED[form.formatting], *OF_PREFERENCES, *apart), "tags": tuple(TAGS)}
    for block, given in {"columns": form.columns, "tags": form.tags}.items():
        for name in given:
            if name not in known[block]:
                near = difflib.get_close_matches(name, known[block], n=1)
                fix = f"did you mean {near[0]}?" if near else f"known: {', '.join(known[block])}"
                problems.append(Problem(field, f"the format {form.formatting} has no {block}.{name}", fix))
    if "" in replace:
        problems.append(Problem(field, "an empty text cannot be replaced", "give the placeholder that is in the data"))
    if problems:
        raise UserError(problems)


def check_columns(form: RowSchema, keys: Sequence[str], field: str, needed: Container[str] | None = None) -> list[str]:
    """Raises UserError, with the nearest, for columns that are none of the keys that rows have.

    needed: the names for which that is an error; of others the missing columns are returned. By default all are needed.
    """
    problems, others = [], []
    for name, column in form.named.items():
        if form.prompts and name == "response" and (form.by_usual_names or name not in form.columns):
            continue
        if column not in keys and needed is not None and name not in needed:
            others.append(column)
        elif column not in keys:
            near = difflib.get_close_matches(column, keys, n=1)
            fix = f"did you mean {near[0]}? " if near else ""
            why = f"no row has the column {column!r} ({name} of the format {form.formatting})"
            problems.append(Problem(field, why, f"{fix}Rows have: {', '.join(keys[:20])}"))
    if problems:
        raise UserError(problems)
    return others
