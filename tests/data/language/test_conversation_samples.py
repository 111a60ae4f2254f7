"""Conversations as samples: what is too long, what has no target, what is kept in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drivetrain.config.language_data import LanguageData
from drivetrain.data.language.chat import ChatTemplate, ConversationTokens
from drivetrain.data.language.conversation_samples import Cut, conversation_samples
from drivetrain.data.language.conversations import Conversation, Message
from drivetrain.data.language.vocabularies import END_OF_TEXT, bpe_tokenizer, byte_tokenizer
from drivetrain.errors import UserError
from tests.tiny_language import chatml

MARKS = [END_OF_TEXT, "<|im_start|>", "<|im_end|>"]
BYTES = byte_tokenizer(MARKS)
GREETING = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def talk(number: int, *turns: str) -> Conversation:
    roles: Sequence[Any] = ("user", "assistant")
    messages = tuple(Message(roles[place % 2], turn) for place, turn in enumerate(turns))
    return Conversation(messages, where=f"a.jsonl line {number}")


TALKS = [talk(number, f"say {number}", "x" * number) for number in range(1, 13)]
LAST = TALKS[-1]
SIZES = [len(chatml(f"say {number}", "x" * number)[0]) for number in range(1, 13)]


@pytest.fixture
def cut(tmp_path: Path) -> Callable[..., Cut]:
    def made(conversations: Sequence[Conversation] = TALKS, template: str = "chatml", **data: Any) -> Cut:
        tokenizer = data.pop("tokenizer", BYTES)
        given = LanguageData.model_validate({"train": "a.jsonl", "cache": tmp_path / "cache", **data})
        return conversation_samples(conversations, ChatTemplate(tokenizer, template, "F"), tokenizer, given)

    return made


@pytest.fixture
def tokenised_anew(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that conversations were tokenised rather than read from the cache."""
    calls: list[int] = []
    original = ChatTemplate.tokenised

    def counted(
        self: ChatTemplate, conversations: Sequence[Conversation], train_on: Any, *checked: Any
    ) -> ConversationTokens:
        calls.append(len(conversations))
        return original(self, conversations, train_on, *checked)

    monkeypatch.setattr(ChatTemplate, "tokenised", counted)
    return calls


def rows(found: Cut) -> list[tuple[list[int], list[bool]]]:
    loaded = (found.samples.load(index, 0) for index in range(len(found.samples)))
    return [(ids.tolist(), targets.tolist()) for ids, targets in loaded]


Making = Callable[..., Cut]


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_samples_are_the_conversations_tokens_and_the_replies_targets(cut: Making) -> None:
    found = cut()
    assert rows(found) == [chatml(f"say {number}", "x" * number) for number in range(1, 13)]
    assert found.samples.names == [each.where for each in TALKS]
    assert (found.truncated, found.too_long, found.without_target, found.bad) == (0, 0, 0, [])


def test_a_sample_that_is_too_long_is_cut_at_its_end(cut: Making) -> None:
    found = cut(length=30)
    assert [len(ids) for ids, _ in rows(found)] == [min(30, size) for size in SIZES]
    expected = [(ids[:30], trained[:30]) for ids, trained in rows(cut())]
    assert rows(found) == expected
    assert found.truncated == sum(size > 30 for size in SIZES)
    assert found.too_long == found.without_target == 0


def test_where_only_the_last_reply_counts_the_beginning_is_cut_off(cut: Making) -> None:
    talks = [talk(1, "first " * 9, "one", "second", "two"), talk(2, "a", "b")]
    whole, found = (rows(cut(talks, train_on="last_response", **more)) for more in ({}, {"length": 30}))
    assert found[0] == (whole[0][0][-30:], whole[0][1][-30:])
    assert sum(found[0][1]) == sum(whole[0][1]) == len("two") + 1
    assert found[1] == whole[1]


def test_a_sample_that_is_too_long_is_left_out_if_it_is_to_be(cut: Making) -> None:
    found = cut(length=30, too_long="drop")
    fit = sum(size <= 30 for size in SIZES)
    assert rows(found) == rows(cut())[:fit]
    assert (found.too_long, found.truncated) == (12 - fit, 0)
    assert found.samples.names == [each.where for each in TALKS[:fit]]


def test_a_sample_that_is_too_long_is_an_error_that_names_its_row_if_it_is_to_be(cut: Making) -> None:
    with pytest.raises(UserError) as caught:
        cut(length=30, too_long="error")
    words, first = str(caught.value), next(number for number, size in enumerate(SIZES, 1) if size > 30)
    assert f"workload.data.length: a.jsonl line {first} has {SIZES[first - 1]} tokens > 30" in words
    assert f"and {sum(size > 30 for size in SIZES) - 5} more samples are too long" in words
    assert len(caught.value.problems) == 6
    assert "workload.data.too_long=truncate or drop" in words
    assert len(cut(length=max(SIZES), too_long="error").samples) == 12


def test_what_is_cut_down_to_its_prompt_is_left_out_and_counted(cut: Making) -> None:
    prompt = chatml("say 1", "")[1].index(True)
    found = cut(length=prompt)
    assert (len(found.samples), found.without_target, found.truncated) == (0, 12, 0)
    # one token more is one of the reply, but in the three whose question has a digit more
    assert cut(length=prompt + 1).without_target == 3
    assert cut(length=prompt + 1).truncated == 9
    assert all(trained[-1] for _, trained in rows(cut(length=prompt + 1)))


def test_the_first_token_of_all_is_marked_but_no_target(cut: Making) -> None:
    """Nothing comes before it that could predict it."""
    untrained = Conversation((Message("user", "a"), Message("assistant", "bcd", trained=False)), where="w")
    found = cut([untrained, talk(1, "a", "bcd")], "plain", train_on="all", length=4)
    assert rows(found) == [([*b"a bc"], [True] * 4)]
    assert found.without_target == 1


def test_a_template_that_rewrites_history_gives_a_sample_a_reply_of_the_same_row(cut: Making, tmp_path: Path) -> None:
    source = GREETING.replace("m.content", "(m.content if loop.last or m.role == 'user' else '...')")
    (tmp_path / "t.jinja").write_text(source)
    found = cut([talk(1, "a", "b", "c", "d"), talk(2, "e", "f")], str(tmp_path / "t.jinja"))
    assert [BYTES.decode(np.array(ids)[trained]) for ids, trained in rows(found)] == [
        *("b<|im_end|>", "d<|im_end|>", "f<|im_end|>"),
    ]
    assert found.samples.names == ["a.jsonl line 1", "a.jsonl line 1", "a.jsonl line 2"]
    assert found.split_conversations == 1


def test_conversations_that_the_template_refuses_are_bad_rows_and_the_others_are_not(cut: Making) -> None:
    odd = Conversation((Message("assistant", "hello"),), where="a.jsonl line 99")
    found = cut([TALKS[0], odd, TALKS[1]])
    assert [each.where for each in found.bad] == ["a.jsonl line 99"]
    assert found.samples.names == ["a.jsonl line 1", "a.jsonl line 2"]


def test_no_conversations_are_no_samples(cut: Making) -> None:
    found = cut([])
    assert (len(found.samples), found.bad) == (0, [])


# --- the cache --------------------------------------------------------------------------------------------------------


def test_the_same_conversations_are_tokenised_once(cut: Making, tokenised_anew: list[int]) -> None:
    odd = Conversation((Message("assistant", "hello"),), where="a.jsonl line 99")
    first, again = cut([*TALKS, odd]), cut([*TALKS, odd])
    assert tokenised_anew == [13]
    assert rows(again) == rows(first)
    assert again.samples.names == first.samples.names
    assert again.bad == first.bad
    assert (again.boundary_checked, again.boundary_mismatches) == (first.boundary_checked, first.boundary_mismatches)
    assert first.boundary_checked == 12


def test_another_length_cuts_the_same_tokens(cut: Making, tokenised_anew: list[int]) -> None:
    cut()
    assert max(len(ids) for ids, _ in rows(cut(length=30))) == 30
    assert len(cut(length=30, too_long="drop").samples) < 12
    assert tokenised_anew == [12]


CHANGES: dict[str, tuple[dict[str, Any], int]] = {
    "targets": ({"train_on": "all"}, 2),
    "the template": ({"template": "alpaca"}, 2),
    "the tokenizer": ({"tokenizer": bpe_tokenizer(["say xxx"], 300, MARKS)}, 2),
    "a row": ({"conversations": [*TALKS[:-1], talk(12, "say 12", "y")]}, 2),
    "a row less": ({"conversations": TALKS[:-1]}, 2),
    "the place of a row, which faults would name": ({"conversations": [*TALKS[:-1], replace(LAST, where="w")]}, 2),
    "who says it": (
        {"conversations": [*TALKS[:-1], replace(LAST, messages=(Message("system", "say 12"), LAST.messages[1]))]},
        2,
    ),
    "which replies are trained": (
        {
            "conversations": [
                *TALKS[:-1],
                replace(LAST, messages=(LAST.messages[0], replace(LAST.messages[1], trained=False))),
            ]
        },
        2,
    ),
    "tools": ({"conversations": [*TALKS[:-1], replace(LAST, tools=({"function": {"name": "add"}},))]}, 2),
    "nothing": ({}, 1),
    "what is done with long ones": ({"too_long": "drop"}, 1),
}


@pytest.mark.parametrize(("change", "times"), CHANGES.values(), ids=CHANGES)
def test_the_cache_answers_only_for_the_same_content(
    change: dict[str, Any], times: int, cut: Making, tokenised_anew: list[int]
) -> None:
    cut()
    cut(**change)
    assert len(tokenised_anew) == times


def test_a_template_of_the_tokenizer_s_for_conversations_with_tools_counts_too(
    tokenised_anew: list[int], tmp_path: Path
) -> None:
    given = LanguageData.model_validate({"train": "a.jsonl", "cache": tmp_path / "cache"})
    tools = ({"type": "function", "function": {"name": "add", "parameters": {}}},)
    asked = Conversation((Message("user", "a"), Message("assistant", "b")), tools, "a.jsonl line 1")
    found = []
    for heading in ("can: ", "may: "):
        tokenizer = byte_tokenizer(MARKS)
        tokenizer.chat_template = {"default": GREETING, "tool_use": heading + "{{ tools | tojson }}" + GREETING}
        made = conversation_samples([asked], ChatTemplate(tokenizer, None, "F"), tokenizer, given)
        found.append(tokenizer.decode(made.samples.load(0, 0)[0])[:5])
    assert found == ["can: ", "may: "]
    assert len(tokenised_anew) == 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "another's"])
def test_a_damaged_cache_is_made_again_and_reported(
    damage: str, cut: Making, tokenised_anew: list[int], tmp_path: Path
) -> None:
    expected = cut()
    (file,) = (tmp_path / "cache").glob("*.npz")
    whole = bytearray(file.read_bytes())
    place = whole.index(np.array(chatml("say 7", "x" * 7)[0], np.int32).tobytes())
    whole[place] ^= 1
    file.write_bytes(bytes(whole[:300] if damage == "cut" else whole))
    if damage == "another's":
        with file.open("wb") as opened:
            np.savez(opened, ids=np.zeros(3, np.int32), targets=np.zeros(2, bool), offsets=np.array([0, 3]))
    found = cut()
    assert rows(found) == rows(expected)
    assert found.warning is not None
    assert "was damaged" in found.warning
    assert cut().warning is None
    assert tokenised_anew == [12, 12]


def test_a_stream_keeps_nothing(cut: Making, tmp_path: Path) -> None:
    given = LanguageData.model_validate({"train": "a.jsonl", "cache": tmp_path / "cache"})
    found = conversation_samples(TALKS, ChatTemplate(BYTES, "chatml", "F"), BYTES, given, keeps=False)
    assert not (tmp_path / "cache").exists()
    assert rows(found) == rows(cut())
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_template_that_tells_the_day_is_rendered_anew_on_another(
    cut: Callable[..., Cut], tmp_path: Path, tokenised_anew: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dated = tmp_path / "dated.jinja"
    dated.write_text("{{ strftime_now('%Y') }}" + GREETING)

    class Day(date):
        @classmethod
        def today(cls) -> Day:
            return cls(1999, 12, 31)

    for _ in range(2):
        cut(template=str(dated))
    assert len(tokenised_anew) == 1
    monkeypatch.setattr("drivetrain.data.language.conversation_tokens.date", Day)
    cut(template=str(dated))
    assert len(tokenised_anew) == 2
