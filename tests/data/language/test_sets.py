"""Data sets: where each is, what its rows hold, which of them are used, and which cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.config.language_data import DataSource, LanguageData
from drivetrain.data import hub_rows
from drivetrain.data.json_rows import HeldRows
from drivetrain.data.language.contents import contents_of
from drivetrain.data.language.row_schema import RowError
from drivetrain.data.language.sets import DataSet, OpenSet, open_sets, read_set, refuse_bad_rows
from drivetrain.data.streams.shard_rows import ShardRows
from drivetrain.errors import UserError
from tests.tiny_language import Row, talk, write_lines

FIELD = "workload.data.train"
TALKS = [talk(f"question {number}", f"answer {number}") for number in range(30)]
TEXTS = [{"text": f"text {number}"} for number in range(30)]
OPENAI = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}


def opened(*sources: Any, chats: bool = True, **data: Any) -> list[OpenSet]:
    given = LanguageData.model_validate({"train": list(sources), **data})
    return open_sets(given.train, given, "conversations" if chats else "texts", FIELD)


def read(*sources: Any, chats: bool = True, seed: int = 0, **data: Any) -> list[DataSet]:
    return [read_set(each, seed, FIELD) for each in opened(*sources, chats=chats, **data)]


def refusal(*sources: Any, chats: bool = True, **data: Any) -> str:
    with pytest.raises(UserError) as caught:
        refuse_bad_rows(read(*sources, chats=chats, **data), FIELD)
    assert {each.field for each in caught.value.problems} == {FIELD}
    return str(caught.value)


def asked(dataset: DataSet) -> list[str]:
    """The first message of each conversation."""
    return [each.messages[0].content for each in dataset.conversations]


@pytest.fixture
def talks(tmp_path: Path) -> str:
    return write_lines(tmp_path / "talks.jsonl", TALKS)


@pytest.fixture
def texts(tmp_path: Path) -> str:
    return write_lines(tmp_path / "texts.jsonl", TEXTS)


# --- found and read ---------------------------------------------------------------------------------------------------


LATE = {"input": "more", "system": "be kind", "history": [["h", "i"]]}
TOOLS = [{"name": "look", "description": "looks", "parameters": {"type": "object", "properties": {}}}]


@pytest.mark.parametrize("source", [{}, {"formatting": "alpaca"}], ids=["seen", "given"])
@pytest.mark.parametrize("stream", [False, True])
def test_columns_of_usual_names_are_read_in_whichever_row_they_come_first(
    source: Row, stream: bool, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [*TALKS, {**talk("last", "b"), **LATE}])
    (found,) = opened({"path": path, **source}, stream=stream)
    conversation = found.conversations([30])[0][30]
    assert [(each.role, each.content) for each in conversation.messages] == [
        ("system", "be kind"),
        ("user", "h"),
        ("assistant", "i"),
        ("user", "last\nmore"),
        ("assistant", "b"),
    ]


@pytest.mark.parametrize("source", [{}, {"formatting": "sharegpt"}], ids=["seen", "given"])
def test_system_and_tools_of_sharegpt_are_read_wherever_they_are(source: Row, tmp_path: Path) -> None:
    rows = [*[SHAREGPT] * 30, {**SHAREGPT, "system": "be kind", "tools": json.dumps(TOOLS)}]
    (found,) = read({"path": write_lines(tmp_path / "a.jsonl", rows), **source})
    *others, last = found.conversations
    assert last.messages[0].content == "be kind"
    assert len(last.tools) == 1
    assert not any(each.tools or each.messages[0].role == "system" for each in others)


def test_named_columns_are_all_that_is_read(tmp_path: Path) -> None:
    source = {"path": write_lines(tmp_path / "a.jsonl", [{**talk("a", "b"), **LATE}])}
    (found,) = read({**source, "columns": {"prompt": "instruction", "response": "output"}})
    assert [each.content for each in found.conversations[0].messages] == ["a", "b"]


@pytest.mark.parametrize("row", [talk("a", "b"), OPENAI, SHAREGPT], ids=["alpaca", "openai", "sharegpt"])
def test_the_format_of_conversations_is_seen(row: Row, tmp_path: Path) -> None:
    (found,) = read(write_lines(tmp_path / "a.jsonl", [row]))
    assert [(each.role, each.content) for each in found.conversations[0].messages] == [
        ("user", "a"),
        ("assistant", "b"),
    ]
    assert found.conversations[0].where == "a.jsonl line 1"


def test_columns_and_tags_go_by_the_names_that_are_given(tmp_path: Path) -> None:
    rows = [{"talk": [{"who": "me", "what": "a"}, {"who": "it", "what": "b"}]}]
    tags = {"role_tag": "who", "content_tag": "what", "user_tag": "me", "assistant_tag": "it"}
    source = {"path": write_lines(tmp_path / "a.jsonl", rows), "formatting": "sharegpt"}
    (found,) = read({**source, "columns": {"messages": "talk"}, "tags": tags})
    assert asked(found) == ["a"]


def test_a_folder_is_one_data_set_in_the_order_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write_lines(tmp_path / "b.jsonl", TALKS[:2])
    write_lines(tmp_path / "sub" / "c.jsonl", TALKS[4:5])
    (tmp_path / "a.json").write_text(json.dumps(TALKS[2:4]))
    (found,) = read(str(tmp_path))
    assert asked(found) == [f"question {number}" for number in (2, 3, 0, 1, 4)]
    assert [each.where for each in found.conversations] == [
        *("a.json row 1", "a.json row 2", "b.jsonl line 1", "b.jsonl line 2", "sub/c.jsonl line 1"),
    ]
    assert found.rows == 5


def test_a_text_file_is_one_text(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("once\n\nupon a time")
    (found,) = read(str(tmp_path / "book.txt"), chats=False)
    assert [(each.content, each.where) for each in found.texts] == [("once\n\nupon a time", "book.txt")]


def test_texts_may_be_in_a_column_of_another_name(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"body": "x", "text": "y"}])
    for name in ("text", "prompt"):  # as LLaMA-Factory calls it
        assert read({"path": path, "columns": {name: "body"}}, chats=False)[0].texts[0].content == "x"


def test_names_of_a_registry_mean_what_it_says_and_files_are_files(tmp_path: Path, talks: str) -> None:
    rows = [{"q": "a", "a": "b"}, {"q": "c", "a": "d"}, {"q": "e", "a": "f"}]
    write_lines(tmp_path / "qa.jsonl", rows)
    entry = {"file_name": "qa.jsonl", "num_samples": 2, "columns": {"prompt": "q", "response": "a"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": entry}))
    named, file = read("mine", talks, registry=tmp_path)
    assert (named.name, named.rows, len(named.conversations)) == ("mine", 3, 2)
    assert set(asked(named)) < {"a", "c", "e"}
    assert len(file.conversations) == 30
    more = read({"path": "mine", "samples": 3, "columns": {"prompt": "a", "response": "q"}}, registry=tmp_path)
    assert len(asked(more[0])) == 2  # the smaller number, as LLaMA-Factory's max_samples
    assert set(asked(more[0])) < {"b", "d", "f"}  # else what the run file says goes before
    assert "the registry has no data set 'mien'\n    did you mean mine?" in refusal("mien", registry=tmp_path)


def test_hub_ids_may_stand_beside_names_of_a_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    asked_of_the_hub = []

    def answer(name: str, *_: Any) -> HeldRows:
        asked_of_the_hub.append(name)
        return HeldRows(name, TALKS)

    monkeypatch.setattr(hub_rows, "open_hub", answer)
    read("owner/name", registry=tmp_path)
    assert asked_of_the_hub == ["owner/name"]


def test_columns_that_come_late_in_a_stream_are_read_and_reported_late(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [*TALKS, {**talk("last", "b"), "sys": "be kind"}])
    columns = {"prompt": "instruction", "response": "output", "system": "sys"}
    (found,) = opened({"path": path, "columns": columns}, stream=True)
    assert found.notes == ["none of the first 20 rows of a.jsonl has the column 'sys'"]
    assert found.conversations([30])[0][30].messages[0].content == "be kind"


@pytest.mark.parametrize("stream", [False, True])
def test_kto_data_by_their_path_are_refused_with_the_rows(tmp_path: Path, stream: bool) -> None:
    talked = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    path = write_lines(tmp_path / "kto.jsonl", [{**talked, "label": number % 2 == 0} for number in range(6)])
    (opened,) = open_sets([DataSource(path=path)], LanguageData(train=path, stream=stream), "conversations", FIELD)
    kept, bad = opened.conversations(range(6))
    assert list(kept) == [0, 2, 4]
    assert [each.where for each in bad] == ["kto.jsonl line 2", "kto.jsonl line 4", "kto.jsonl line 6"]


def test_preferences_are_trained_on_the_chosen_answer_and_it_is_reported(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"instruction": "a", "input": "", "chosen": "good", "rejected": "bad"}])
    (found,) = opened(path)
    assert read_set(found, 0, FIELD).conversations[0].messages[-1].content == "good"
    assert found.reads_chosen


PAIR = {"chosen": "good", "rejected": "bad"}


@pytest.mark.parametrize("bad_rows", ["error", "drop"])
@pytest.mark.parametrize(
    ("row", "source", "stages"),
    [
        ({"prompt": "a", **PAIR}, {}, "dpo.* orpo, simpo, cpo; reward"),
        ({**OPENAI, **PAIR}, {"formatting": "openai"}, "dpo.*reward"),
        ({**SHAREGPT, **PAIR}, {"formatting": "sharegpt"}, "dpo.*reward"),
        ({"prompt": "a", "completion": "b", "label": False}, {}, "kto"),
        ({**OPENAI, "label": False}, {}, "kto"),
        ({"instruction": "a", "output": "b", "kto_tag": "false"}, {"formatting": "alpaca"}, "kto"),
    ],
)
def test_preferences_where_replies_are_learned_are_named_with_the_stages_that_read_them(
    tmp_path: Path, row: Row, source: dict[str, Any], stages: str, bad_rows: Any
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [row] * 3)
    with pytest.raises(UserError, match=f"its rows (.|\n)*give workload.stage: {stages}") as caught:
        refuse_bad_rows(read({"path": path, **source}), FIELD, bad_rows)
    assert len(caught.value.problems) == 1
    assert "bad_rows" not in str(caught.value)


def test_a_single_reply_to_avoid_is_left_out_where_rows_may_be(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{**OPENAI, "label": False}, *[{**OPENAI, "label": True}] * 9])
    refuse_bad_rows(read(path), FIELD, "drop")


def test_some_samples_are_drawn_by_the_seed_in_their_order(talks: str, texts: str) -> None:
    for path, chats in ((talks, True), (texts, False)):
        drawn = [read({"path": path, "samples": 7}, chats=chats, seed=seed)[0] for seed in (0, 0, 1)]
        places = [[int(each.where.split()[-1]) for each in (one.conversations or one.texts)] for one in drawn]
        assert places[0] == places[1] != places[2]
        assert all(len(set(each)) == 7 and each == sorted(each) for each in places)
        assert len(read({"path": path, "samples": 99}, chats=chats)[0].conversations or TEXTS) == 30


def test_placeholders_are_filled_in(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [talk("who is {{name}}?", "{{name}}, by {{author}}")])
    (found,) = read({"path": path, "replace": {"{{name}}": "Ada", "{{author}}": "{{name}}"}})
    assert [each.content for each in found.conversations[0].messages] == ["who is Ada?", "Ada, by {{name}}"]


@pytest.mark.parametrize("row", [talk("a", "b"), OPENAI, SHAREGPT], ids=["alpaca", "openai", "sharegpt"])
def test_conversations_without_a_system_message_get_the_one_that_is_given(row: Row, tmp_path: Path) -> None:
    own = {"messages": [{"role": "system", "content": "mine"}, *OPENAI["messages"]]}
    for number, (given, first) in enumerate([(row, "Be kind."), (own, "mine")]):
        path = write_lines(tmp_path / f"{number}.jsonl", [given])
        (found,) = read(path, system="Be kind.")[0].conversations
        assert [each.role for each in found.messages] == ["system", "user", "assistant"]
        assert found.messages[0].content == first
        assert found == opened(path, system="Be kind.", stream=True)[0].conversations([0])[0][0]


def test_reasoning_and_names_count_for_a_vocabulary_too(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "b", "reasoning_content": "thought"}
    path = write_lines(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "a", "name": "Ada"}, said]}])
    assert set(contents_of(read(path)[0])) == {"a", "Ada", "b", "thought"}


def test_all_texts_of_a_data_set_count_for_its_vocabulary(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": "é"}}}
    message = {"role": "assistant", "content": "c", "tool_calls": [call]}
    tool = {"type": "function", "function": {"name": "add", "description": "ß", "parameters": {}}}
    row = {"messages": [{"role": "user", "content": "a"}, message], "tools": [tool]}
    (found,) = read(write_lines(tmp_path / "a.jsonl", [row]))
    assert set("acéß") <= set("".join(contents_of(found)))


# --- rows as they are needed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_rows_are_read_by_their_numbers(stream: bool, tmp_path: Path) -> None:
    rows = [*TALKS[:4], {"instruction": "no answer", "output": ""}, *TALKS[4:]]
    (found,) = opened(write_lines(tmp_path / "a.jsonl", rows), stream=stream)
    for indices in (range(3, 6), [3, 4, 5]):
        conversations, bad = found.conversations(indices)
        assert {row: each.messages[0].content for row, each in conversations.items()} == {
            3: "question 3",
            5: "question 4",
        }
        assert [(each.where, "empty" in each.why) for each in bad] == [("a.jsonl line 5", True)]


def test_a_stream_draws_the_rows_that_are_drawn_of_it_read_whole(talks: str) -> None:
    source = {"path": talks, "samples": 7}
    (found,) = opened(source, stream=True)
    whole = [int(each.where.split()[-1]) - 1 for each in read(source, seed=3)[0].conversations]
    assert list(found.drawn(range(30), 3)) == whole


# --- refused ----------------------------------------------------------------------------------------------------------


def test_texts_in_the_place_of_conversations_are_refused_with_the_stage(tmp_path: Path, texts: str) -> None:
    (tmp_path / "book.txt").write_text("once upon a time")
    meta = write_lines(tmp_path / "meta.jsonl", [{"text": "a", "meta": {}}])
    for source in (texts, str(tmp_path / "book.txt"), meta, {"path": texts, "formatting": "text"}):
        said = refusal(source)
        assert "holds texts" in said
        assert "give workload.stage=pretrain" in said


def test_conversations_in_the_place_of_texts_are_refused_with_the_stage(talks: str) -> None:
    for source in (talks, {"path": talks, "formatting": "alpaca"}):
        assert "workload.stage=sft" in refusal(source, chats=False)


def test_columns_that_no_row_has_are_refused_with_the_nearest(talks: str, texts: str) -> None:
    assert "did you mean output?" in refusal({"path": talks, "columns": {"response": "ouput"}})
    with pytest.raises(UserError, match=r"did you mean output\?"):  # before any row is asked for
        opened({"path": talks, "columns": {"response": "ouput"}}, stream=True)
    assert "has no columns.respose\n    did you mean response?" in refusal({"path": talks, "columns": {"respose": "x"}})
    said = refusal({"path": texts, "columns": {"text": "txt"}}, chats=False)
    assert "has the column 'txt'; there are text" in said
    assert "texts have no column response" in refusal({"path": texts, "columns": {"response": "x"}}, chats=False)


def test_nothing_is_replaced_in_texts(texts: str) -> None:
    assert "leave replace out" in refusal({"path": texts, "replace": {"a": "b"}}, chats=False)


def test_a_broken_line_is_refused_with_its_number_streamed_or_not(tmp_path: Path, talks: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(Path(talks).read_text() + '{"instruction": "a", "outp\n')
    assert "broken.jsonl cannot be read: line 31 is broken JSON" in refusal(str(path))
    (found,) = opened(str(path), stream=True)
    assert isinstance(found.rows, ShardRows)
    assert len(found.conversations(range(30))[0]) == 30
    ((piece, index),) = found.rows.found(30, 31)
    assert piece.where(index) == "broken.jsonl line 31"
    with pytest.raises(RowError, match="it is broken JSON"):
        piece.row(index)


def test_the_faults_of_all_sources_come_at_once(tmp_path: Path, talks: str) -> None:
    said = refusal(str(tmp_path / "no.jsonl"), {"path": talks, "formatting": "text"}, str(tmp_path / "none.json"))
    assert [name in said for name in ("no.jsonl", "talks.jsonl", "none.json")] == [True] * 3


@pytest.mark.parametrize("chats", [True, False])
def test_bad_rows_are_named_the_first_five_and_how_many_more(chats: bool, tmp_path: Path) -> None:
    good, bad = (TALKS, talk("a", "")) if chats else (TEXTS, {"text": " "})
    path = write_lines(tmp_path / "a.jsonl", [good[0], *[bad] * 7, *good[1:]])
    (found,) = read(path, chats=chats)
    assert (found.rows, len(found.bad), len(found.conversations or found.texts)) == (37, 7, 30)
    said = refusal(path, chats=chats)
    assert [f"a.jsonl line {number}: " in said for number in range(1, 9)] == [False, *[True] * 5, False, False]
    assert "and 2 more of the 37 rows of a.jsonl cannot be used" in said
    assert "workload.data.bad_rows=0.19" in said  # more than drop leaves out
    few = write_lines(tmp_path / "b.jsonl", [bad, *good])
    assert "workload.data.bad_rows=drop" in refusal(few, chats=chats)


def test_a_text_that_is_a_number_is_reported_as_what_it_is(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [*TEXTS, {"text": 7}, {"text": None}])
    (found,) = read(path, chats=False)
    assert [each.why for each in found.bad] == [
        "it has a number, not a text, in the column 'text'",
        "it has no text in the column 'text'",
    ]
