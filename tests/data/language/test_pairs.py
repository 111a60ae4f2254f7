"""Pairs of answers: LLaMA-Factory's rankings and TRL's formats say the same; what is no pair is named; both sides are
cut together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.config.language_data import LanguageData
from drivetrain.data.language.chat import ChatTemplate
from drivetrain.data.language.conversation_formats import read_conversation
from drivetrain.data.language.conversations import Conversation, Message
from drivetrain.data.language.pair_samples import pair_samples
from drivetrain.data.language.row_schema import RowSchema
from drivetrain.data.language.samples import PairSamples
from drivetrain.data.language.sets import bad_row_problems, open_sets, read_set
from drivetrain.data.language.stored_conversations import StoredConversations
from drivetrain.data.language.vocabularies import byte_tokenizer
from drivetrain.errors import UserError
from tests.properties import examples
from tests.tiny_language import chatml, write_lines

FIELD = "workload.data.train"
ASKED = {"role": "user", "content": "Hi"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("Hello", "Go"))
SHAREGPT = {
    "conversations": [{"from": "human", "value": "Hi"}],
    "chosen": {"from": "gpt", "value": "Hello"},
    "rejected": {"from": "gpt", "value": "Go"},
}
FORMS: dict[str, Mapping[str, Any]] = {
    "sharegpt": SHAREGPT,
    "sharegpt with texts": {**SHAREGPT, "chosen": "Hello", "rejected": "Go"},
    "openai": {"messages": [ASKED], "chosen": GOOD, "rejected": BAD},
    "alpaca": {"instruction": "Hi", "chosen": "Hello", "rejected": "Go"},
    "alpaca with an input": {"instruction": "H", "input": "i", "chosen": "Hello", "rejected": "Go"},
    "trl": {"prompt": "Hi", "chosen": "Hello", "rejected": "Go"},
    "trl, implicit": {"chosen": "Hi Hello", "rejected": "Hi Go"},
    "trl, messages": {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
    "trl, messages, implicit": {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    "trl, a message each": {"prompt": [ASKED], "chosen": GOOD, "rejected": BAD},
    "ultrafeedback": {
        "prompt": "Hi",
        "prompt_id": "1",
        "messages": [ASKED, GOOD],
        "chosen": [ASKED, GOOD],
        "rejected": [ASKED, BAD],
        "score_chosen": 8.0,
    },
    "ultrafeedback, all answers": {
        "instruction": "Hi",
        "completions": [
            {"model": "a", "response": "Go", "overall_score": 2.5},
            {"model": "b", "response": "Hello", "overall_score": 8},
            {"model": "c", "response": "Hm", "overall_score": 4.0},
        ],
    },
    "answers and scores": {"prompt": "Hi", "responses": ["Hm", "Hello", "Go"], "scores": [0, 1, -1]},
    "answers and ranks": {"prompt": "Hi", "responses": ["Hm", "Hello", "Go"], "ranks": [2, 1, 3]},
    "nectar": {"prompt": "Hi", "answers": [{"answer": "Go", "rank": 7.0}, {"answer": "Hello", "rank": 1.0}]},
    "scored messages": {"prompt": [ASKED], "completions": [[BAD], [GOOD]], "scores": [0.1, 0.7]},
}
SCORED = FORMS["answers and scores"]


def read(folder: Path, rows: list[Mapping[str, Any]], **source: Any) -> tuple[list[Conversation], list[str]]:
    path = write_lines(folder / "pairs.jsonl", rows)
    made = source.pop("pairs", "best_and_worst")
    data = LanguageData.model_validate({"train": {"path": path, **source}, "pairs": made})
    [opened] = open_sets(data.train, data, "pairs", FIELD)
    found = read_set(opened, 0, FIELD)
    assert opened.notes == []
    return list(found.conversations), [each.why for each in bad_row_problems([found], FIELD)]


def contents(messages: tuple[Message, ...]) -> list[tuple[str, str, bool]]:
    return [(each.role, each.content.strip(), each.trained) for each in messages]


@pytest.mark.parametrize("name", FORMS)
def test_each_format_gives_the_same_pair(tmp_path: Path, name: str) -> None:
    [pair], bad = read(tmp_path, [FORMS[name]])
    prompt = "H\ni" if "input" in name else "Hi"
    assert bad == []
    assert contents(pair.messages) == [("user", prompt, False), ("assistant", "Hello", True)]
    assert contents(pair.rejected) == [("user", prompt, False), ("assistant", "Go", True)]


def test_replies_before_the_answers_are_not_trained_and_longer_endings_are(tmp_path: Path) -> None:
    more = [GOOD, {"role": "user", "content": "Again"}, GOOD]
    [pair], _ = read(tmp_path, [{"prompt": [ASKED, GOOD, ASKED], "chosen": more, "rejected": [BAD]}])
    assert [each.trained for each in pair.messages] == [False, False, False, True, True, True]
    assert [each.content for each in pair.rejected] == ["Hi", "Hello", "Hi", "Go"]


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    rows = [{"question": "Hi", "good": "Hello", "bad": "Go"}]
    [pair], _ = read(tmp_path, rows, columns={"prompt": "question", "chosen": "good", "rejected": "bad"})
    assert pair.rejected[-1].content == "Go"
    [pair], _ = read(
        tmp_path, rows, formatting="trl", columns={"prompt": "question", "chosen": "good", "rejected": "bad"}
    )
    assert pair.messages[-1].content == "Hello"


def test_columns_of_scored_answers_may_have_other_names(tmp_path: Path) -> None:
    rows = [{"question": "Hi", "given": ["Hello", "Go"], "marks": [2, 1]}]
    named = {"prompt": "question", "completions": "given", "scores": "marks"}
    for more in ({}, {"formatting": "trl"}):
        [pair], _ = read(tmp_path, rows, columns=named, **more)
        assert (pair.messages[-1].content, pair.rejected[-1].content) == ("Hello", "Go")


@pytest.mark.parametrize(
    ("name", "row", "why"),
    [
        ("trl", {**FORMS["trl"], "rejected": "Hello"}, "chosen and rejected are the same: there is nothing to prefer"),
        ("sharegpt", {**SHAREGPT, "rejected": SHAREGPT["chosen"]}, "chosen and rejected are the same"),
        ("trl", {"chosen": "Hi Hello", "rejected": "Hi Hello"}, "chosen and rejected are the same"),
        ("trl", {**FORMS["trl"], "chosen": " "}, "chosen is empty"),
        ("trl", {**FORMS["trl"], "rejected": ""}, "rejected is empty"),
        ("alpaca", {**FORMS["alpaca"], "rejected": None}, "rejected is missing"),
        ("trl, messages", {"prompt": [ASKED], "chosen": [GOOD]}, "rejected is missing"),
        ("trl, messages", {"prompt": [ASKED], "chosen": [], "rejected": [BAD]}, "chosen is empty"),
        (
            "trl, implicit",
            {"chosen": "Hello", "rejected": "Go"},
            "it has no 'prompt', and its answers do not begin alike",
        ),
        (
            "trl, messages, implicit",
            {"chosen": [GOOD], "rejected": [BAD]},
            "chosen and rejected have no prompt in common",
        ),
        (
            "trl, messages, implicit",
            {"chosen": [ASKED, GOOD], "rejected": [ASKED]},
            "the rejected side: no message is the assistant's",
        ),
        (
            "trl, messages, implicit",
            {"chosen": [ASKED, GOOD, ASKED, GOOD], "rejected": [ASKED, GOOD, {**ASKED, "content": "x"}, GOOD]},
            "chosen and rejected differ in message 3, which is no reply",
        ),
        (
            "trl, messages",
            {"prompt": 3, "chosen": [GOOD], "rejected": [BAD]},
            "the prompt is a number, not a list of messages",
        ),
        ("answers and scores", {**SCORED, "scores": [1, 1, 1]}, "3 answers with the same score"),
        ("answers and scores", {**SCORED, "scores": [1, 2]}, "it has 3 answers and 2 scores"),
        ("answers and ranks", {"prompt": "Hi", "responses": ["Go"], "ranks": [1, 2]}, "1 answers and 2 ranks"),
        (
            "nectar",
            {"prompt": "Hi", "answers": [{"answer": "a", "rank": "1"}]},
            "the rank of answer 1 is '1', no finite",
        ),
        ("answers and scores", {**SCORED, "scores": [1, None, 2]}, "the score of answer 2 is 'None', no finite number"),
        ("answers and scores", {**SCORED, "responses": ["Hi"], "scores": [1]}, "nothing beside it to compare with"),
        ("answers and scores", {**SCORED, "responses": "Hi"}, "responses is a text, not a list of answers"),
        ("answers and scores", {**SCORED, "responses": ["Hm", "Go", "Go"]}, "the same: there is nothing to prefer"),
        ("answers and scores", {**SCORED, "responses": ["Hm", "Hello", 3]}, "rejected is a number, not a text"),
    ],
)
def test_what_is_no_pair_is_named(tmp_path: Path, name: str, row: Mapping[str, Any], why: str) -> None:
    """name: the format of the row before it."""
    _, bad = read(tmp_path, [FORMS[name], row])
    assert len(bad) == 1
    assert why in bad[0]


def test_a_column_that_no_row_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="have instruction, chosen: no column 'rejected' of a pair"):
        read(tmp_path, [{"instruction": "Hi", "chosen": "Hello"}])
    with pytest.raises(UserError, match="no column 'chosen' or 'rejected' of a pair"):
        read(tmp_path, [{"instruction": "Hi", "output": "Hello"}])


# --- all pairs of a row -----------------------------------------------------------------------------------------------


def sides_of(pairs: Sequence[Conversation]) -> list[tuple[str, str]]:
    return [(pair.messages[-1].content, pair.rejected[-1].content) for pair in pairs]


def test_every_two_answers_whose_scores_differ_are_a_pair_the_best_answers_first(tmp_path: Path) -> None:
    rows = [{"prompt": "Hi", "responses": ["b", "a", "d", "c"], "scores": [3, 9, 1, 3]}, SCORED]
    pairs, bad = read(tmp_path, rows, pairs="all")
    assert bad == []
    assert sides_of(pairs)[:5] == [("a", "b"), ("a", "c"), ("a", "d"), ("b", "d"), ("c", "d")]
    assert sides_of(pairs)[5:] == [("Hello", "Hm"), ("Hello", "Go"), ("Hm", "Go")]
    assert [pair.where[-6:] for pair in pairs] == ["line 1"] * 5 + ["line 2"] * 3


@given(st.lists(st.integers(0, 3), min_size=2, max_size=6))
@settings(max_examples=examples(60), deadline=None)
def test_pairs_are_those_that_a_double_loop_finds(tmp_path_factory: Any, scores: list[int]) -> None:
    row = {"prompt": "Hi", "responses": [f"answer {n}" for n in range(len(scores))], "scores": scores}
    pairs, bad = read(tmp_path_factory.mktemp("rows"), [row], pairs="all")
    expected = [(f"answer {i}", f"answer {j}") for i, a in enumerate(scores) for j, b in enumerate(scores) if a > b]
    assert sorted(sides_of(pairs)) == sorted(expected)
    assert len(bad) == (not expected)


def test_one_answer_with_two_scores_is_a_contradiction_and_its_row_is_named(tmp_path: Path) -> None:
    twice = {"prompt": "Hi", "responses": ["Hello", "Go", "Go"], "scores": [3, 2, 1]}
    pairs, bad = read(tmp_path, [SCORED, twice], pairs="all")
    assert len(pairs) == 3
    assert "line 2: chosen and rejected are the same" in bad[0]


def test_rows_are_drawn_with_all_their_pairs_in_memory_and_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"ask {n}", "responses": ["a", "b", "c"], "scores": [1, 2, n % 2 + 2]} for n in range(40)]
    held, _ = read(tmp_path, rows, pairs="all", samples=15)
    monkeypatch.setattr("drivetrain.data.rows.LARGE", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stored, _ = read(tmp_path, rows, pairs="all", samples=15)
    assert held == stored
    counts = Counter(pair.where for pair in held)
    assert len(counts) == 15
    assert all(count == (3 if int(where.split()[-1]) % 2 == 0 else 2) for where, count in counts.items())


TEXTS = st.text(max_size=12)


@given(st.dictionaries(st.sampled_from(["prompt", "chosen", "rejected"]), TEXTS | st.none() | st.integers()))
@settings(max_examples=examples(200), deadline=None)
def test_any_row_is_a_pair_whose_sides_differ_or_has_a_reason(tmp_path_factory: Any, row: dict[str, Any]) -> None:
    given = {"prompt": None, "chosen": None, "rejected": None, **row}
    pairs, bad = read(tmp_path_factory.mktemp("rows"), [given])
    assert len(pairs) + len(bad) == 1
    for pair in pairs:
        assert pair.messages[:-1] == pair.rejected[:-1]
        assert pair.messages[-1].content != pair.rejected[-1].content


# --- samples ----------------------------------------------------------------------------------------------------------


def samples(folder: Path, rows: list[Mapping[str, Any]], **data: Any) -> Any:
    pairs, _ = read(folder, rows)
    settings = LanguageData.model_validate({"train": "a", "cache": folder / "cache", **data})
    tokenizer = byte_tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    template = ChatTemplate(tokenizer, "chatml", "F")
    return pair_samples(pairs, template, tokenizer, settings)


def row(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def test_each_side_has_the_tokens_of_its_own_conversation(tmp_path: Path) -> None:
    cut = samples(tmp_path, [row("ask", "yes", "certainly not")])
    [pair] = [cut.samples.load(index, 0) for index in range(len(cut.samples))]
    for (ids, targets), answer in zip(pair.sides, ("yes", "certainly not"), strict=True):
        whole, trained = chatml("ask", answer)
        assert (ids.tolist(), targets.tolist()) == (whole[:-1], trained[:-1]), "the line's end behind it is no target"


@pytest.mark.parametrize(
    ("prompt", "answers", "kept"),
    [(60, (5, 9), 30), (60, (5, 30), 20), (10, (30, 60), 20), (60, (60, 5), 20)],
)
def test_long_pairs_keep_the_same_end_of_the_prompt_and_the_beginnings_of_both_answers(
    tmp_path: Path, prompt: int, answers: tuple[int, int], kept: int
) -> None:
    whole = [chatml("p" * prompt, letter * count)[0] for letter, count in zip("ab", answers, strict=True)]
    before = len(chatml("p" * prompt, "")[0]) - 2  # a reply's end and the line's
    cut = samples(tmp_path, [row("p" * prompt, "a" * answers[0], "b" * answers[1])], length=40)
    assert (cut.truncated, len(cut.samples)) == (1, 1)
    pair = cut.samples.load(0, 0)
    left = min(before, max(40 - max(answers) - 1, 20))
    assert abs(left - kept) <= 1
    for (ids, targets), full in zip(pair.sides, whole, strict=True):
        assert ids.tolist() == full[before - left :][: min(40, len(full) - 1 - before + left)]
        assert targets.sum() == len(ids) - left


def test_pairs_that_differ_beyond_the_length_alone_are_left_out(tmp_path: Path) -> None:
    rows = [row("ask", "a" * 60 + "b", "a" * 60 + "c"), row("ask", "a", "b")]
    cut = samples(tmp_path, rows, length=40)
    assert (cut.alike, cut.truncated, len(cut.samples)) == (1, 0, 1)
    assert samples(tmp_path, rows, length=40, too_long="drop").too_long == 1
    with pytest.raises(UserError, match="line 1 has 85 tokens > 40"):
        samples(tmp_path, rows, length=40, too_long="error")


def test_a_template_that_rewrites_history_refuses_the_pair_it_cannot_render_as_one_sample(tmp_path: Path) -> None:
    from tests.tiny_language import REWRITING

    (tmp_path / "rewriting.jinja").write_text(REWRITING)
    again = [GOOD, {"role": "user", "content": "Again"}, GOOD]
    pairs, _ = read(tmp_path, [{"prompt": [ASKED], "chosen": again, "rejected": [BAD]}, {**FORMS["trl, messages"]}])
    tokenizer = byte_tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    template = ChatTemplate(tokenizer, str(tmp_path / "rewriting.jinja"), "F")
    cut = pair_samples(pairs, template, tokenizer, LanguageData(train="a", cache=tmp_path / "cache"))
    assert len(cut.samples) == 1
    assert "a side is more than one sample" in cut.bad[0].why


def test_pairs_on_disk_give_the_same_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(f"ask {n}", f"yes {n}", f"no {n} " * (n % 5 + 1)) for n in range(40)]
    held = samples(tmp_path, rows)
    monkeypatch.setattr("drivetrain.data.rows.LARGE", 1)
    pairs, _ = read(tmp_path, rows, samples=30)
    everything, _ = read(tmp_path, rows)
    assert (len(pairs), len(everything)) == (30, 40)
    data = LanguageData(train=str(tmp_path / "pairs.jsonl"), cache=tmp_path / "cache")
    [opened] = open_sets(data.train, data, "pairs", FIELD)
    stored = read_set(opened, 0, FIELD).conversations
    assert isinstance(stored, StoredConversations)
    tokenizer = byte_tokenizer(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    found = pair_samples(stored, ChatTemplate(tokenizer, "chatml", "F"), tokenizer, data)
    assert_same(held.samples, found.samples)


def assert_same(one: PairSamples, other: PairSamples) -> None:
    assert len(one) == len(other)
    for index in range(len(one)):
        for (ids, targets), (others, trained) in zip(one.load(index, 0).sides, other.load(index, 0).sides, strict=True):
            assert np.array_equal(ids, others)
            assert np.array_equal(targets, trained)
        assert one.name(index) == other.name(index)


def test_llama_factorys_demonstration_of_preferences_is_read_by_name(shared_data: Path) -> None:
    raw = json.loads((shared_data / "sft" / "dpo_en_demo.json").read_text())
    data = LanguageData.model_validate({"train": "dpo_en_demo", "registry": str(shared_data / "sft")})
    [opened] = open_sets(data.train, data, "pairs", FIELD)
    found = read_set(opened, 0, FIELD)
    assert [each.why for each in found.bad] == []
    assert [each.rejected[-1].content for each in found.conversations] == [each["rejected"]["value"] for each in raw]
    assert [each.messages[-1].content for each in found.conversations] == [each["chosen"]["value"] for each in raw]


def test_pairs_of_llama_factorys_version_1_are_read() -> None:
    """As its converter takes them, and in its own form, whose columns a run file names."""
    asked = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "ask"}]
    sides = {side: [*asked, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    typed = {
        f"{side}_messages": [
            {**each, "content": [{"type": "text", "value": each["content"]}], "loss_weight": float(number == 2)}
            for number, each in enumerate(messages)
        ]
        for side, messages in sides.items()
    }
    names = {"chosen": "chosen_messages", "rejected": "rejected_messages"}
    for row, form in (
        (sides, RowSchema("trl", ranking=True, pairs=True)),
        (typed, RowSchema("trl", names, ranking=True, pairs=True)),
    ):
        found = read_conversation(row, form, "a row", {})
        assert [each.content for each in found.messages] == ["Be short.", "ask", "chosen"]
        assert found.rejected is not None
        assert found.rejected[-1].content == "rejected"
        assert [each.trained for each in found.messages] == [False, False, True]
