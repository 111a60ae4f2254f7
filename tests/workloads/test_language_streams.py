"""Data sets that are read while they are trained on: the same samples, wherever reading begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain.config.language import LanguageModel
from drivetrain.data.order import Order
from drivetrain.data.streams import line_shards
from drivetrain.errors import UserError
from drivetrain.workloads.language_data import LanguageReader, LanguageSamples
from drivetrain.workloads.language_model import LanguageModelWorkload
from tests.tiny_language import END, REWRITING, ROWS, chatml, config, loaded, talk, workload, write_lines

CHOSEN_ARE_TRAINED = "train.jsonl holds preferences: the chosen answers are trained on"
BAD = [*ROWS[:5], *[talk("no answer", "")] * 7, *ROWS[5:]]


def reading(folder: Path, rows: Any = None, seed: int = 0, **given: Any) -> tuple[LanguageReader, LanguageSamples]:
    reader = LanguageReader(config(folder, rows, **given), seed)
    return reader, reader.read()


def read(folder: Path, rows: Any = None, seed: int = 0, **given: Any) -> LanguageSamples:
    return reading(folder, rows, seed, **given)[1]


def test_a_stream_has_the_samples_that_it_has_read_whole(tmp_path: Path) -> None:
    rows = [talk(f"say {number}", "hello " * (number % 9)) for number in range(1, 600) if number % 9]
    given = write_lines(tmp_path / "e.jsonl", rows[:3])
    whole, stream = (read(tmp_path, rows, evaluation=given, stream=stream) for stream in (False, True))
    assert sorted(loaded(stream.train)) == sorted(loaded(whole.train)) != loaded(stream.train)
    assert stream.evaluation is not None
    assert loaded(stream.evaluation) == loaded(whole.evaluation)
    first = {"path": str(tmp_path / "train.jsonl"), "samples": 50}
    assert sorted(loaded(read(tmp_path, train=first, evaluation=given, stream=True).train)) == sorted(
        loaded(whole.train)[:50]
    )
    apart = read(tmp_path, train=first, stream=True, evaluation_rows=7)
    assert apart.evaluation is not None
    assert loaded(apart.evaluation) == loaded(whole.train)[:7]
    assert sorted(loaded(apart.train)) == sorted(loaded(whole.train)[7:57])


def test_a_stream_is_resumed_without_reading_again_what_came_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [talk(f"say {number}", str(number)) for number in range(1200)]
    given: dict[str, Any] = {"stream": True, "stream_buffer": 300}
    work = workload(tmp_path, rows, **given)
    order = work.order(10, 0, by_epochs=True)
    straight = [loaded_at(work, order, step) for step in range(100)][90:]
    again = workload(tmp_path, **given, train=str(tmp_path / "train.jsonl"))
    parsed: list[int] = []
    original = line_shards.parsed_line

    def counted(line: bytes, number: int, *rest: Any) -> Any:
        parsed.append(number)
        return original(line, number, *rest)

    monkeypatch.setattr(line_shards, "parsed_line", counted)
    assert [loaded_at(again, order, step) for step in range(90, 100)] == straight
    assert len(parsed) == len(set(parsed)) == 100  # those rows alone, of the block of 300 in which they are
    assert min(parsed) > 900


def loaded_at(work: LanguageModelWorkload, order: Order, step: int) -> list[list[int]]:
    epoch, indices = order.batch(step)
    return [work.train.load(int(index), epoch)[0].tolist() for index in indices]


def test_bad_rows_of_a_stream_are_reported_with_their_place_or_have_no_targets(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, BAD, stream=True)
    assert "workload.data.train: train.jsonl line 6: " in str(caught.value)
    assert "and 2 more of the 27 rows of the beginning of train.jsonl" in str(caught.value)
    with pytest.raises(UserError) as caught:
        read(tmp_path, BAD, stream=True, bad_rows="drop")
    assert "7 of the 27 rows of the beginning of train.jsonl cannot be used, more than 5 %" in str(caught.value)
    found = read(tmp_path, [*ROWS * 13, *BAD], stream=True)
    with pytest.raises(UserError, match=r"train\.jsonl line 266: "):  # behind the rows that are looked at before
        loaded(found.train)
    work = workload(tmp_path, BAD, stream=True, bad_rows=1.0)
    places = [work.train.sets[0].name(index) for index in range(27)]
    in_file = sorted(range(27), key=lambda index: _line(places[index]))
    samples = [loaded(work.train)[index] for index in in_file]
    assert [any(trained) for _, trained in samples] == [True] * 5 + [False] * 7 + [True] * 15
    bad = [work.train.load(index, 0) for index in in_file[5:12]]
    assert work.count(work.collate(bad)) == 0
    assert samples[12] == chatml(ROWS[5]["instruction"], ROWS[5]["output"].rstrip())


def _line(place: str) -> int:
    return int(place.split()[-1])


def test_what_is_too_long_in_a_stream_has_no_targets_or_is_reported(tmp_path: Path) -> None:
    rows = [talk("q", "a"), talk("q", "a" * 99), talk("q" * 99, "a")]
    assert sorted(any(trained) for _, trained in loaded(read(tmp_path, rows, stream=True).train)) == [False, True, True]
    dropped = read(tmp_path, rows, stream=True, too_long="drop")
    assert sorted(any(trained) for _, trained in loaded(dropped.train)) == [False, False, True]
    with pytest.raises(UserError, match=r"train\.jsonl line 2 has \d+ tokens > 64"):
        loaded(read(tmp_path, rows, stream=True, too_long="error").train)


def test_a_stream_of_texts_has_one_sample_a_text_and_says_so(tmp_path: Path) -> None:
    rows = [{"text": "short"}, {"text": "x" * 99}]
    reader, found = reading(tmp_path, rows, stage="pretrain", stream=True, length=20)
    samples = sorted(loaded(found.train))
    assert [bytes(ids[:5]) for ids, _ in samples] == [b"short", b"xxxxx"]
    assert [len(ids) for ids, _ in samples] == [6, 20]
    assert samples[0] == ([*b"short", END], [True] * 6)
    assert "a stream has one sample a text: of train.jsonl, the first 20 tokens of each" in reader.warnings
    assert any(each.startswith("there are no evaluation data: a stream holds nothing out") for each in reader.warnings)


def test_a_stream_under_a_template_that_rewrites_history_says_what_it_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(REWRITING)
    turns = [{"role": role, "content": f"{role} {turn}"} for turn in range(2) for role in ("user", "assistant")]
    template = str(tmp_path / "t.jinja")
    reader, found = reading(tmp_path, [{"messages": turns}] * 3, template=template, stream=True)
    whole = read(tmp_path, [{"messages": turns}] * 3, template=template, evaluation_fraction=0.1)
    assert loaded(found.train) == loaded(whole.train)[::2]
    assert any(
        "3 conversations of train.jsonl are trained on up to their first reply only" in w for w in reader.warnings
    )


@pytest.mark.parametrize("stage", ["kto", "grpo", "distill"])
def test_of_preferences_only_sft_reports_that_it_trains_the_chosen_answers(tmp_path: Path, stage: str) -> None:
    rows = [{"instruction": "a", "chosen": f"good {n}", "rejected": "bad", "label": n % 2 == 0} for n in range(4)]
    rows = rows if stage == "kto" else [{**row, "label": 1} for row in rows]
    given = config(tmp_path, rows).model_dump(exclude_unset=True) | {"stage": stage}
    reader = LanguageReader(LanguageModel.model_validate(given), 0)
    reader.read()
    assert not any("holds preferences" in each for each in reader.warnings)


def test_preferences_are_reported_of_a_stream_too(tmp_path: Path) -> None:
    rows = [{"instruction": "a", "chosen": "good", "rejected": "bad"}] * 3
    for stream in (False, True):
        assert CHOSEN_ARE_TRAINED in reading(tmp_path, rows, stream=stream)[0].warnings
