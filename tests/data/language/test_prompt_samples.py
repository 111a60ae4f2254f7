"""Prompts to answer: all before the last reply, as inference feeds it; the reply is the reference."""

from __future__ import annotations

import datetime
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from drivetrain.data import rows
from drivetrain.errors import UserError
from tests.workloads.policy_cases import workload

TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
]
BRIEF = {"use": "length", "options": {"most": 8, "over": 4}}


def prompts(folder: Path, **data: Any) -> list[tuple[str, str]]:
    work = workload(folder, data={"evaluation_fraction": 0, **data}, rewards=BRIEF)
    found = [work.train.load(index, 0) for index in range(len(work.train))]
    return [(work.tokenizer.decode(each.ids.tolist()), each.row.reference) for each in found]


def test_a_prompt_ends_where_its_last_reply_begins(tmp_path: Path) -> None:
    found = prompts(tmp_path)
    assert found[3] == ("say 3", "3")
    (tmp_path / "talk.json").write_text(json.dumps([{"messages": TALK}]))
    [(text, reference)] = prompts(tmp_path, train=str(tmp_path / "talk.json"), template="chatml")
    assert text.endswith("<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    assert "Hello" in text
    assert reference == "4"


def test_long_prompts_lose_their_beginning_or_are_left_out_or_refused(tmp_path: Path) -> None:
    assert prompts(tmp_path, length=5)[-1] == ("ay 11", "11")
    assert [text for text, _ in prompts(tmp_path, length=5, too_long="drop")] == [f"say {n}" for n in range(10)]
    with pytest.raises(UserError, match="line 11 has 6 tokens > 5"):
        prompts(tmp_path, length=5, too_long="error")


def test_a_prompt_that_leaves_no_room_for_an_answer_is_too_long(tmp_path: Path) -> None:
    """The tiny model has 128 positions: a prompt of 128 tokens has no place for an answer behind it."""
    row = {"instruction": "x" * 127 + "!", "output": "4"}
    (tmp_path / "long.json").write_text(json.dumps([{"instruction": "2 + 2?", "output": "4"}, row]))
    data = {"train": str(tmp_path / "long.json"), "length": 128}
    assert prompts(tmp_path, **data) == [("2 + 2?", "4"), ("x" * 126 + "!", "4")]
    assert prompts(tmp_path, **data, too_long="drop") == [("2 + 2?", "4")]
    with pytest.raises(
        UserError, match=r"row 2 has 128 tokens, and the model's context of 128 leaves no room"
    ) as refused:
        prompts(tmp_path, **data, too_long="error")
    assert len(refused.value.problems) == 1


FORMS: dict[str, list[dict[str, Any]]] = {
    "a prompt alone, as TRL has them": [{"prompt": "2 + 2?"}],
    "messages, as TRL has them": [{"prompt": [{"role": "user", "content": "2 + 2?"}]}],
    "an empty output": [{"instruction": "2 + 2?", "output": ""}],
    "messages of the user": [{"messages": [{"role": "user", "content": "2 + 2?"}]}],
    "sharegpt": [{"conversations": [{"from": "human", "value": "2 + 2?"}]}],
}


@pytest.mark.parametrize("given", FORMS.values(), ids=FORMS)
def test_prompts_need_no_reply(tmp_path: Path, given: list[dict[str, Any]]) -> None:
    """Each is the prompt that it is with a reply."""
    (tmp_path / "rows.json").write_text(json.dumps(given))
    (tmp_path / "with.json").write_text(json.dumps([{"instruction": "2 + 2?", "output": "4"}]))
    same = {"template": "chatml", "length": 64}
    [(text, reference)] = prompts(tmp_path, train=str(tmp_path / "rows.json"), **same)
    assert reference is None
    assert prompts(tmp_path, train=str(tmp_path / "with.json"), **same) == [(text, "4")]


def test_a_talk_that_ends_with_the_user_is_a_prompt_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "talk.json").write_text(json.dumps([{"messages": TALK[:3]}, {"messages": TALK}]))
    (first, none), (second, four) = prompts(tmp_path, train=str(tmp_path / "talk.json"), template="chatml")
    assert first == second
    assert (none, four) == (None, "4")


def test_replies_may_be_missing_in_some_rows_of_large_files_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "LARGE", 0)
    (tmp_path / "large.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "answer": "yes"}\n')
    found = prompts(tmp_path, train=str(tmp_path / "large.jsonl"), cache=str(tmp_path / "cache"))
    assert found == [("a", None), ("b", "yes")]


USER = {"role": "user", "content": "2 + 2?"}
ANSWERED: dict[str, dict[str, Any]] = {
    "TRL's messages": {"prompt": [USER], "answer": "4"},
    "messages with a solution": {"messages": [USER], "solution": "4"},
    "sharegpt": {"conversations": [{"from": "human", "value": "2 + 2?"}], "ground_truth": "4"},
    "a number": {"prompt": [USER], "answer": 4},
    "a number beside a text": {"prompt": "2 + 2?", "answer": 4},
    "messages as the answer": {"prompt": [USER], "completion": [{"role": "assistant", "content": "4"}]},
    "answers that are no reply, beside one that is": {"prompt": [USER], "answer": ["4", "four"], "solution": "4"},
}


@pytest.mark.parametrize("row", ANSWERED.values(), ids=ANSWERED)
def test_the_right_answer_may_stand_in_a_column_of_its_own(tmp_path: Path, row: dict[str, Any]) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    (tmp_path / "with.json").write_text(json.dumps([{"instruction": "2 + 2?", "output": "4"}]))
    same = {"template": "chatml", "length": 64}
    found = prompts(tmp_path, train=str(tmp_path / "rows.json"), **same)
    assert found == prompts(tmp_path, train=str(tmp_path / "with.json"), **same)


NONE: dict[str, dict[str, Any]] = {
    "calls of functions": {"ground_truth": [{"name": "add", "arguments": {}}]},
    "a list of texts": {"answer": ["4", "four"]},
    "no number": {"answer": float("nan")},
    "an object": {"solution": {"value": 4}},
    "a truth": {"answer": True},
}


@pytest.mark.parametrize("asked", ["text", "messages"])
@pytest.mark.parametrize("beside", NONE.values(), ids=NONE)
@pytest.mark.parametrize("late", [False, True])
def test_what_is_no_reply_is_a_column_of_the_prompt_alone(
    tmp_path: Path, beside: dict[str, Any], asked: str, late: bool
) -> None:
    """Also where the first rows have texts or nothing in that column."""
    prompt = {"prompt": [USER] if asked == "messages" else "2 + 2?"}
    before = [prompt | dict.fromkeys(beside, "4")] * 21 if late else []
    (tmp_path / "own.json").write_text(json.dumps([*before, prompt | beside]))
    data = {"train": str(tmp_path / "own.json"), "template": "chatml", "length": 64, "evaluation_fraction": 0}
    samples = workload(tmp_path, data=data, rewards=BRIEF).train
    last = samples.load(len(samples) - 1, 0)
    assert len(samples) == len(before) + 1
    assert last.row.reference is None
    assert str(last.row.columns) == str(beside)


def test_a_whole_number_of_a_column_with_gaps_is_written_as_one(tmp_path: Path) -> None:
    rows_of = [{"prompt": "2 + 2?", "answer": 4.0}, {"prompt": "2 + 2?", "answer": 0.5}, {"prompt": "x"}]
    (tmp_path / "own.json").write_text(json.dumps(rows_of))
    assert [each for _, each in prompts(tmp_path, train=str(tmp_path / "own.json"))] == ["4", "0.5", None]


def test_a_completion_of_several_messages_is_no_part_of_the_prompt(tmp_path: Path) -> None:
    """As in TRL. None of its messages alone is the answer."""
    reply = [{"role": "assistant", "content": "a"}, USER, {"role": "assistant", "content": "4"}]
    (tmp_path / "own.json").write_text(json.dumps([{"prompt": [USER], "completion": reply}]))
    (tmp_path / "alone.json").write_text(json.dumps([{"prompt": [USER]}]))
    same = {"template": "chatml", "length": 64}
    found = prompts(tmp_path, train=str(tmp_path / "own.json"), **same)
    assert found == prompts(tmp_path, train=str(tmp_path / "alone.json"), **same)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": [{"role": "system", "content": "s"}], "answer": "5"}, "nothing is asked"),
        ({"messages": [USER, {"role": "system", "content": "s"}], "answer": "5"}, "ends with a message of the system"),
        ({"prompt": [USER, {"role": "assistant", "content": "a"}], "completion": "b"}, "ends with a reply, and a col"),
        ({"prompt": [], "completion": "b"}, "prompt is empty"),
    ],
)
def test_a_prompt_with_its_answer_beside_it_is_checked_as_any_other(
    tmp_path: Path, row: dict[str, Any], why: str
) -> None:
    good = {("prompt" if "prompt" in row else "messages"): [USER]}
    (tmp_path / "own.json").write_text(json.dumps([good, row]))
    with pytest.raises(UserError, match=why):
        prompts(tmp_path, train=str(tmp_path / "own.json"), template="chatml")


def test_the_column_of_right_answers_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([{"prompt": [USER], "answer": "no", "truth": "4"}]))
    source = {"path": str(tmp_path / "rows.json"), "columns": {"messages": "prompt", "response": "truth"}}
    [(_, reference)] = prompts(tmp_path, train=source, template="chatml")
    assert reference == "4"


def test_a_conversation_with_its_reply_keeps_it_whatever_stands_beside(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([{"messages": TALK, "answer": "four"}]))
    [(_, reference)] = prompts(tmp_path, train=str(tmp_path / "rows.json"), template="chatml")
    assert reference == "4"


@pytest.mark.parametrize("large", [False, True])
def test_a_prompt_has_its_messages_and_the_columns_of_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    if large:
        monkeypatch.setattr(rows, "LARGE", 0)
    given = {"prompt": [USER], "answer": "4", "level": 1, "tags": ["sum", None]}
    (tmp_path / "own.jsonl").write_text(json.dumps(given) + "\n" + json.dumps({"prompt": [USER], "more": 0.5}))
    data = {"train": str(tmp_path / "own.jsonl"), "evaluation_fraction": 0, "template": "chatml", "length": 64}
    work = workload(tmp_path, data={**data, "cache": str(tmp_path / "cache")}, rewards=BRIEF)
    first, second = (work.train.load(index, 0).row for index in (0, 1))
    columns = {name: value for name, value in given.items() if name != "prompt"}
    assert first == ([USER], "4", columns)
    assert second == ([USER], None, {"more": 0.5})


def test_columns_that_json_has_no_form_for_are_texts(tmp_path: Path) -> None:
    by_day = pyarrow.array([[(datetime.date(2026, 1, 2), 1)]], pyarrow.map_(pyarrow.date32(), pyarrow.int64()))
    day = [datetime.date(2026, 1, 2)]
    table = pyarrow.table({"prompt": ["2 + 2?"], "day": day, "bytes": [b"x"], "by_day": by_day})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    data = {"train": str(tmp_path / "rows.parquet"), "evaluation_fraction": 0}
    row = workload(tmp_path, data=data, rewards=BRIEF).train.load(0, 0).row
    assert row.columns["day"] == "2026-01-02"
    assert "2026" in str(row.columns["by_day"])


def test_preferences_read_as_prompts_have_the_chosen_answer_as_reference(tmp_path: Path) -> None:
    row = {"instruction": "2 + 2?", "chosen": "4", "rejected": "5"}
    (tmp_path / "pairs.json").write_text(json.dumps([row]))
    assert prompts(tmp_path, train=str(tmp_path / "pairs.json")) == [("2 + 2?", "4")]


@pytest.mark.parametrize(
    ("reward", "compares"),
    [
        ("exact_match", True),
        ("math", True),
        ({"use": "regex", "options": {"pattern": "(.)", "compare": True}}, True),
        ({"use": "regex", "options": {"pattern": "4"}}, False),
        ("code", True),
        ({"use": "code", "options": {"tests": "assert f(1)"}}, False),
        (BRIEF, False),
    ],
)
def test_a_reward_that_compares_with_a_reply_that_no_row_has_is_refused(
    tmp_path: Path, reward: Any, compares: bool
) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(FORMS["an empty output"]))
    given = {"train": str(tmp_path / "rows.json"), "evaluation_fraction": 0}
    with pytest.raises(UserError, match="of 1 prompts none has a reply") if compares else nullcontext():
        workload(tmp_path, data=given, rewards=[reward])


def test_a_bad_row_brings_no_fault_of_prompts_that_have_no_reply(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(json.dumps([{"prompt": [USER]}, {"prompt": [{"role": "user"}]}]))
    with pytest.raises(UserError) as refused:
        prompts(tmp_path, train=str(tmp_path / "own.json"), template="chatml")
    [problem] = refused.value.problems
    assert "message 1 has no 'content'" in problem.why


def test_where_some_rows_have_a_reply_or_some_rewards_need_none_it_is_a_warning(tmp_path: Path) -> None:
    ends = {"use": "regex", "options": {"pattern": "4"}}
    for name, given, rewards in (
        ("some.json", [{"prompt": "1 + 1?"}, {"prompt": "2 + 2?", "answer": "4"}], ["exact_match"]),
        ("none.json", [{"prompt": "1 + 1?"}], ["exact_match", ends]),
    ):
        (tmp_path / name).write_text(json.dumps(given))
        data = {"train": str(tmp_path / name), "evaluation_fraction": 0}
        work = workload(tmp_path, data=data, rewards=rewards)
        assert any(f"of {len(given)} prompts 1 have no reply" in each for each in work.warnings)


@pytest.mark.parametrize(("most", "warned"), [(122, False), (123, True)])
def test_answers_that_may_be_longer_than_the_context_leaves_room_for_are_a_warning(
    tmp_path: Path, most: int, warned: bool
) -> None:
    """The longest prompt has 6 of the tiny model's 128 positions."""
    found = workload(tmp_path, max_new_tokens=most).warnings
    words = "after its 6 tokens the model's context of 128 has room for 122 more, and reinforcement.max_new_tokens is"
    assert any(f"{words} {most}" in each for each in found) is warned
