"""Large sets of conversations are kept on disk, and are then the same samples as those that are read as a whole."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.config.language_data import LanguageData
from drivetrain.data import block_work, json_files, row_blocks, rows
from drivetrain.data.cache_entries import entries
from drivetrain.data.language.chat import ChatTemplate
from drivetrain.data.language.conversation_samples import Cut, conversation_samples
from drivetrain.data.language.conversations import Conversation, Message
from drivetrain.data.language.row_schema import RowSchema
from drivetrain.data.language.sets import DataSet, open_sets, read_set
from drivetrain.data.language.stored_conversations import StoredConversations, stored_conversations
from drivetrain.data.language.vocabularies import byte_tokenizer
from drivetrain.data.row_blocks import RowFile
from drivetrain.errors import UserError
from drivetrain.workloads.language_data import LanguageReader
from tests.small_tokenizers import made
from tests.tiny_language import REWRITING, config, loaded, talk, write_lines

FIELD = "workload.data.train"
CALL = {"type": "function", "function": {"name": "look", "arguments": {"place": "房间", "n": 1}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
MESSAGES: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": "é" * (number % 7 + 1)}]
    for number in range(40)
]
ROWS: list[dict[str, Any]] = [{"messages": each} for each in MESSAGES]
ROWS[3] = {
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "a room", "name": "look"},
        {"role": "assistant", "content": "A room.", "reasoning_content": "They ask."},
    ],
    "tools": [TOOL],
}
ROWS[5]["messages"] = [
    *MESSAGES[5],
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no", "weight": 0},
]
ROWS[5]["messages"] += [{"role": "user", "content": "and"}, {"role": "assistant", "content": "yes"}]


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LARGE", 1)


def sets(folder: Path, *paths: str, **data: Any) -> list[DataSet]:
    given = LanguageData.model_validate({"train": list(paths), "cache": folder / "cache", **data})
    return [read_set(each, 0, FIELD) for each in open_sets(given.train, given, "conversations", FIELD)]


def written(folder: Path, kind: str, given: Sequence[Any] = ROWS) -> str:
    if kind == "jsonl":
        return write_lines(folder / "talks.jsonl", given)
    if kind == "folder":
        (folder / "shards" / "b").mkdir(parents=True)
        write_lines(folder / "shards" / "b" / "2.jsonl", given[25:])
        write_lines(folder / "shards" / "1.jsonl", given[:25])
        return str(folder / "shards")
    pq.write_table(
        pa.Table.from_pylist([{"messages": each} for each in MESSAGES]), folder / "a.parquet", row_group_size=7
    )
    return str(folder / "a.parquet")


@pytest.mark.parametrize("kind", ["jsonl", "folder", "parquet"])
def test_they_are_those_of_a_whole_reading(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, kind)
    (whole,) = sets(tmp_path, path)
    monkeypatch.setattr(rows, "LARGE", 1)
    monkeypatch.setattr(row_blocks, "AT_ONCE", 9)
    (found,) = sets(tmp_path, path)
    assert isinstance(found.conversations, StoredConversations)
    assert list(found.conversations) == list(whole.conversations)
    assert [each.where for each in found.conversations] == [each.where for each in whole.conversations]
    assert list(found.conversations.places) == [each.where for each in whole.conversations]
    assert (found.name, found.rows, list(found.bad)) == (whole.name, whole.rows, [])
    drawn, of_whole = (sets(tmp_path, {"path": path, "samples": 11})[0].conversations for _ in "12")  # type: ignore[arg-type]
    monkeypatch.setattr(rows, "LARGE", 1 << 40)
    assert list(drawn) == list(of_whole) == list(sets(tmp_path, {"path": path, "samples": 11})[0].conversations)  # type: ignore[arg-type]


TEXT = st.text(max_size=20)
CALLS = st.builds(
    lambda name, value: {"type": "function", "function": {"name": name, "arguments": {"a": value}}},
    TEXT,
    st.one_of(TEXT, st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.none(), st.lists(TEXT)),
)
MESSAGE = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    TEXT,
    st.lists(CALLS, max_size=2).map(tuple),
    st.booleans(),
    st.none() | TEXT,
    st.none() | TEXT,
    st.none() | TEXT,
)


@settings(deadline=None)
@given(st.lists(MESSAGE, max_size=3).map(tuple), st.lists(CALLS, max_size=2).map(tuple), TEXT)
def test_whatever_a_conversation_holds_comes_back(messages: Any, tools: Any, where: str) -> None:
    conversation = Conversation(messages, tools, where)
    again = StoredConversations.decoded(StoredConversations.encoded(conversation), where)
    assert (again, again.where) == (conversation, where)


@pytest.mark.usefixtures("all_are_large")
def test_the_second_start_reads_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "jsonl", ROWS * 40)
    (first,) = sets(tmp_path, path)
    read = []
    original = json_files.parsed_line

    def counted(line: bytes, number: int, *more: Any) -> Any:
        read.append(number)
        return original(line, number, *more)

    monkeypatch.setattr(json_files, "parsed_line", counted)
    (again,) = sets(tmp_path, path)
    assert (again.rows, len(again.conversations), list(again.conversations)[-1]) == (
        1600,
        1600,
        first.conversations[-1],
    )
    assert max(read) <= row_blocks.AT_ONCE, "the format is guessed of the first rows"


@pytest.mark.usefixtures("all_are_large")
def test_an_edit_that_keeps_the_length_is_found(tmp_path: Path) -> None:
    path = written(tmp_path, "jsonl")
    assert sets(tmp_path, path)[0].conversations[7].messages[0].content == "question 7"
    before = Path(path).stat()
    Path(path).write_text(Path(path).read_text().replace("question 7", "question X"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert sets(tmp_path, path)[0].conversations[7].messages[0].content == "question X"


@pytest.mark.usefixtures("all_are_large")
def test_other_columns_or_replacements_are_other_conversations(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"q": "a {{x}}", "r": "b", "s": "c"}] * 3)
    for column, replace, answer in (("r", {}, "b"), ("s", {}, "c"), ("s", {"c": "d"}, "d")):
        source: Any = {
            "path": path,
            "formatting": "alpaca",
            "columns": {"prompt": "q", "response": column},
            "replace": replace,
        }
        assert [each.messages[-1].content for each in sets(tmp_path, source)[0].conversations] == [answer] * 3


# --- what is wrong with rows ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("all_are_large")
def test_rows_that_are_no_conversation_are_the_same_at_each_start(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [talk("a", "b"), {"instruction": "a"}, talk("c", "d")])
    for _ in range(2):
        (found,) = sets(tmp_path, path)
        assert [(each.where, each.why) for each in found.bad] == [("a.jsonl line 2", "output is missing")]
        assert [each.where for each in found.conversations] == ["a.jsonl line 1", "a.jsonl line 3"]
        assert found.rows == 3


@pytest.mark.usefixtures("all_are_large")
def test_lines_that_cannot_be_read_are_all_reported_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_blocks, "AT_ONCE", 10)
    lines = [json.dumps(talk("a", "b"))] * 200
    for number in (25, 28, 62, 81, 101, 121, 141, 161):
        lines[number] = "{broken"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError) as caught:
        sets(tmp_path, str(tmp_path / "a.jsonl"))
    said = str(caught.value)
    assert all(f"line {number} is broken JSON" in said for number in (26, 29, 63, 82, 102))
    assert "and 3 more" in said
    assert not list((tmp_path / "cache").glob("conversations-*/contents.json"))


@pytest.mark.usefixtures("all_are_large")
def test_a_column_that_no_row_has_is_refused_with_the_nearest(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"question": "a", "answer": "b"}] * 3)
    source: Any = {"path": path, "formatting": "alpaca", "columns": {"prompt": "qestion", "response": "answer"}}
    with pytest.raises(UserError, match="did you mean question"):
        sets(tmp_path, source)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = Path(written(tmp_path, "jsonl"))

    class Changing(RowFile):
        def blocks(self) -> Any:
            path.write_text(path.read_text() + json.dumps(ROWS[0]) + "\n")
            return super().blocks()

    form = RowSchema("openai", by_usual_names=True)
    with pytest.raises(UserError, match="changed while it was read"):
        stored_conversations([Changing(path, "talks.jsonl", FIELD)], form, FIELD, {}, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("conversations-*/contents.json"))


def test_a_shard_that_vanishes_while_shards_are_read_is_named(tmp_path: Path) -> None:
    files = [Path(write_lines(tmp_path / f"shard-{number}.jsonl", ROWS)) for number in range(3)]

    class Vanishing(RowFile):
        def blocks(self) -> Any:
            files[-1].unlink(missing_ok=True)
            return super().blocks()

    form = RowSchema("openai", by_usual_names=True)
    with pytest.raises(UserError, match=r"shard-2\.jsonl vanished while it was read"):
        stored_conversations([Vanishing(file, file.name, FIELD) for file in files], form, FIELD, {}, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("conversations-*/contents.json"))


# --- tokens -----------------------------------------------------------------------------------------------------------


def cut(
    conversations: Sequence[Conversation], folder: Path, tokenizer: Any, template: str = "chatml", **data: Any
) -> Cut:
    given = LanguageData.model_validate({"train": "a.jsonl", "cache": folder / "cache", "length": 200, **data})
    return conversation_samples(conversations, ChatTemplate(tokenizer, template, "F"), tokenizer, given)


def described(found: Cut) -> dict[str, Any]:
    names = ("bad", "truncated", "too_long", "without_target", "split_conversations", "boundary_checked", "unended")
    return {"samples": loaded(found.samples), "names": list(found.samples.names)} | {
        name: getattr(found, name) for name in (*names, "boundary_mismatches")
    }


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"length": 40},
        {"length": 40, "too_long": "drop"},
        {"train_on": "last_response", "length": 45},
        {"train_on": "all"},
    ],
    ids=str,
)
def test_samples_are_those_of_conversations_in_memory(
    settings: dict[str, Any], processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, path = made("qwen"), written(tmp_path, "jsonl")
    (tmp_path / "rewriting.jinja").write_text(REWRITING.replace("m.role == 'user'", "m.role != 'assistant'"))
    (whole,) = sets(tmp_path, path)
    monkeypatch.setattr(rows, "LARGE", 1)
    monkeypatch.setattr(block_work, "BLOCK_TEXTS", 7)
    monkeypatch.setattr(block_work, "MEASURED", 0.0)  # processes at once
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processes)))
    (stored,) = sets(tmp_path, path)
    some = np.array([2, 3, 5, 8, 39])
    for template in ("chatml", str(tmp_path / "rewriting.jinja")) if processes == 1 else ("chatml",):
        expected = cut(whole.conversations, tmp_path, tokenizer, template, **settings)
        assert described(cut(stored.conversations, tmp_path, tokenizer, template, **settings)) == described(expected)
        expected = cut([whole.conversations[index] for index in some], tmp_path, tokenizer, template, **settings)
        assert isinstance(stored.conversations, StoredConversations)
        found = cut(stored.conversations.taken(some), tmp_path, tokenizer, template, **settings)
        assert described(found) == described(expected)


@pytest.mark.usefixtures("all_are_large")
def test_a_template_that_cannot_tell_replies_is_refused_in_words_by_several_processes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd.jinja").write_text("{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}")
    monkeypatch.setattr(block_work, "BLOCK_TEXTS", 7)
    monkeypatch.setattr(block_work, "MEASURED", 0.0)  # processes at once
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    (stored,) = sets(tmp_path, written(tmp_path, "jsonl"))
    with pytest.raises(UserError, match="does not tell replies from prompts"):
        cut(stored.conversations, tmp_path, made("qwen"), str(tmp_path / "odd.jinja"))


KILLED = """
import pickle, sys, time
from pathlib import Path
from drivetrain.data import block_work
from drivetrain.data.language.conversation_tokens import conversation_tokens
original = block_work.make_block
def slow(work, number):
    original(work, number)
    time.sleep(0.1)
block_work.make_block, block_work.BLOCK_TEXTS = slow, 3
conversations, template, tokenizer = pickle.load(open(sys.argv[1] + "/given", "rb"))
conversation_tokens(conversations, template, tokenizer, "responses", Path(sys.argv[1]) / "cache")
"""


@pytest.mark.usefixtures("all_are_large")
def test_a_killed_tokeniser_is_gone_on_from_and_the_samples_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    template = ChatTemplate(tokenizer, "chatml", "F")
    (stored,) = sets(tmp_path, written(tmp_path, "jsonl"))
    (tmp_path / "given").write_bytes(pickle.dumps((stored.conversations, template, tokenizer)))
    blocks = "conversation-tokens-*/block-*.npz"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)]) as builder:
        deadline = time.monotonic() + 60
        while len(list((tmp_path / "cache").glob(blocks))) < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
        builder.kill()
    finished = len(list((tmp_path / "cache").glob(blocks)))
    assert 4 <= finished < 14
    original, again = block_work.make_block, []

    def counted(work: Any, number: int) -> None:
        again.append(number)
        original(work, number)

    monkeypatch.setattr(block_work, "make_block", counted)
    monkeypatch.setattr(block_work, "BLOCK_TEXTS", 3)
    found = cut(stored.conversations, tmp_path, tokenizer)
    assert len(again) == 14 - finished
    assert described(found) == described(cut(list(stored.conversations), tmp_path, tokenizer))
    assert not list((tmp_path / "cache").glob(blocks))


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["bytes", "characters", "bpe"])
def test_a_run_has_the_same_samples_held_out_and_reported(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with replies that the template refuses, rows that are dropped, and placeholders."""
    given = [talk(f"say {number}", "hello " * (number % 9 + 1)) for number in range(60)]
    given[7], given[9] = talk("hi {{name}}", "I am {{name}}"), {"instruction": "no reply", "output": ""}
    model = {"tokenizer": tokenizer, **({"vocabulary_size": 300} if tokenizer == "bpe" else {})}
    options: dict[str, Any] = {"model": model, "bad_rows": 0.5, "evaluation_fraction": 0.2, "length": 48}
    readers = []
    for large in (1 << 40, 1, 1):
        monkeypatch.setattr(rows, "LARGE", large)
        reader = LanguageReader(config(tmp_path, given, **options), 5)
        made_samples = reader.read()
        assert made_samples.evaluation is not None
        readers.append((reader, loaded(made_samples.train), loaded(made_samples.evaluation), made_samples.train.names))
    (whole, *samples), *others = readers
    for reader, *found in others:
        assert found == samples
        assert (reader.warnings, reader.accounts) == (whole.warnings, whole.accounts)
    for words in ("{{name}}", "output is empty"):
        assert any(words in each for each in whole.warnings)
    kinds = Counter(entry.kind for entry in entries(tmp_path / "cache"))
    assert (kinds["conversations"], kinds["tokens of conversations"]) == (1, 2)


# --- documents --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_large_sets_of_documents_are_the_same_text(
    tokenizer: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents: list[dict[str, Any]] = [{"text": f"document {number} é " + "x" * number} for number in range(60)]
    documents[8] = {"text": " "}
    model = {"tokenizer": tokenizer, **({"vocabulary_size": 300} if tokenizer == "bpe" else {})}
    options: dict[str, Any] = {"stage": "pretrain", "model": model, "bad_rows": "drop", "evaluation_fraction": 0.2}
    monkeypatch.setattr(block_work, "BLOCK_TEXTS", 7)
    monkeypatch.setattr(block_work, "MEASURED", 0.0)  # processes at once
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processes)))
    found = []
    for large in (1 << 40, 1, 1):
        monkeypatch.setattr(rows, "LARGE", large)
        reader = LanguageReader(config(tmp_path, documents, **options), 5)
        samples = reader.read()
        found.append((loaded(samples.train), loaded(samples.evaluation), samples.train.names, reader.warnings))
        assert any("has no text" in each for each in reader.warnings)
    assert found[0] == found[1] == found[2]
    assert len(found[0][0]) >= 5
    kinds = Counter(entry.kind for entry in entries(tmp_path / "cache"))
    assert (kinds["documents"], kinds["tokens of texts"]) == (1, 2)


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize("stage", ["sft", "pretrain"])
def test_a_large_set_without_a_row_that_can_be_used_is_refused_in_words(stage: str, tmp_path: Path) -> None:
    given: Any = [{"instruction": "", "output": "", "text": " "}] * 20
    with pytest.raises(UserError, match=r"(no sample is left|cannot be used)"):
        LanguageReader(config(tmp_path, given, stage=stage, bad_rows=1.0), 0).read()
