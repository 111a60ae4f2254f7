"""Prompts to answer: all before the last reply, as inference feeds it; the reply is the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.errors import UserError
from tests.workloads.policy_cases import workload

TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
]


def prompts(folder: Path, **data: Any) -> list[tuple[str, str]]:
    work = workload(folder, data={"evaluation_fraction": 0, **data})
    found = [work.train.load(index, 0) for index in range(len(work.train))]
    return [(work.tokenizer.decode(each.ids.tolist()), each.reference) for each in found]


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
