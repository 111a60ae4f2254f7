"""Tests the samples of a language model: texts and conversations, held out, mixed, counted, kept."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.config.training import Loader
from drivetrain.data.language.chat import ChatTemplate
from drivetrain.data.language.conversations import Conversation, Message
from drivetrain.data.loader import Window, training_windows
from drivetrain.data.micro_batches import Lengths, Slice
from drivetrain.errors import UserError
from drivetrain.workloads.language_data import LanguageReader, LanguageSamples
from drivetrain.workloads.language_model import LanguageModelWorkload
from tests.tiny_language import END, REWRITING, ROWS, chatml, config, loaded, talk, workload, write_lines

TEXT = "".join(f"line {number}\n" for number in range(200))
DOCUMENTS = [{"text": f"document {number} " + "x" * number} for number in range(40)]


def reading(folder: Path, rows: Any = None, seed: int = 0, **given: Any) -> tuple[LanguageReader, LanguageSamples]:
    reader = LanguageReader(config(folder, rows, **given), seed)
    return reader, reader.read()


def read(folder: Path, rows: Any = None, seed: int = 0, **given: Any) -> LanguageSamples:
    return reading(folder, rows, seed, **given)[1]


def refusal(folder: Path, rows: Any = None, **given: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, rows, **given)
    return str(caught.value)


def places(samples: Any) -> list[int]:
    """The lines of the data that samples are of, from 1."""
    return [int(name.split()[-1]) for name in samples.names]


@pytest.fixture
def tokenised_anew(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns how many conversations were tokenised, each time."""
    calls: list[int] = []
    original = ChatTemplate.tokenised

    def counted(self: ChatTemplate, conversations: Any, train_on: Any, *checked: Any) -> Any:
        calls.append(len(conversations))
        return original(self, conversations, train_on, *checked)

    monkeypatch.setattr(ChatTemplate, "tokenised", counted)
    return calls


# --- texts ------------------------------------------------------------------------------------------------------------


def test_one_text_is_cut_into_windows_and_its_end_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    found = read(tmp_path, stage="pretrain", train=str(tmp_path / "a.txt"), length=50, evaluation_fraction=0.25)
    assert found.evaluation is not None
    whole, cut = TEXT.encode(), round(len(TEXT) * 0.75)
    for samples, part in ((found.train, whole[:cut]), (found.evaluation, whole[cut:])):
        windows = [bytes(ids) for ids, _ in loaded(samples)]
        assert windows == [part[start : start + 51] for start in range(0, len(part) - 1, 50)]
    assert found.train.names[1] == "a.txt from token 50"
    assert found.evaluation.names[0] == "a.txt, held out, from token 0"


def test_several_texts_are_joined_each_ended_by_the_end_of_text(tmp_path: Path) -> None:
    given = write_lines(tmp_path / "e.jsonl", DOCUMENTS[:1])
    found = read(tmp_path, DOCUMENTS, stage="pretrain", length=10_000, evaluation=given)
    ((ids, _),) = loaded(found.train)
    assert ids == [token for each in DOCUMENTS for token in [*each["text"].encode(), END]]
    assert found.evaluation is not None
    assert loaded(found.evaluation)[0][0] == list(
        DOCUMENTS[0]["text"].encode()
    )  # one text has no other to be told from


def test_every_token_but_one_is_a_target_once_an_epoch_of_a_run(tmp_path: Path) -> None:
    work = workload(tmp_path, DOCUMENTS, stage="pretrain", length=16)
    text = loaded(workload(tmp_path, DOCUMENTS, stage="pretrain", length=10_000).train)[0][0]
    for epoch in range(3):
        batch = work.collate([work.train.load(index, epoch) for index in range(len(work.train))])
        targets = batch["targets"][batch["targets"] >= 0]
        missing = Counter(text)
        missing.subtract(targets.tolist())
        assert sorted(missing.values())[-2:] == [0, 1]
        assert min(missing.values()) == 0
        assert len(targets) == len(text) - 1


def test_texts_without_a_mark_between_them_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)  # alone it needs no end, and bytes have none
    given = write_lines(tmp_path / "e.jsonl", DOCUMENTS)
    reader, _ = reading(tmp_path, stage="pretrain", train=str(tmp_path / "a.txt"), evaluation=given)
    assert reader.warnings == ["the tokenizer has no eos token: the texts of e.jsonl follow each other without a mark"]


def test_texts_are_tokenised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = loaded(read(tmp_path, DOCUMENTS, stage="pretrain").train)
    monkeypatch.setattr("drivetrain.data.language.document_tokens.encode", lambda *_: pytest.fail("tokenised again"))
    assert loaded(read(tmp_path, DOCUMENTS, stage="pretrain").train) == first
    with pytest.raises(pytest.fail.Exception):
        read(tmp_path, DOCUMENTS[:-1], stage="pretrain")


# --- conversations ----------------------------------------------------------------------------------------------------


def test_conversations_are_held_out_at_random_and_none_is_in_both(tmp_path: Path) -> None:
    found = [read(tmp_path, ROWS, seed=seed, evaluation_fraction=0.25) for seed in (0, 0, 1)]
    parts = [(places(each.train), places(each.evaluation)) for each in found]
    assert parts[0] == parts[1] != parts[2]
    for train, held in parts:
        assert (len(train), len(held)) == (15, 5)
        assert sorted(train + held) == list(range(1, 21))
        assert train == sorted(train)
    assert held != list(range(16, 21))


@pytest.mark.parametrize("stage", ["sft", "pretrain"])
def test_nothing_is_held_out_where_the_share_is_none(stage: str, tmp_path: Path) -> None:
    rows = ROWS if stage == "sft" else DOCUMENTS
    reader, found = reading(tmp_path, rows, stage=stage, evaluation_fraction=0)
    assert found.evaluation is None
    assert reader.accounts[0].held_out == 0
    assert any("there are no evaluation data: none are held out" in each for each in reader.warnings)
    if stage == "sft":
        assert places(found.train) == list(range(1, 21))


def test_a_conversation_of_several_samples_is_held_out_whole(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(REWRITING)
    turns = [{"role": role, "content": f"{role} {turn}"} for turn in range(3) for role in ("user", "assistant")]
    template = str(tmp_path / "t.jinja")
    reader, found = reading(
        tmp_path, [{"messages": turns}] * 20, template=template, length=400, evaluation_fraction=0.5
    )
    train, held = Counter(places(found.train)), Counter(places(found.evaluation))
    assert not train.keys() & held.keys()
    assert set(train.values()) == set(held.values()) == {3}
    assert any("10 conversations of train.jsonl become one sample a reply" in each for each in reader.warnings)


def test_given_evaluation_data_leave_the_training_data_whole(tmp_path: Path) -> None:
    given = write_lines(tmp_path / "e.jsonl", [talk("q", "a")])
    reader, found = reading(tmp_path, ROWS, evaluation=given)
    assert places(found.train) == list(range(1, 21))
    assert found.evaluation is not None
    assert loaded(found.evaluation) == [chatml("q", "a")]
    assert [(each.name, each.samples, each.for_evaluation) for each in reader.accounts] == [
        ("train.jsonl", 20, False),
        ("e.jsonl", 1, True),
    ]


def test_too_few_samples_to_hold_one_out_are_reported(tmp_path: Path) -> None:
    reader, found = reading(tmp_path, ROWS[:3])
    assert found.evaluation is None
    why = "there are no evaluation data: evaluation_fraction=0.1 of so little data holds none out"
    assert any(each.startswith(why) for each in reader.warnings)


def test_a_second_build_tokenises_nothing(tmp_path: Path, tokenised_anew: list[int]) -> None:
    first = read(tmp_path, ROWS)
    assert tokenised_anew == [18, 2]
    again = read(tmp_path, ROWS)
    assert tokenised_anew == [18, 2]
    assert (loaded(again.train), loaded(again.evaluation)) == (loaded(first.train), loaded(first.evaluation))
    read(tmp_path, ROWS, length=30)
    assert tokenised_anew == [18, 2]
    for changed in ({"template": "vicuna"}, {"train_on": "all"}):
        read(tmp_path, ROWS, **changed)
    read(tmp_path, [*ROWS[:-1], talk("another", "row")])
    assert len(tokenised_anew) == 7  # of another row, the part that it is in


def test_an_unwritable_cache_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for stage, rows in (("sft", ROWS), ("pretrain", DOCUMENTS)):
        reader, found = reading(tmp_path, rows, stage=stage, cache=tmp_path / "file")
        assert len(found.train) > 0
        assert [each.startswith("tokens could not be cached") for each in reader.warnings] == [True]


# --- mixtures ---------------------------------------------------------------------------------------------------------


def test_a_mixture_takes_its_parts_by_weight(tmp_path: Path) -> None:
    one, other = (write_lines(tmp_path / f"{name}.jsonl", ROWS[:size]) for name, size in (("a", 20), ("b", 10)))
    sources = [{"path": one, "weight": 1}, {"path": other, "weight": 3}]
    work = workload(tmp_path, train=sources, evaluation=one)
    order = work.order(30, 0, by_epochs=True)
    names = work.train.names
    for epoch in range(2):
        taken = Counter(names[index].split(".")[0] for index in order.batch(epoch)[1])
        assert taken in (Counter(a=7, b=23), Counter(a=8, b=22))
    plain = workload(tmp_path, train=[one, other], evaluation=one).order(30, 0, by_epochs=True)
    assert sorted(plain.batch(0)[1].tolist()) == list(range(30))


def test_streams_are_mixed_and_each_row_still_comes_once_an_epoch(tmp_path: Path) -> None:
    one, other = (write_lines(tmp_path / f"{name}.jsonl", ROWS[:size]) for name, size in (("a", 20), ("b", 10)))
    work = workload(tmp_path, train=[one, other], evaluation=one, stream=True, stream_buffer=2)
    order = work.order(10, 0, by_epochs=True)
    for epoch in range(2):
        taken = [order.batch(3 * epoch + step)[1] for step in range(3)]
        places = [work.train.sets[index % 2].name(index // 2) for batch in taken for index in batch]
        wanted = [f"{name}.jsonl line {line}" for name, rows in (("a", 20), ("b", 10)) for line in range(1, rows + 1)]
        assert sorted(places) == sorted(wanted)
        assert all({0, 1} == {int(index % 2) for index in batch} for batch in taken)


def test_sources_may_be_a_path_a_block_or_a_list_of_either(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ROWS)
    for train in (path, {"path": path}, [path], [{"path": path}]):
        assert len(read(tmp_path, train=train, evaluation=path).train) == 20
    mixed = read(tmp_path, train=[path, {"path": path, "samples": 4}], evaluation=path)
    assert len(mixed.train) == 24


def test_a_folder_and_a_registered_name_are_trained_on_together(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("a", "b"):
        write_lines(tmp_path / "folder" / f"{name}.jsonl", ROWS[:3])
    write_lines(tmp_path / "qa.jsonl", [{"q": "x", "a": "{{who}}"}])
    entry = {"file_name": "qa.jsonl", "columns": {"prompt": "q", "response": "a"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"qa": entry}))
    train = [str(tmp_path / "folder"), {"path": "qa", "replace": {"{{who}}": "Ada"}}]
    found = read(tmp_path, train=train, registry=tmp_path, evaluation="qa")
    assert found.train.names == [f"{name}.jsonl line {line}" for name in "ab" for line in (1, 2, 3)] + [
        "qa.jsonl line 1"
    ]
    assert loaded(found.train)[-1] == chatml("x", "Ada")


def test_weights_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    path, short = (write_lines(tmp_path / f"{name}.jsonl", rows) for name, rows in (("a", ROWS), ("b", ROWS[:1])))
    reported = refusal(tmp_path, train=[{"path": path, "weight": 1}, short])
    assert f"some data sets have a weight, but not {short}\n    give all of them a weight, or none" in reported
    assert "evaluation data have no weight" in refusal(tmp_path, train=path, evaluation={"path": path, "weight": 2})
    long = write_lines(tmp_path / "c.jsonl", [talk("q" * 99, "a")] * 2)
    weighted = [{"path": path, "weight": 1}, {"path": long, "weight": 1}]
    reported = refusal(tmp_path, train=weighted, evaluation=path, too_long="drop")
    assert "no sample is left of the 2 rows of c.jsonl (2 too long)" in reported
    assert len(read(tmp_path, train=[path, long], evaluation=path, too_long="drop").train) == 20


# --- rows that cannot be used -----------------------------------------------------------------------------------------

BAD = [*ROWS[:5], *[talk("no answer", "")] * 7, *ROWS[5:]]


def test_bad_rows_of_all_data_are_refused_at_once(tmp_path: Path) -> None:
    reported = refusal(tmp_path, BAD, evaluation=write_lines(tmp_path / "e.jsonl", [*ROWS[:2], talk("no answer", "")]))
    assert "workload.data.train: train.jsonl line 6: " in reported
    assert "and 2 more of the 27 rows of train.jsonl cannot be used" in reported
    assert "workload.data.evaluation: e.jsonl line 3: " in reported


def test_bad_rows_are_left_out_and_counted_if_they_are_to_be(tmp_path: Path) -> None:
    work = workload(tmp_path, BAD, bad_rows=0.26)
    assert len(work.train) + len(work.evaluation or []) == 20
    assert not {*places(work.train), *places(work.evaluation)} & set(range(6, 13))
    assert work.facts["rows_dropped"] == 7


def test_more_bad_rows_than_may_be_left_out_are_refused_with_their_reasons(tmp_path: Path) -> None:
    rows = [*ROWS, *[talk("no answer", "")] * 7, *[{"instruction": "x"}] * 3]
    for given, most in (("drop", "5"), (0.3, "30")):
        reported = refusal(tmp_path, rows, bad_rows=given)
        assert f"workload.data.train: 10 of the 30 rows of train.jsonl cannot be used, more than {most} %: " in reported
        assert "7 because output is empty (first train.jsonl line 21); " in reported
        assert "3 because output is missing (first train.jsonl line 28)" in reported
        assert "give workload.data.bad_rows=0.34" in reported
    reader, _ = reading(tmp_path, rows, bad_rows=0.34)
    reasons = "7 because output is empty (first train.jsonl line 21); 3 because output is missing"
    assert [each for each in reader.warnings if f"cannot be used and are left out: {reasons}" in each]


def test_too_many_rows_that_the_template_refuses_or_of_texts_are_not_left_out_either(tmp_path: Path) -> None:
    reported = refusal(tmp_path, [SOUND] * 17 + [ODD] * 3, bad_rows="drop")
    assert "3 of the 20 rows of train.jsonl cannot be used, more than 5 %: 3 because it begins with a reply" in reported
    texts = [{"text": "a text"}] * 8 + [{"text": ""}] * 2
    reported = refusal(tmp_path, texts, stage="pretrain", bad_rows="drop")
    assert "2 of the 10 rows of train.jsonl cannot be used" in reported
    assert len(read(tmp_path, texts, stage="pretrain", bad_rows=0.2, length=20).train)
    one = read(tmp_path, texts[:-1], stage="pretrain", bad_rows="drop", length=20)
    assert len(one.train), "a single row is no share"


def test_what_the_template_refuses_is_a_bad_row_too_of_the_part_held_out_as_well(tmp_path: Path) -> None:
    odd = {"messages": [{"role": "assistant", "content": "hello"}]}
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}] * 17 + [odd] * 3
    reported = refusal(tmp_path, rows, evaluation_fraction=0.5)
    assert [f"train.jsonl line {line}: it begins with a reply" in reported for line in (17, 18, 19, 20)] == [
        *(False, True, True, True),
    ]
    assert len(read(tmp_path, rows, evaluation_fraction=0.5, bad_rows=0.15).train) < 17


ODD = {"messages": [{"role": "assistant", "content": "hello"}]}
SOUND = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
SILENT = {"messages": [{"role": "user", "content": "q"}]}


def test_all_that_is_wrong_with_the_rows_is_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    write_lines(path, [SOUND, *[SILENT] * 7, ODD])
    path.write_text(path.read_text() + "{broken\n")
    evaluation = tmp_path / "e.json"
    evaluation.write_text(json.dumps([3, SOUND, ODD, SILENT]))
    given = {"train": str(path), "evaluation": str(evaluation)}
    reported = refusal(tmp_path, **given)
    for words in (
        f"workload.data.train: {path} cannot be read: line 10 is broken JSON",
        "workload.data.train: train.jsonl line 2: no message is the assistant's",
        "and 2 more of the 9 rows of train.jsonl cannot be used",
        "workload.data.train: train.jsonl line 9: it begins with a reply",
        f"workload.data.evaluation: {evaluation} cannot be read: row 1 holds no object",
        "workload.data.evaluation: e.json row 4: no message is the assistant's",
        "workload.data.evaluation: e.json row 3: it begins with a reply",
    ):
        assert words in reported
    missing = refusal(tmp_path, train=str(path), evaluation="no.jsonl")
    assert "line 10 is broken JSON" in missing
    assert "no.jsonl does not exist" in missing
    left_out = refusal(tmp_path, bad_rows=1, **given)
    assert "line 10 is broken JSON" in left_out
    assert "e.json row 1 " not in left_out
    assert "line 2" not in left_out
    assert "it begins" not in left_out
    streamed = refusal(tmp_path, stream=True, train=str(evaluation))
    assert "row 1 holds no object" in streamed


def test_a_template_that_cannot_be_is_reported_beside_bad_rows(tmp_path: Path) -> None:
    reported = refusal(tmp_path, [SOUND, SILENT], template="chatmal")
    assert "train.jsonl line 2: no message is" in reported
    assert "did you mean chatml?" in reported


def test_placeholders_that_would_be_learnt_are_reported(tmp_path: Path) -> None:
    rows = [
        *ROWS,
        talk("Who are you?", "I am {{name}}, by {{ author }}."),
        talk("{{name}}?", "Yes."),
        talk("{{}}", "{x}"),
    ]
    words = "2 conversations of train.jsonl hold {{name}}, {{ author }}, learnt as they stand"
    reader, _ = reading(tmp_path, rows, length=256)
    (warning,) = [each for each in reader.warnings if words in each]
    assert "replace: {'{{name}}': ..., '{{ author }}': ...}" in warning
    path = write_lines(tmp_path / "train.jsonl", rows)
    filled = {"path": path, "replace": {"{{name}}": "Ada", "{{ author }}": "Bo"}}
    reader, _ = reading(tmp_path, train=filled, length=256)
    assert not [each for each in reader.warnings if "{{" in each]
    reader, _ = reading(tmp_path, rows[::-1], stream=True, length=256)
    assert "2 conversations of the first 256 rows of train.jsonl hold {{name}}" in "".join(reader.warnings)


def test_rows_that_are_left_out_are_reported_with_the_reasons(tmp_path: Path) -> None:
    rows = [*ROWS, talk("q", ""), talk("q" * 99, "a"), ODD | talk("q", "a" * 99)]
    given = write_lines(tmp_path / "e.jsonl", ROWS[:1])
    reader, _ = reading(tmp_path, rows, bad_rows="drop", evaluation=given)
    lost = "1 cannot be used, 1 without a target within length"
    assert f"of the 23 rows of train.jsonl are left out: {lost}" in reader.warnings
    reader, _ = reading(tmp_path, rows, bad_rows="drop", too_long="drop", evaluation=given)
    assert "of the 23 rows of train.jsonl are left out: 1 cannot be used, 2 too long" in reader.warnings
    reader, _ = reading(tmp_path, ROWS, evaluation=given)
    assert not [each for each in reader.warnings if "left out" in each]


def test_nothing_left_is_refused_with_what_became_of_it(tmp_path: Path) -> None:
    assert "(20 too long)" in refusal(tmp_path, ROWS, length=5, too_long="drop")
    assert "(20 without a target within length)" in refusal(tmp_path, ROWS, length=5)
    bad = refusal(tmp_path, [talk("q", "")] * 3, bad_rows=1.0)
    assert "the 3 rows of train.jsonl (3 cannot be used); train.jsonl line 1: " in bad
    assert "(1 held out)" in refusal(tmp_path, ROWS[:1], evaluation_fraction=0.9)
    assert "their texts are too short" in refusal(tmp_path, [{"text": "x"}], stage="pretrain")
    given = write_lines(tmp_path / "e.jsonl", [talk("q" * 99, "a")])
    reported = refusal(tmp_path, ROWS, evaluation=given, too_long="drop")
    assert "workload.data.evaluation: no sample is left of the 1 rows of e.jsonl (1 too long)" in reported


def test_samples_that_are_cut_or_left_out_are_counted(tmp_path: Path) -> None:
    rows = [talk("q", "a"), talk("q", "a" * 99), talk("q" * 99, "a"), talk("p", "a")]
    given = write_lines(tmp_path / "e.jsonl", rows[:1])
    reader, _ = reading(tmp_path, rows, evaluation=given)
    account = reader.accounts[0]
    assert (account.rows, account.samples, account.truncated, account.without_target, account.too_long) == (
        4,
        3,
        1,
        1,
        0,
    )
    account = reading(tmp_path, rows, evaluation=given, too_long="drop")[0].accounts[0]
    assert (account.rows, account.samples, account.truncated, account.without_target, account.too_long) == (
        4,
        2,
        0,
        0,
        2,
    )
    assert "train.jsonl line 2 has" in refusal(tmp_path, rows, evaluation=given, too_long="error")


# --- data to predict for ----------------------------------------------------------------------------------------------


def test_other_data_are_read_in_the_same_way_and_are_no_part_of_the_run_s(tmp_path: Path) -> None:
    rows = [{"q": "x", "a": "y"}] * 4
    source = {
        "path": write_lines(tmp_path / "a.jsonl", rows),
        "columns": {"prompt": "q", "response": "a"},
        "samples": 2,
    }
    work = workload(tmp_path, train=source)
    facts = work.facts
    more = work.prediction_samples(write_lines(tmp_path / "more.jsonl", [{"q": "one", "a": "two"}] * 3))
    assert loaded(more) == [chatml("one", "two")] * 3
    assert more.names[2] == "more.jsonl line 3"
    assert work.facts == facts
    assert work.prediction_samples(None) is work.train  # nothing was held out of two
    with pytest.raises(UserError, match=r"--data: bad\.jsonl line 1"):
        work.prediction_samples(write_lines(tmp_path / "bad.jsonl", [{"q": "one", "a": ""}, {"q": "x", "a": "y"}]))
    dropping = workload(tmp_path, train=source, bad_rows=0.5)
    assert places(dropping.prediction_samples(str(tmp_path / "bad.jsonl"))) == [2]
    assert dropping.facts["rows_dropped"] == 0


@pytest.mark.parametrize("stage", ["sft", "pretrain"])
def test_data_to_predict_for_are_read_whole_beside_a_stream_and_reported_with_what_is_broken(
    stage: str, tmp_path: Path
) -> None:
    rows = ROWS if stage == "sft" else [{"text": f"text {number}"} for number in range(20)]
    work = workload(tmp_path, rows, stage=stage, stream=True, evaluation_rows=2)
    more = work.prediction_samples(str(tmp_path / "train.jsonl"))
    whole = workload(tmp_path, rows, stage=stage).prediction_samples(str(tmp_path / "train.jsonl"))
    assert loaded(more) == loaded(whole)
    assert more.names == whole.names
    (tmp_path / "broken.jsonl").write_text("{broken\n" + (tmp_path / "train.jsonl").read_text())
    with pytest.raises(UserError, match=r"broken\.jsonl cannot be read: line 1 is broken JSON"):
        work.prediction_samples(str(tmp_path / "broken.jsonl"))


def test_a_file_is_predicted_for_though_the_run_s_data_are_a_part_of_the_hub_s(tmp_path: Path) -> None:
    work = workload(tmp_path, ROWS)
    hub = work._reader._data.train[0].model_copy(update={"subset": "en", "split": "test", "folder": "x"})
    work._reader._data = work._reader._data.model_copy(update={"train": [hub]})
    assert len(work.prediction_samples(str(tmp_path / "train.jsonl"))) == 20


@pytest.mark.parametrize("way", ["streamed", "large"])
def test_a_part_of_the_hub_s_is_refused_of_files_however_they_are_read(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "large":
        monkeypatch.setattr("drivetrain.data.rows.LARGE", 1)
    source = {"path": write_lines(tmp_path / "a.jsonl", ROWS), "subset": "en", "split": "test"}
    with pytest.raises(UserError, match="is here as a file, without any subset en or split test"):
        workload(tmp_path, train=source, stream=way == "streamed")


# --- loading ----------------------------------------------------------------------------------------------------------


def windows(work: LanguageModelWorkload, workers: int, steps: range) -> Iterator[Window]:
    order = work.order(6, 0, by_epochs=True)
    lengths = None if work.lengths is None else Lengths(torch.tensor(work.lengths).numpy(), 10, work.packs)
    return training_windows(work.train, work.collate, order, steps, Slice(0, 1, 4, lengths), Loader(workers=workers))


BUILDS: dict[str, Callable[[Path], LanguageModelWorkload]] = {
    "conversations": lambda folder: workload(folder, ROWS),
    "a stream": lambda folder: workload(folder, ROWS, stream=True),
    "texts": lambda folder: workload(folder, DOCUMENTS, stage="pretrain", length=16),
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_loading_in_other_processes_gives_the_same_batches(
    build: Callable[[Path], LanguageModelWorkload], tmp_path: Path
) -> None:
    work = build(tmp_path)
    steps = range(6)
    for one, other in zip(windows(work, 0, steps), windows(work, 2, steps), strict=True):
        assert (one.step, one.epoch, len(one.micro_batches)) == (other.step, other.epoch, len(other.micro_batches))
        for mine, theirs in zip(one.micro_batches, other.micro_batches, strict=True):
            assert mine.tensors.keys() == theirs.tensors.keys()
            assert all(torch.equal(mine.tensors[name], theirs.tensors[name]) for name in mine.tensors)


# --- all pairs of a row -----------------------------------------------------------------------------------------------

ANSWERED = [
    {"prompt": f"ask {n}", "responses": ["good", "fair", "poor"], "scores": [3, 2, 2 if n % 3 == 0 else 1]}
    for n in range(40)
]


def paired(folder: Path, rows: Any = None, **given: Any) -> tuple[LanguageReader, LanguageSamples]:
    return reading(folder, rows or ANSWERED, stage="dpo", template="chatml", pairs="all", **given)


def test_all_pairs_of_a_row_are_trained_on_or_all_are_held_out(tmp_path: Path) -> None:
    reader, read = paired(tmp_path, evaluation_fraction=0.25)
    assert read.evaluation is not None
    trained, held = Counter(places(read.train)), Counter(places(read.evaluation))
    assert (len(trained), len(held)) == (30, 10)
    assert not trained.keys() & held.keys()
    expected = Counter({n + 1: 2 if n % 3 == 0 else 3 for n in range(40)})
    assert trained + held == expected
    assert reader.accounts[0].paired == (40, expected.total())


def test_the_rows_held_out_are_those_that_one_pair_a_row_holds_out(tmp_path: Path) -> None:
    """So that runs with one pair a row and with all are evaluated on the same prompts."""
    _, every = paired(tmp_path, evaluation_fraction=0.25)
    _, one = reading(tmp_path, ANSWERED, stage="dpo", template="chatml", evaluation_fraction=0.25)
    assert set(places(every.evaluation)) == set(places(one.evaluation))
    assert len(places(one.evaluation)) == 10


def test_rows_on_disk_give_the_same_pairs_in_the_same_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, held = paired(tmp_path, evaluation_fraction=0.25)
    monkeypatch.setattr("drivetrain.data.rows.LARGE", 1)
    _, stored = paired(tmp_path, evaluation_fraction=0.25)
    for one, other in ((held.train, stored.train), (held.evaluation, stored.evaluation)):
        assert one is not None
        assert other is not None
        assert places(one) == places(other)
        for index in range(len(one)):
            for (ids, _), (others, _) in zip(one.load(index, 0).sides, other.load(index, 0).sides, strict=True):
                assert ids.tolist() == others.tolist()


def test_a_prompt_of_several_pairs_is_answered_once_at_evaluations(tmp_path: Path) -> None:
    made = config(tmp_path, ANSWERED, stage="dpo", template="chatml", pairs="all", evaluation_fraction=0.25)
    work = LanguageModelWorkload(made.model_validate({**made.model_dump(), "generate": {"samples": 6}}), 0)
    assert len({prompt.text for prompt in work.prompts}) == len(work.prompts) == 6


class OnDisk(Sequence[Any]):
    """A million conversations, each decoded when it is asked for."""

    def __init__(self) -> None:
        self.decoded: list[int] = []

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: Any) -> Any:
        assert isinstance(index, int), "a slice would decode all that it holds"
        self.decoded.append(index)
        return Conversation((Message("user", "ask"), Message("assistant", "answer")), (), f"row {index}")


def test_of_a_million_rows_only_as_many_are_decoded_for_prompts_as_are_asked_for(tmp_path: Path) -> None:
    made = config(tmp_path, ROWS)
    reader = LanguageReader(made.model_validate({**made.model_dump(), "generate": {"samples": 1}}), 0)
    stored = OnDisk()
    reader._hold(stored)
    assert len(reader.held) == 8
    assert len(stored.decoded) <= 9


def test_all_pairs_are_refused_where_no_row_has_several_answers(tmp_path: Path) -> None:
    rows = [{"prompt": "ask", "chosen": "yes", "rejected": "no"}]
    with pytest.raises(UserError, match="no data set has rows of several answers with a score or a rank each"):
        paired(tmp_path, rows)
