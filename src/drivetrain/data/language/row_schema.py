"""The schema of a row that holds a conversation: the format, and the names of columns and of a message's fields.

Names and defaults are those of LLaMA-Factory's dataset_info.json (data/README.md there).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from drivetrain.errors import shown

Formatting = Literal["alpaca", "sharegpt", "openai", "trl"]

COLUMNS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output"},
    "sharegpt": {"messages": "conversations"},
    "openai": {"messages": "messages", "tools": "tools"},
    "trl": {"prompt": "prompt", "tools": "tools"},
}
USED = {
    "alpaca": ("prompt", "query", "response", "history", "system", "tools"),
    "sharegpt": ("messages", "system", "tools"),
    "openai": ("messages", "system", "tools"),
    "trl": ("prompt", "tools"),
}
REQUIRED = {"alpaca": ("prompt", "response"), "sharegpt": ("messages",), "openai": ("messages",), "trl": ()}
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
OPENAI_TAGS = {
    **TAGS,
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
}
# words of either kind are understood in both: LLaMA-Factory reads OpenAI's messages as sharegpt with other tags
WORDS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "observation": "observation",
    "tool": "observation",
    "function_call": "function",
    "system": "system",
    "developer": "system",
}


KTO_TAGS = ("label", "kto_tag")  # as TRL and LLaMA-Factory call what tells replies to learn from those to avoid
PREFERENCE = ("chosen", "rejected")


class RowError(ValueError):
    """The reason why a row is no conversation."""


@dataclass(frozen=True)
class RowSchema:
    """The schema of rows. columns: name in LLaMA-Factory → column in the data; tags: the same for fields of messages.

    As in LLaMA-Factory, history and system are read only if they are named, and an alpaca row whose prompt is named has
    no query unless that is named too: {prompt: input, response: target} must not read "input" twice.

    by_usual_names: no column was named: all are read, by their usual names, in every row that has them. ranking:
    preference data, of which the column `chosen` is the reply. pairs: the column `rejected` is read beside it.
    scored: several answers with a score each stand in the column `completions`, in place of a pair's two columns;
    every_pair: each two of them with different scores are a pair, not the best and the worst alone.
    steps: the columns `completions` and `labels` have the steps of an answer, and whether each is right.
    labels: the column `kto_tag` distinguishes replies to learn from those to avoid.
    prompts: the reply may be missing: the row is a prompt alone then.
    margins: the column `margin` has the number by which the chosen answer of a pair is better, where a row has one.
    default_system: the system message of rows that have none.
    """

    formatting: Formatting
    columns: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    ranking: bool = False
    default_system: str | None = None
    by_usual_names: bool = False
    pairs: bool = False
    labels: bool = False
    scored: bool = False
    every_pair: bool = False
    steps: bool = False
    margins: bool = False
    prompts: bool = False

    @cached_property
    def required(self) -> dict[str, str]:
        """Returns the columns that a row must have, as in `columns`."""
        names = [name for name in REQUIRED[self.formatting] if not (self.ranking and name == "response")]
        if self.steps:
            names += ["completions", "labels"]
        elif self.scored:
            names += ["completions"]
        else:
            names += ["chosen"] if self.ranking else []
            names += ["rejected"] if self.pairs else []
        names += ["kto_tag"] if self.labels else []
        defaults = {**COLUMNS[self.formatting], "kto_tag": "label"}
        return {name: self.columns.get(name, defaults.get(name, name)) for name in names}

    @cached_property
    def replies_apart(self) -> bool:
        """Returns whether the reply to a list of messages stands in a column of its own."""
        one = not (self.ranking or self.labels or self.steps)
        return self.formatting in ("sharegpt", "openai") and "response" in self.columns and one

    @cached_property
    def sides(self) -> tuple[RowSchema, RowSchema]:
        """Returns the schemas by which each side of a pair is read: the second takes the rejected answer as reply."""
        answers = {**self.columns, "chosen": self.required["rejected"]}
        return replace(self, pairs=False), replace(self, pairs=False, columns=answers)

    @cached_property
    def unscored(self) -> RowSchema:
        """Returns the schema of the pairs that are made of scored answers."""
        return replace(self, scored=False, every_pair=False)

    @cached_property
    def of_answer(self) -> RowSchema:
        """Returns the schema by which an answer in steps is read once these are joined."""
        columns = {**self.columns, "chosen": self.required["completions"]}
        return replace(self, steps=False, ranking=True, columns=columns)

    @cached_property
    def named(self) -> dict[str, str]:
        """Returns the required columns and those set by name, as far as this format reads them."""
        given = {name: column for name, column in self.columns.items() if name in USED[self.formatting]}
        if self.ranking:
            given.pop("response", None)
        apart = {"response": self.columns["response"]} if self.replies_apart else {}
        return {**given, **apart, **self.required}

    def value(self, row: Mapping[str, Any], name: str) -> Any:
        """Returns the row's value in the column of that name; None if it has no such column, or null."""
        if name in self.named:
            return row.get(self.named[name])
        if name == "tools" and self.formatting == "openai":
            tools = row.get("tools")
            return row.get("functions") if tools in (None, "", "[]", []) else tools  # as OpenAI named them at first
        if self.by_usual_names:
            return row.get(COLUMNS[self.formatting].get(name, name))
        if name == "query" and "prompt" in self.columns:
            return None
        return row.get(COLUMNS[self.formatting].get(name, ""))

    @cached_property
    def _all_tags(self) -> Mapping[str, str]:
        return {**(OPENAI_TAGS if self.formatting in ("openai", "trl") else TAGS), **self.tags}

    def tag(self, name: str) -> str:
        return self._all_tags[name]

    @cached_property
    def roles(self) -> dict[str, str]:
        """Returns word in the data → user, assistant, observation, function (a call) or system."""
        # as OpenAI named tools at first
        openai = {"function": "observation"} if self.formatting in ("openai", "trl") else {}
        tagged = ("user", "assistant", "observation", "function", "system")
        return {**WORDS, **openai, **{self.tag(f"{role}_tag"): role for role in tagged}}


def check_is_to_learn_from(row: Mapping[str, Any], form: RowSchema) -> None:
    """Raises RowError for a reply that the row marks as one to avoid, and for preferences that are read as plain data.

    Columns that the form reads are no such mark, and neither is a whole number as label: it may be a class.
    """
    read = set(form.named.values())
    for name in KTO_TAGS:
        value = row.get(name)
        if name not in read and marks_to_avoid(value):
            raise RowError(
                f"its {name} is false: a reply to avoid, as in KTO data, not one to learn from (a column that says "
                "something else needs another name)"
            )
    if not (form.ranking or form.labels) and all(row.get(name) and name not in read for name in PREFERENCE):
        raise RowError(
            "it has a chosen and a rejected reply beside the conversation: preference data, of which only chosen "
            "replies that are texts or single messages are read (without these two columns the conversation is)"
        )


def marks_to_avoid(value: Any) -> bool:
    """Returns whether a label is false, or the text "false"."""
    return value is False or (isinstance(value, str) and value.strip().lower() == "false")


def kind(value: Any) -> str:
    """Returns the name of a JSON value's type, for a sentence."""
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}
    return "null" if value is None else kinds.get(type(value), f"a {type(value).__name__}")


def text(value: Any, what: str) -> str:
    """Returns `value` if it is a text with content. Raises RowError otherwise."""
    if not isinstance(value, str):
        raise RowError(f"{what} is missing" if value is None else f"{what} is {kind(value)}, not a text")
    if not value.strip():
        raise RowError(f"{what} is empty")
    return value


def finite(value: Any) -> float | None:
    """Returns a number as a float; None for anything else, and for a number that is not finite as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer, which JSON bounds no more than Python does
        return None
    return number if math.isfinite(number) else None


def truth(value: Any, what: str) -> bool:
    """Returns a label as a boolean: true and false, 1 and 0 (1.0 and 0.0 too, as a table with gaps has them), or these
    as texts. Raises RowError otherwise."""
    known = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
    found = known.get(str(value).strip().lower()) if isinstance(value, bool | int | float | str) else None
    if found is None:
        fault = "is missing" if value is None else f"is {shown(value)}, neither true nor false (1 nor 0)"
        raise RowError(f"{what} {fault}")
    return found


def check_utf8(value: str, what: str) -> None:
    """Raises RowError if it is no text in any encoding: JSON can hold one half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = value[error.start]
        raise RowError(f"{what} has half a character ({half!r}, character {error.start + 1})") from None


def optional_text(value: Any, what: str) -> str:
    """Like `text`; missing and empty are ""."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return ""
    return text(value, what)
