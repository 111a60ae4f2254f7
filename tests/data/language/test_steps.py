"""Answers that are marked step by step: TRL's layout of them, what is wrong with a row, and how a long one is cut."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from drivetrain.config.language_data import LanguageData
from drivetrain.data.language.chat import ChatTemplate
from drivetrain.data.language.conversation_samples import Cut
from drivetrain.data.language.samples import StepSamples
from drivetrain.data.language.sets import bad_row_problems, open_sets, read_set
from drivetrain.data.language.step_samples import step_samples
from drivetrain.data.language.stored_conversations import StoredConversations
from drivetrain.data.language.vocabularies import byte_tokenizer
from drivetrain.errors import UserError
from tests.tiny_language import chatml, write_lines

FIELD = "workload.data.train"
ROW = {"prompt": "2 + 3 + 4?", "completions": ["2 + 3 = 5", "5 + 4 = 8"], "labels": [True, False]}


def read(folder: Path, rows: list[Mapping[str, Any]], **source: Any) -> tuple[Any, list[str]]:
    path = write_lines(folder / "steps.jsonl", rows)
    data = LanguageData.model_validate({"train": {"path": path, **source}, "cache": folder / "cache"})
    [opened] = open_sets(data.train, data, "steps", FIELD)
    found = read_set(opened, 0, FIELD)
    assert opened.notes == []
    return found.conversations, [each.why for each in bad_row_problems([found], FIELD)]


def samples(
    folder: Path, rows: list[Mapping[str, Any]], template: str = "chatml", separator: str = "\n", **data: Any
) -> Cut[StepSamples]:
    talks, bad = read(folder, rows)
    assert bad == []
    settings = LanguageData.model_validate({"train": "a", "cache": folder / "cache", **data})
    tokenizer = byte_tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return step_samples(talks, ChatTemplate(tokenizer, template, "F"), tokenizer, settings, separator)


def by_trl(prompt: list[int], row: Mapping[str, Any], separator: str = "\n") -> tuple[list[int], list[int]]:
    """The ids and labels of TRL's trainer of process rewards: -100 but at the end of a step."""
    ids, labels = list(prompt), [-100] * len(prompt)
    for step, label in zip(row["completions"], row["labels"], strict=True):
        own = [*step.encode(), *separator.encode()]
        ids += own
        labels += [-100] * (len(own) - 1) + [int(label)]
    return ids, labels


@pytest.mark.parametrize("separator", ["\n", "\n\n", ""])
def test_tokens_and_labels_are_those_of_trls_layout_behind_the_prompt(tmp_path: Path, separator: str) -> None:
    for template, prompt in (("plain", list(b"2 + 3 + 4?")), ("chatml", chatml(ROW["prompt"], "")[0][:-2])):
        cut = samples(tmp_path, [ROW], template, separator)
        own, marks = cut.samples.load(0, 0)
        ids, labels = by_trl(prompt, ROW, separator)
        assert own[0].tolist() == ids
        assert [int(mark) if end else -100 for end, mark in zip(own[1], marks, strict=True)] == labels


def test_prompts_may_be_messages_and_columns_have_other_names(tmp_path: Path) -> None:
    talked = {"question": [{"role": "user", "content": "2 + 3 + 4?"}], "given": ["a"], "marks": [1]}
    named = {"prompt": "question", "completions": "given", "labels": "marks"}
    [talk], bad = read(tmp_path, [talked], columns=named)
    assert bad == []
    assert talk.steps == (("a", True),)
    assert [each.content for each in talk.messages] == ["2 + 3 + 4?", "a"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({**ROW, "labels": [True]}, "it has 2 steps and 1 labels"),
        ({**ROW, "labels": [True, "maybe"]}, "the label of step 2 is 'maybe', neither true nor false"),
        ({**ROW, "labels": [True, None]}, "the label of step 2 is missing"),
        ({**ROW, "completions": ["a", " "]}, "step 2 is empty"),
        ({**ROW, "completions": [], "labels": []}, "completions is empty"),
        ({**ROW, "completions": "a"}, "completions is a text, not a list"),
        ({"prompt": "a", "labels": [True]}, "completions is missing"),
        ({**ROW, "prompt": ""}, "prompt is empty"),
    ],
)
def test_what_is_no_answer_in_steps_is_named(tmp_path: Path, row: Mapping[str, Any], why: str) -> None:
    _, bad = read(tmp_path, [ROW, row])
    assert len(bad) == 1
    assert why in bad[0]


def test_rows_without_marks_are_refused_and_marked_rows_lead_pairs_to_the_loss(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="have prompt, chosen: no column 'completions' or 'labels'"):
        read(tmp_path, [{"prompt": "a", "chosen": "b"}])
    with pytest.raises(UserError, match="have no form in alpaca"):
        read(tmp_path, [ROW], formatting="alpaca")
    path = write_lines(tmp_path / "steps.jsonl", [ROW])
    data = LanguageData.model_validate({"train": path})
    with pytest.raises(UserError, match=r"(?s)mark the steps of an answer.*loss: steps"):
        open_sets(data.train, data, "pairs", FIELD)


def test_a_long_answer_loses_the_beginning_of_its_prompt_and_then_its_last_steps(tmp_path: Path) -> None:
    row = {"prompt": "p" * 30, "completions": ["a" * 9, "b" * 9, "c" * 9], "labels": [True, False, True]}
    cut = samples(tmp_path, [row], "plain", length=40)
    (ids, ends), labels = cut.samples.load(0, 0)
    assert bytes(ids.tolist()) == b"p" * 20 + b"a" * 9 + b"\n" + b"b" * 9 + b"\n"
    assert (labels[ends].tolist(), cut.truncated) == ([True, False], 1)
    assert samples(tmp_path, [row], "plain", length=40, too_long="drop").too_long == 1
    with pytest.raises(UserError, match="line 1 has 60 tokens > 40"):
        samples(tmp_path, [row], "plain", length=40, too_long="error")
    unended = {**row, "completions": ["a" * 90], "labels": [True]}
    cut = samples(tmp_path, [unended, ROW], "plain", length=40)
    assert (cut.without_target, len(cut.samples)) == (1, 1)


def test_answers_on_disk_and_from_the_cache_give_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{**ROW, "prompt": f"ask {n}", "labels": [n % 2 == 0, n % 3 == 0]} for n in range(20)]
    held, again = samples(tmp_path, rows), samples(tmp_path, rows)
    monkeypatch.setattr("drivetrain.data.rows.LARGE", 1)
    talks, _ = read(tmp_path, rows)
    assert isinstance(talks, StoredConversations)
    stored = samples(tmp_path, rows)
    for other in (again, stored):
        for number in range(20):
            one, two = held.samples.load(number, 0), other.samples.load(number, 0)
            assert one.own[0].tolist() == two.own[0].tolist()
            assert one.own[1].tolist() == two.own[1].tolist()
            assert one.labels.tolist() == two.labels.tolist()
            assert held.samples.name(number) == other.samples.name(number)
