"""Prompts of a file that is predicted for: rows without replies, in every kind of file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drivetrain.errors import UserError
from drivetrain.workloads.generating import Prompt
from tests.tiny_language import ROWS, chatml, talk, workload, write_lines

USER, REPLY = ({"role": role, "content": content} for role, content in (("user", "say 1"), ("assistant", "1")))


def found(folder: Path, path: Path, **given: Any) -> list[Prompt] | None:
    prompts = workload(folder, ROWS, **given).prompts_in(str(path))
    return None if prompts is None else [*prompts]


def asked(prompts: Sequence[Prompt] | None) -> list[tuple[str | None, str, str | None]]:
    """Where each is, the user's words, and the reference. Checks that they end where a reply begins."""
    marks = ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
    assert prompts is not None
    assert all(each.text.startswith(marks[0]) and each.text.endswith(marks[1]) for each in prompts)
    return [(each.name, each.text[len(marks[0]) : -len(marks[1])], each.reference) for each in prompts]


def test_a_text_file_holds_a_prompt_a_line_as_stdin_does(tmp_path: Path) -> None:
    lines = "\ufeff很好\r\n\n  \nsay 1\x0c\n".encode()
    (tmp_path / "p.txt").write_bytes(lines)
    (tmp_path / "p.txt.gz").write_bytes(gzip.compress(lines))
    expected = [("p.txt line 1", "很好", None), ("p.txt line 4", "say 1\x0c", None)]
    assert asked(found(tmp_path, tmp_path / "p.txt")) == expected
    assert [each[1] for each in asked(found(tmp_path, tmp_path / "p.txt.gz"))] == ["很好", "say 1\x0c"]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "say 1"},
        {"instruction": "say 1"},
        {"instruction": "say 1", "input": "", "output": ""},
        {"question": "say 1", "answer": None},
        {"messages": [USER]},
        {"conversations": [{"from": "human", "value": "say 1"}]},
        {"prompt": [USER]},
        {"prompt": "say 1", "messages": [USER]},
    ],
)
def test_rows_with_a_prompt_alone_are_prompts(row: dict[str, Any], tmp_path: Path) -> None:
    prompts = found(tmp_path, Path(write_lines(tmp_path / "p.jsonl", [row])))
    assert asked(prompts) == [("p.jsonl line 1", "say 1", None)]
    assert prompts is not None
    ids, trained = chatml("say 1", "")
    assert prompts[0].ids == tuple(ids[: trained.index(True)]), "the tokens that training puts before a reply"


def test_tables_and_json_hold_prompts_too(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "p.csv").write_text("id,prompt\n7,say 1\n8,say 2\n")
    (tmp_path / "p.json").write_text(json.dumps([{"prompt": "say 1"}, {"prompt": "say 2"}]))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["say 1", "say 2"]}), tmp_path / "p.parquet")
    for name in ("p.csv", "p.json", "p.parquet"):
        expected = [(f"{name} row 1", "say 1", None), (f"{name} row 2", "say 2", None)]
        assert asked(found(tmp_path, tmp_path / name)) == expected


def test_of_rows_with_and_without_replies_all_are_prompts_with_references_where_there_are_some(tmp_path: Path) -> None:
    rows = [talk("say 1", "1"), {"instruction": "say 2", "input": "loudly"}]
    assert asked(found(tmp_path, Path(write_lines(tmp_path / "p.jsonl", rows)))) == [
        ("p.jsonl line 1", "say 1", "1"),
        ("p.jsonl line 2", "say 2\nloudly", None),
    ]
    talks = [{"messages": [USER, REPLY]}, {"messages": [USER, REPLY, USER]}]
    first, second = found(tmp_path, Path(write_lines(tmp_path / "m.jsonl", talks))) or []
    assert (first.reference, second.reference) == ("1", None)
    assert "assistant\n1<|im_end|>" in second.text, "the conversation so far"
    (tmp_path / "t.csv").write_text("prompt,response\nsay 1,1\nsay 2,\n")
    assert [each[2] for each in asked(found(tmp_path, tmp_path / "t.csv"))] == ["1", None]


def test_the_runs_own_names_of_columns_and_its_system_message_hold(tmp_path: Path) -> None:
    source = {
        "path": write_lines(tmp_path / "own.jsonl", [{"q": "x", "a": "y"}] * 4),
        "columns": {"prompt": "q", "response": "a"},
    }
    path = write_lines(tmp_path / "p.jsonl", [{"q": "say 1"}, {"q": "say 2", "a": "2"}])
    prompts = workload(tmp_path, train=source, system="Be brief.").prompts_in(path)
    assert prompts is not None
    assert [each.reference for each in prompts] == [None, "2"]
    assert all(each.text.startswith("<|im_start|>system\nBe brief.<|im_end|>") for each in prompts)


def test_prompts_of_messages_have_the_answers_beside_them_as_references(tmp_path: Path) -> None:
    rows = [{"prompt": [USER], "answer": 1}, {"prompt": [USER], "answer": None}]
    prompts = found(tmp_path, Path(write_lines(tmp_path / "p.jsonl", rows)))
    assert [each[2] for each in asked(prompts)] == ["1", None]
    assert found(tmp_path, Path(write_lines(tmp_path / "whole.jsonl", rows[:1]))) is None, (
        "the reader of samples has it"
    )


def test_what_has_all_its_replies_or_no_prompt_is_left_to_the_reader_of_samples(tmp_path: Path) -> None:
    others = [
        [talk("say 1", "1")],
        [{"messages": [USER, REPLY]}],
        [{"text": "say 1"}],
        [{"instruction": "say 1", "messages": [USER]}],
        [{"prompt": "say 1", "chosen": "1", "rejected": "2"}],
    ]
    for rows in others:
        assert found(tmp_path, Path(write_lines(tmp_path / "p.jsonl", rows))) is None
    assert found(tmp_path, tmp_path / "nowhere.jsonl") is None


def test_bad_rows_are_reported_at_once_with_their_lines(tmp_path: Path) -> None:
    rows = [{"prompt": "say 1"}, {"prompt": " "}, {"prompt": 3}, {"prompt": "x" * 99}]
    path = Path(write_lines(tmp_path / "p.jsonl", rows))
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(UserError) as refused:
        found(tmp_path, path)
    whys = [each.why for each in refused.value.problems]
    assert {each.field for each in refused.value.problems} == {"--data"}
    expected = ("line 5 is broken JSON", "line 2: prompt is empty", "line 3: prompt is a number", "line 4: 'xxx")
    assert all(part in why for part, why in zip(expected, whys, strict=True))
    write_lines(path, rows[:1] * 3 + rows[1:2])
    assert len(found(tmp_path, path, bad_rows="drop") or []) == 3


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([{"role": "system", "content": "x"}], "a system message alone"),
        ([USER, {"role": "system", "content": "x"}], "ends with a message of the system"),
        ([{"role": "user", "content": ""}], "message 1 is empty"),
        ([{"role": "nobody", "content": "x"}], "unknown role 'nobody'"),
    ],
)
def test_a_conversation_that_asks_nothing_is_a_bad_row(messages: list[Any], why: str, tmp_path: Path) -> None:
    rows = [{"messages": [USER]}, {"messages": messages}]
    with pytest.raises(UserError, match=f"p.jsonl line 2: .*{why}"):
        found(tmp_path, Path(write_lines(tmp_path / "p.jsonl", rows)))


def test_a_run_of_texts_goes_on_with_prompts_and_keeps_text_files_as_texts(tmp_path: Path) -> None:
    work = workload(tmp_path, [{"text": f"text {number}"} for number in range(20)], stage="pretrain")
    [prompt] = work.prompts_in(write_lines(tmp_path / "p.jsonl", [{"prompt": "The room"}])) or []
    assert (prompt.text, prompt.ids) == ("The room", tuple(b"The room"))
    (tmp_path / "p.txt").write_text("The room\n")
    assert work.prompts_in(str(tmp_path / "p.txt")) is None
    with pytest.raises(UserError, match="2 messages before the answer, and the model has no chat template"):
        work.prompts_in(write_lines(tmp_path / "m.jsonl", [{"messages": [{"role": "system", "content": "x"}, USER]}]))
