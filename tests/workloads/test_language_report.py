"""Tests the report of a language model's data, against conversations whose tokens are written down by hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drivetrain.workloads.language_report import LOOKED_AT, accounts_without_samples
from tests.tiny_language import ROWS, chatml, config, talk, workload, write_lines

VARIED = [talk(f"say {number}", "hello " * (number % 7) + str(number)) for number in range(30)]


def reported(folder: Path, rows: Any = None, **given: Any) -> dict[str, Any]:
    """With evaluation data of their own by default, so that no row is held out."""
    given.setdefault("evaluation", write_lines(folder / "other.jsonl", [talk("what?", "nothing")]))
    report = dict(workload(folder, rows, **given).data_report)
    assert json.loads(json.dumps(report)) == report
    return report


def test_tokens_and_targets_are_those_of_every_sample(tmp_path: Path) -> None:
    report = reported(tmp_path, VARIED, length=100)
    by_hand = [chatml(row["instruction"], row["output"]) for row in VARIED]
    assert report["tokens"] == sum(len(ids) for ids, _ in by_hand)
    assert report["target tokens"] == sum(sum(trained) for _, trained in by_hand)
    assert report["training samples"] == len(VARIED)
    assert report["template"] == "chatml"


def test_the_first_token_is_no_target_where_everything_is_trained(tmp_path: Path) -> None:
    report = reported(tmp_path, VARIED, length=100, train_on="all")
    assert report["target tokens"] == report["tokens"] - len(VARIED)
    assert report["sample"]["target tokens"] == report["sample"]["tokens"] - 1


def test_lengths_are_counted_into_bins_that_hold_every_sample(tmp_path: Path) -> None:
    report = reported(tmp_path, VARIED, length=100)
    lengths = [len(chatml(row["instruction"], row["output"])[0]) for row in VARIED]
    words = report["lengths"]
    assert words["mean"] == pytest.approx(np.mean(lengths), abs=0.05)
    assert words["longest"] == max(lengths)
    assert words["percentiles 5, 50, 95"] == [round(float(np.percentile(lengths, share))) for share in (5, 50, 95)]
    assert words["bins"][0]["from"] == min(lengths)
    assert words["bins"][-1]["to"] == max(lengths)
    for each in words["bins"]:
        assert each["samples"] == sum(each["from"] <= length <= each["to"] for length in lengths), each
    assert sum(each["samples"] for each in words["bins"]) == len(lengths)


def test_padding_is_what_a_padded_batch_would_hold_beside_its_tokens(tmp_path: Path) -> None:
    """Thirty samples are one batch of at most 32."""
    report = reported(tmp_path, VARIED, length=100)
    lengths = [len(chatml(row["instruction"], row["output"])[0]) for row in VARIED]
    padded = report["padding"]
    assert padded["padded to the length"] == pytest.approx(1 - np.mean(lengths) / 100, abs=1e-4)
    assert padded["padded to the batch's longest"] == pytest.approx(1 - np.mean(lengths) / max(lengths), abs=1e-4)
    assert padded["packing gains over the length"] == pytest.approx(100 / np.mean(lengths), abs=0.01)
    assert padded["packing gains over the batch's longest"] == pytest.approx(max(lengths) / np.mean(lengths), abs=0.01)


def test_every_row_is_accounted_for(tmp_path: Path) -> None:
    long_reply, long_question = talk("say", "x" * 100), talk("x" * 100, "no")
    rows = [*ROWS, talk("", "lost"), {"instruction": "lost"}, long_reply, long_question, long_question]
    (account, evaluation) = reported(tmp_path, rows, bad_rows=1.0, length=90)["sets"]
    assert (account["rows"], account["unusable rows"], account["samples"]) == (len(rows), 2, len(ROWS) + 1)
    assert (account["truncated"], account["without target"], account["too long"]) == (1, 2, 0)
    assert account["truncated share"] == round(1 / (len(ROWS) + 1), 4)
    assert account["reasons"] == ["train.jsonl line 21: instruction is empty", "train.jsonl line 22: output is missing"]
    assert account["by reason"] == [
        "1 because instruction is empty (first train.jsonl line 21)",
        "1 because output is missing (first train.jsonl line 22)",
    ]
    assert (evaluation["for"], evaluation["rows"], evaluation["samples"]) == ("evaluation", 1, 1)
    dropped = reported(tmp_path, rows, bad_rows=1.0, length=90, too_long="drop")["sets"][0]
    assert (dropped["truncated"], dropped["without target"], dropped["too long"]) == (0, 0, 3)


def test_what_is_held_out_is_reported_and_what_is_drawn(tmp_path: Path) -> None:
    source = {"path": write_lines(tmp_path / "rows.jsonl", VARIED), "samples": 20}
    (account,) = reported(tmp_path, train=[source], evaluation=None, evaluation_fraction=0.25)["sets"]
    assert (account["rows"], account["drawn rows"]) == (30, 20)
    assert (account["samples"], account["held out"]) == (15, 5)


def test_samples_like_others_are_counted_and_those_that_are_also_trained_on(tmp_path: Path) -> None:
    evaluation = write_lines(tmp_path / "evaluation.jsonl", [ROWS[3], ROWS[3], talk("else", "else")])
    report = reported(tmp_path, [*ROWS, ROWS[0], ROWS[0], ROWS[5]], evaluation=evaluation)
    assert report["duplicates"] == 3
    assert report["evaluation samples trained on"] == 2


def test_a_mixture_tells_how_often_each_set_is_taken(tmp_path: Path) -> None:
    paths = [write_lines(tmp_path / f"{name}.jsonl", VARIED[:count]) for name, count in (("few", 5), ("many", 25))]
    weights = (2.0, 1.0)
    sources = [{"path": path, "weight": weight} for path, weight in zip(paths, weights, strict=True)]
    given = {"train": sources, "evaluation": write_lines(tmp_path / "evaluation.jsonl", VARIED[:1])}
    built = workload(tmp_path, **given)
    sets = built.data_report["sets"]
    order = built.order(30, 0, by_epochs=True)
    taken = Counter("few" if index < 5 else "many" for index in order.batch(0)[1])
    assert [each["an epoch"] for each in sets[:2]] == [taken["few"], taken["many"]]
    assert [each["weight"] for each in sets[:2]] == list(weights)
    assert "weight" not in sets[2]


def test_the_sample_shows_what_the_template_writes_and_marks_the_reply(tmp_path: Path) -> None:
    sample = reported(tmp_path, ROWS)["sample"]
    question, answer = ROWS[0]["instruction"], ROWS[0]["output"]
    pieces = [(piece["text"], piece["trained"]) for piece in sample["pieces"]]
    assert pieces == [
        (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", False),
        (f"{answer}<|im_end|>", True),
        ("\n", False),
    ]
    ids, trained = chatml(question, answer)
    assert (sample["tokens"], sample["target tokens"]) == (len(ids), sum(trained))
    assert sample["from"] == "train.jsonl line 1"


def test_texts_are_measured_in_tokens_and_shown_whole(tmp_path: Path) -> None:
    """In bytes: a character of three must not be cut where the targets begin."""
    text = "春眠不觉晓，处处闻啼鸟。" * 20
    (tmp_path / "poem.txt").write_text(text, encoding="utf-8")
    (tmp_path / "other.txt").write_text("夜来风雨声" * 10, encoding="utf-8")
    held_out = str(tmp_path / "other.txt")
    report = reported(tmp_path, stage="pretrain", train=str(tmp_path / "poem.txt"), evaluation=held_out, length=36)
    assert report["tokens"] == len(text.encode())
    assert report["target tokens"] == len(text.encode()) - 1
    shown = "".join(piece["text"] for piece in report["sample"]["pieces"])
    assert shown.startswith(text[:12])
    assert "�" not in shown[:12]
    assert "lengths" not in report  # windows are as long as one another


def test_of_a_stream_the_first_rows_are_reported(tmp_path: Path) -> None:
    good = [talk(f"say {number}", "hello") for number in range(LOOKED_AT + 50)]
    rows = [*good[:10], talk("", "lost"), talk("say it", "x" * 200), *good[10:], talk("", "not looked at")]
    report = reported(tmp_path, rows, stream=True, bad_rows=1.0, length=100)
    account = report["sets"][0]
    assert report["looked at"] == LOOKED_AT
    assert (account["rows"], account["unusable rows"], account["truncated"]) == (len(rows), 1, 1)
    assert account["truncated share"] == round(1 / (LOOKED_AT - 1), 4)
    assert account["reasons"] == ["train.jsonl line 11: instruction is empty"]
    looked_at = [row for row in rows[:LOOKED_AT] if row["instruction"]]
    lengths = [min(100, len(chatml(row["instruction"], row["output"])[0])) for row in looked_at]
    assert report["tokens"] == sum(lengths)
    assert sum(each["samples"] for each in report["lengths"]["bins"]) == LOOKED_AT - 1


def test_texts_of_a_stream_that_are_longer_than_a_sample_are_counted(tmp_path: Path) -> None:
    texts = [{"text": "short"}, {"text": "x" * 63}, {"text": "x" * 64}, {"text": "x" * 500}, {"txt": "lost"}]
    report = reported(
        tmp_path,
        stage="pretrain",
        train=write_lines(tmp_path / "texts.jsonl", texts),
        evaluation=write_lines(tmp_path / "held.jsonl", texts[:1]),
        stream=True,
        bad_rows=1.0,
        length=64,
    )
    account = report["sets"][0]
    assert account["truncated"] == 2  # with the token that ends it, the second has 64
    assert account["reasons"] == ["texts.jsonl line 5: it has no text in the column 'text'"]
    assert report["tokens"] == len("short") + 1 + 3 * 64


def test_data_without_a_sample_still_have_an_account(tmp_path: Path) -> None:
    given = config(tmp_path, [talk("", "lost"), talk("lost", "")], bad_rows=1.0)
    words = accounts_without_samples(given, seed=0)
    assert words is not None
    assert [(each["rows"], each["unusable rows"], each["samples"]) for each in words["sets"]] == [(2, 2, 0)]
    too_far = config(tmp_path, [talk("x" * 100, "lost")] * 3, length=64)
    words = accounts_without_samples(too_far, seed=0)
    assert words is not None
    assert words["sets"][0]["without target"] == 3


def test_data_that_fail_for_another_reason_have_no_account(tmp_path: Path) -> None:
    mixed_up = "{{ messages[-1].content }}{% if add_generation_prompt %} so:{% endif %}"
    (tmp_path / "mixed.jinja").write_text(mixed_up)
    given = config(tmp_path, ROWS, template=str(tmp_path / "mixed.jinja"))
    assert accounts_without_samples(given, seed=0) is None
    assert accounts_without_samples(config(tmp_path, train=str(tmp_path / "nowhere.jsonl")), seed=0) is None
