"""`drivetrain init` on small data of every kind: what it writes passes the checks and trains."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from drivetrain.cli import main
from drivetrain.config.files import read_yaml
from drivetrain.config.load import load
from drivetrain.config.rules import check_anywhere
from drivetrain.data.language.row_schema import PREFERENCE
from drivetrain.errors import UserError
from drivetrain.init.catalogue import FOLDER, recipe, recipes
from drivetrain.init.data_kinds import Conversations, LabelledTexts, kind_of
from drivetrain.init.write import written
from drivetrain.workloads.language_data import LanguageReader

SMALL = ["config.hidden_size=32", "config.num_hidden_layers=1", "config.intermediate_size=32"]
FEW_STEPS = ["loop.epochs=null", "loop.steps=2", "schedule.warmup_steps=0", "--quiet"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("drivetrain.init.fitted.device_with_bfloat16", lambda _: None)  # so on every machine
    return tmp_path


def rows(file: Path, header: list[str], lines: list[list[Any]]) -> Path:
    with file.open("w", newline="", encoding="utf-8") as opened:
        csv.writer(opened).writerows([header, *lines] if header else lines)
    return file


def pictures(folder: Path, sizes: tuple[int, ...] = (32,), number: int = 12) -> None:
    folder.mkdir(parents=True)
    for index in range(number):
        Image.new("RGB", (sizes[index % len(sizes)], 32), (index, 20, 200)).save(folder / f"{index}.png")


def trains(file: str, *overrides: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", file, *overrides, *FEW_STEPS])
    assert ended.value.code == 0


def head(file: Path) -> str:
    return "\n".join(line for line in file.read_text().splitlines() if line.startswith("#"))


def test_every_recipe_is_listed_with_a_line() -> None:
    found = dict(recipes())
    assert found.keys() == {path.stem for path in FOLDER.glob("*.yaml")}
    assert all(10 < len(line) < 150 for line in found.values())


def test_a_recipe_is_written_as_it_is(here: Path) -> None:
    assert written("digits", None, Path("run.yaml")).files == [Path("run.yaml")]
    assert (here / "run.yaml").read_text() == recipe("digits").read_text()


@pytest.mark.usefixtures("here")
def test_a_recipe_of_a_script_has_the_script_beside_it() -> None:
    made = written("linear", None, Path("mine/run.yaml"))
    assert set(made.files) == {Path("mine/run.yaml"), Path("mine/linear.py")}
    trains("mine/run.yaml")


def test_nothing_is_overwritten_in_silence(here: Path) -> None:
    (here / "run.yaml").write_text("mine")
    with pytest.raises(UserError, match=r"run.yaml is there already"):
        written("digits", None, Path("run.yaml"))
    assert (here / "run.yaml").read_text() == "mine"
    written("digits", None, Path("run.yaml"), overwrite=True)
    assert (here / "run.yaml").read_text() != "mine"


def test_chinese_reviews_get_a_vocabulary_of_characters(here: Path) -> None:
    rows(
        here / "hotels.csv",
        ["label", "review"],
        [[i % 2, ("房间很干净" if i % 2 else "服务太差了")] for i in range(80)],
    )
    made = written(None, here / "hotels.csv", Path("run.yaml"))
    assert set(made.files) == {Path("run.yaml"), Path("run-vocab.txt")}
    data = read_yaml(here / "run.yaml")["workload"]["data"]
    assert (data["text_column"], data["label_column"]) == ("review", "label")
    words = (here / "run-vocab.txt").read_text().split()
    assert {"房", "差"} < set(words)
    assert not any(len(word.removeprefix("##")) > 1 for word in words[5:])
    assert "Chinese" in head(here / "run.yaml")
    assert "bert-base-chinese" in (here / "run.yaml").read_text()
    trains("run.yaml", *SMALL)


def test_a_file_without_a_header_is_read_by_position(here: Path) -> None:
    lines = [[i % 2, f"{'a clean and quiet room' if i % 2 else 'never again, bad service'} {i}"] for i in range(60)]
    rows(here / "plain.csv", [], lines)
    written(None, here / "plain.csv", Path("run.yaml"))
    data = read_yaml(here / "run.yaml")["workload"]["data"]
    assert (data["text_column"], data["label_column"], data["header"]) == (1, 0, False)
    trains("run.yaml", *SMALL)


def test_class_folders_of_pictures_of_several_sizes_are_resized(here: Path) -> None:
    for name in ("cat", "dog"):
        pictures(here / "pets" / name, (32, 40))
    written(None, here / "pets", Path("run.yaml"))
    workload = read_yaml(here / "run.yaml")["workload"]
    assert workload["data"]["source"] == "folder"
    assert workload["data"]["image_size"] == 32
    assert "limit_train" not in workload["data"]
    assert "2 classes (cat, dog)" in head(here / "run.yaml")
    trains("run.yaml")


def test_folders_for_training_and_evaluation_are_distinguished(here: Path) -> None:
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            pictures(here / "pets" / part / name)
    written(None, Path("pets"), Path("run.yaml"))
    data = read_yaml(here / "run.yaml")["workload"]["data"]
    assert (data["train"], data["evaluation"]) == ("pets/train", "pets/test")
    assert "image_size" not in data
    trains("run.yaml")


def test_pictures_with_a_table_of_labels_are_found_from_the_folder(here: Path) -> None:
    pictures(here / "flat", number=24)
    rows(here / "flat" / "labels.csv", ["file", "kind"], [[f"{i}.png", "ab"[i % 2]] for i in range(24)])
    written(None, here / "flat", Path("run.yaml"))
    data = read_yaml(here / "run.yaml")["workload"]["data"]
    assert (data["source"], data["image_column"], data["label_column"]) == ("table", "file", "kind")
    trains("run.yaml")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("reply", ["completion", "answer", "solution"])
def test_prompts_of_messages_with_replies_beside_them_are_conversations(here: Path, suffix: str, reply: str) -> None:
    """TRL's conversational rows, as the hub has them. The run file that is written reads them."""
    answer = [{"role": "assistant", "content": "Hello"}] if reply == "completion" else "Hello"
    rows = [{"prompt": [{"role": "user", "content": f"Hi {n}"}], reply: answer, "tags": ["a"]} for n in range(12)]
    path = here / f"talks{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    made = written(None, path, Path("run.yaml"))
    assert any("in the format of openai" in each for each in made.decisions)
    run, problems = load(here / "run.yaml", ["workload.data.evaluation_fraction=0"])
    assert run is not None
    assert not problems
    samples = LanguageReader(run.workload, 0).read().train  # type: ignore[arg-type]
    assert samples is not None
    assert len(samples) == 12


def test_questions_and_answers_are_conversations_by_their_columns(here: Path) -> None:
    pairs = [{"question": f"What is {i} plus one?", "answer": f"It is {i + 1}."} for i in range(40)]
    (here / "qa.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    written(None, here / "qa.jsonl", Path("run.yaml"))
    (source,) = read_yaml(here / "run.yaml")["workload"]["data"]["train"]
    assert source["columns"] == {"prompt": "question", "response": "answer"}
    trains("run.yaml", *SMALL)
    with pytest.raises(SystemExit) as ended:
        main(["predict", "run.yaml", *SMALL, "--output", "rows.jsonl"])
    assert ended.value.code == 0
    rows = [json.loads(line) for line in (here / "rows.jsonl").read_text().splitlines()]
    assert rows
    assert all({"answer", "reference"} <= row.keys() for row in rows), "the data that were held out are answered"


def questions(file: Path, number: int) -> Path:
    """Writes so many conversations, a line each."""
    file.write_text("".join(json.dumps({"instruction": f"{n}?", "output": f"{n}!"}) + "\n" for n in range(number)))
    return file


def test_some_rows_are_held_out_or_nothing_reads_them_however_few_there_are(here: Path) -> None:
    for number in (1, 4, 5, 9, 10, 11, 19, 20, 31, 60):
        written(None, questions(here / "talks.jsonl", number), Path("run.yaml"), overwrite=True)
        workload = read_yaml(here / "run.yaml")["workload"]
        share, unusable = workload["data"]["evaluation_fraction"], max(1, number // 20)
        if number < 5:
            assert (share, "generate" in workload) == (0, False)
        else:
            assert "generate" in workload
            assert all(1 <= round(usable * share) < usable / 2 for usable in (number, number - unusable))


@pytest.mark.parametrize("number", [1, 5, 11])
def test_a_few_conversations_train_as_they_are_written(here: Path, number: int) -> None:
    made = written(None, questions(here / "talks.jsonl", number), Path("run.yaml"))
    words = " ".join(made.decisions)
    assert ("1 row in the format" if number == 1 else f"{number} rows in the format") in words
    assert " 1 rows" not in words
    assert " 1 steps" not in words
    trains("run.yaml", *SMALL)


@pytest.mark.parametrize(
    ("row", "formatting"),
    [
        ({"conversations": [{"from": "human", "value": "Hi {i}"}, {"from": "gpt", "value": "Hello."}]}, "sharegpt"),
        ({"messages": [{"role": "user", "content": "Hi {i}"}, {"role": "assistant", "content": "Hello."}]}, "openai"),
        ({"instruction": "Hi {i}", "input": "", "output": "Hello."}, "alpaca"),
    ],
)
def test_conversations_are_known_by_their_format(here: Path, row: dict[str, Any], formatting: str) -> None:
    text = json.dumps(row)
    (here / "chat.json").write_text(f"[{','.join(text.replace('{i}', str(i)) for i in range(40))}]")
    written(None, here / "chat.json", Path("run.yaml"))
    (source,) = read_yaml(here / "run.yaml")["workload"]["data"]["train"]
    assert source["formatting"] == formatting
    run, problems = load(here / "run.yaml")
    assert run is not None
    assert not [*problems, *check_anywhere(run)]


PREFERENCES: dict[str, tuple[dict[str, Any], str, dict[str, str]]] = {
    "ranking": (
        {
            "conversations": [{"from": "human", "value": "Hi {i}"}],
            "chosen": {"from": "gpt", "value": "Hello {i}."},
            "rejected": {"from": "gpt", "value": "What?"},
        },
        "dpo",
        {},
    ),
    "pairs": ({"prompt": "Hi {i}", "chosen": "Hello {i}.", "rejected": "What?"}, "dpo", {}),
    "messages": (
        {side: [{"role": "user", "content": "Hi {i}"}, {"role": "assistant", "content": side}] for side in PREFERENCE},
        "dpo",
        {},
    ),
    "other names": (
        {"question": "Hi {i}", "chosen": "Hello {i}.", "rejected": "What?"},
        "dpo",
        {"prompt": "question"},
    ),
    "scores": (
        {"prompt": "Hi {i}", "completions": ["Hello {i}.", "What?"], "scores": [2, 1]},
        "dpo",
        {},
    ),
    "labels": ({"prompt": "Hi {i}", "completion": "Hello {i}.", "label": None}, "kto", {}),
    "labelled talks": (
        {"messages": [{"role": "user", "content": "Hi {i}"}, {"role": "assistant", "content": "Yes."}], "label": None},
        "kto",
        {},
    ),
    "tags": ({"instruction": "Hi {i}", "output": "Hello {i}.", "kto_tag": None}, "kto", {"kto_tag": "kto_tag"}),
    "other labels": (
        {"question": "Hi {i}", "answer": "Hello {i}.", "label": None},
        "kto",
        {"prompt": "question", "response": "answer"},
    ),
}


def preferences(file: Path, row: dict[str, Any], number: int = 8) -> None:
    """Writes so many rows like this one, with their numbers for {i} and labels, true and false in turn, for None."""
    text = json.dumps(row)
    lines = [text.replace("{i}", str(i)).replace("null", json.dumps(i % 2 == 0)) for i in range(number)]
    file.write_text("\n".join(lines))


@pytest.mark.parametrize(("row", "stage", "columns"), PREFERENCES.values(), ids=PREFERENCES)
def test_preferences_get_the_stage_that_learns_from_them(
    here: Path, row: dict[str, Any], stage: str, columns: dict[str, str]
) -> None:
    preferences(here / "a.jsonl", row)
    made = written(None, here / "a.jsonl", Path("run.yaml"))
    workload = read_yaml(here / "run.yaml")["workload"]
    assert workload["stage"] == stage
    assert workload["data"]["train"][0].get("columns", {}) == columns
    assert f"for stage {stage}" in " ".join(made.decisions)
    named = ("orpo", "simpo", "cpo", "reward")
    line = next(line for line in (here / "run.yaml").read_text().splitlines() if line.startswith("  stage:"))
    assert all(other in line for other in named)
    run, problems = load(here / "run.yaml")
    assert run is not None
    assert not [*problems, *check_anywhere(run)]
    assert LanguageReader(run.workload, 0).read().train  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "number"), [("ranking", 1), ("labels", 2), ("pairs", 12)])
def test_preferences_train_as_they_are_written(here: Path, name: str, number: int) -> None:
    preferences(here / "a.jsonl", PREFERENCES[name][0], number)
    written(None, here / "a.jsonl", Path("run.yaml"))
    trains("run.yaml", *SMALL)


def test_a_recipe_whose_stage_reads_the_rows_keeps_it_and_another_is_refused(here: Path) -> None:
    preferences(here / "a.jsonl", PREFERENCES["pairs"][0])
    written("preferences-dpo", here / "a.jsonl", Path("run.yaml"))
    run = read_yaml(here / "run.yaml")
    assert (run["workload"]["stage"], run["optimizer"]["lr"]) == ("dpo", 5.0e-5)
    with pytest.raises(UserError, match="stage grpo does not read them"):
        written("rewards-grpo", here / "a.jsonl", Path("other.yaml"))
    with pytest.raises(UserError, match="stage dpo does not read them"):
        written("preferences-dpo", questions(here / "talks.jsonl", 9), Path("other.yaml"))


def test_a_recipe_for_a_model_of_ones_own_keeps_its_epochs_and_names_the_models_place(here: Path) -> None:
    preferences(here / "a.jsonl", PREFERENCES["pairs"][0], 40)
    for name, data, epochs in (("preferences-dpo", "a.jsonl", 1), ("alpaca-qlora", "talks.jsonl", 3)):
        questions(here / "talks.jsonl", 40)
        made = written(name, Path(data), Path(f"{name}.yaml"))
        assert read_yaml(here / f"{name}.yaml")["loop"]["epochs"] == epochs
        words = " ".join(made.decisions)
        assert "from scratch" not in words
        assert "The model is the recipe's, models/my-model: put yours there" in words


def test_labels_that_are_classes_are_no_preferences(here: Path) -> None:
    rows(here / "a.csv", ["question", "label"], [[f"{'good' if i % 2 else 'bad'} room {i}", i % 2] for i in range(40)])
    assert isinstance(kind_of(here / "a.csv"), LabelledTexts)
    preferences(here / "talks.jsonl", {**PREFERENCES["labels"][0], "label": 1})
    assert isinstance(kind_of(here / "talks.jsonl"), Conversations)


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv"])
@pytest.mark.parametrize(("no", "yes"), [(0, 1), (0.0, 1.0)])
def test_answers_labelled_with_0_and_1_are_preferences(here: Path, suffix: str, no: float, yes: float) -> None:
    table = [[f"Hi {i}", f"Hello {i}.", yes if i % 3 else no] for i in range(12)]
    file, names = here / f"a{suffix}", ["prompt", "completion", "label"]
    records = [dict(zip(names, row, strict=True)) for row in table]
    if suffix == ".csv":
        rows(file, names, table)
    else:
        file.write_text(json.dumps(records) if suffix == ".json" else "\n".join(map(json.dumps, records)))
    made = written(None, file, Path("run.yaml"))
    assert "for stage kto" in " ".join(made.decisions)
    run, problems = load(here / "run.yaml", ["workload.data.evaluation_fraction=0"])
    assert run is not None
    assert not problems
    samples = LanguageReader(run.workload, 0).read().train  # type: ignore[arg-type]
    assert samples is not None
    found = [samples.load(number, 0) for number in range(len(samples))]
    assert sorted(each.desirable for each in found) == [False] * 4 + [True] * 8


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Hi {i}", "answer": "Hello {i}.", "label": 0},  # whether a text answers a question: a class
        {"prompt": "Hi {i}", "completion": "Hello {i}.", "label": 2},
        {"prompt": "Hi {i}", "completion": "Hello {i}.", "score": 0},
    ],
    ids=str,
)
def test_numbers_that_may_be_classes_are_no_labels_of_preferences(here: Path, row: dict[str, Any]) -> None:
    lines = [json.dumps(row).replace("{i}", str(i)) for i in range(8)]
    ones = [json.dumps({**row, [*row][-1]: 1}).replace("{i}", str(i)) for i in range(8)]
    (here / "a.jsonl").write_text("\n".join([*lines, *ones]))
    assert isinstance(kind_of(here / "a.jsonl"), Conversations)


def test_a_label_that_is_neither_0_nor_1_is_refused_by_its_line(here: Path) -> None:
    preferences(here / "a.jsonl", PREFERENCES["labels"][0])
    written(None, here / "a.jsonl", Path("run.yaml"))
    with (here / "a.jsonl").open("a") as file:
        file.write("\n" + json.dumps({**PREFERENCES["labels"][0], "label": 2}))
    run, _ = load(here / "run.yaml", ["workload.data.bad_rows=error"])
    assert run is not None
    with pytest.raises(UserError, match=r"a.jsonl line 9: label is 2, neither true nor false \(1 nor 0\)"):
        LanguageReader(run.workload, 0).read()  # type: ignore[arg-type]


def test_a_text_is_learnt_character_by_character(here: Path) -> None:
    (here / "play.txt").write_text("What say you? A pox on it, quoth she.\n" * 80)
    written(None, here / "play.txt", Path("run.yaml"))
    assert "a token is a character" in head(here / "run.yaml")
    trains("run.yaml", "batch_size=4")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.zip", "x", "ends in .zip"),
        ("a.csv", "n,m\n1,2\n3,4\n5,6\n7,8\n9,10\n11,12\n13,14\n15,16\n", "no column"),
        ("a.txt", "short", "a.txt has 5 characters: too few to learn a language from"),
        ("a.csv", "评论;类别\n好;1\n差;0\n", "single column, '评论;类别'\n +its columns look separated by ';': write"),
        ("a.csv", "评论;类别\n好,大;1\n差;0\n", "line 2 has 2 columns .*; its columns look separated by ';': write"),
        (
            "a.csv",
            "text,标签\n好,1\n",
            r"have 1 character in all, .* none of its other columns \(标签\) could be labels",
        ),
        ("a.csv", "text,label\n好,1\n", "label of .*a.csv has 1 class in 1 row, and there must be two at least"),
        ("none.csv", None, "does not exist"),
    ],
)
def test_what_is_no_data_is_refused_with_the_reason(here: Path, name: str, content: str | None, why: str) -> None:
    if content is not None:
        (here / name).write_text(content)
    with pytest.raises(UserError, match=why):
        written(None, here / name, Path("run.yaml"))
    assert not (here / "run.yaml").exists()


def test_prompts_without_answers_lead_to_the_recipe_that_learns_from_rewards(here: Path) -> None:
    (here / "prompts.jsonl").write_text('{"prompt": "say 1"}\n{"prompt": "say 2"}\n')
    with pytest.raises(UserError, match="drivetrain init rewards-grpo"):
        kind_of(here / "prompts.jsonl")
    assert "rewards-grpo" in dict(recipes())


def test_columns_that_are_named_do_not_hide_another_separator(here: Path) -> None:
    (here / "a.csv").write_text("评论;类别\n好;1\n差;0\n")
    for text in ("评论", "评论;类别"):
        with pytest.raises(UserError, match="look separated by ';'"):
            written(None, here / "a.csv", Path("run.yaml"), text_column=text, label_column="类别")


def test_a_recipe_of_another_kind_is_refused(here: Path) -> None:
    pictures(here / "pets" / "cat")
    pictures(here / "pets" / "dog")
    with pytest.raises(UserError, match="hotel-bert is a recipe of text_classification"):
        written("hotel-bert", here / "pets", Path("run.yaml"))
    with pytest.raises(UserError, match=r"did you mean digits\?"):
        written("digts", None, Path("run.yaml"))


def test_real_reviews_are_read_if_they_are_there() -> None:
    from tests.test_docs import ROOT

    file = ROOT.parent / "shared" / "data" / "ChnSentiCorp_htl_all.csv"
    if not file.is_file():
        pytest.skip("the real data are not here")
    kind = kind_of(file)
    assert kind.text == "review"  # type: ignore[union-attr]


@pytest.mark.usefixtures("here")
def test_the_verb_says_what_it_decided_and_what_comes_next(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["recipes"], ["init"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "digits" in out
    assert "drivetrain train run.yaml" in out


def test_texts_that_are_numbers_are_texts(tmp_path: Path) -> None:
    file = tmp_path / "numbers.jsonl"
    file.write_text("".join(json.dumps({"text": 1_000 + number}) + "\n" for number in range(1000)))
    assert kind_of(file).characters == 4000  # type: ignore[union-attr]


def test_rows_that_cannot_be_used_are_counted_and_the_run_file_trains(here: Path) -> None:
    lines = [f"{word} hotel,{label}" for word, label in [("good", 1), ("bad", 0)] * 40]
    (here / "a.csv").write_text("\n".join(["text,label", *lines, ",1", "cut", "nice,", ""]))
    made = written(None, Path("a.csv"), Path("run.yaml"))
    reported = "83 rows, of which 1 without text, 1 without label, 1 with too few columns"
    assert reported in " ".join(made.decisions)
    trains("run.yaml", *SMALL)


@pytest.mark.usefixtures("here")
def test_small_data_have_epochs_for_200_steps_and_not_an_evaluation_each(here: Path) -> None:
    lines = [[f"{word} hotel {number}", label] for number in range(20) for word, label in (("good", 1), ("bad", 0))]
    rows(here / "a.csv", ["text", "label"], lines)
    made = written(None, Path("a.csv"), Path("run.yaml"))
    run = read_yaml(here / "run.yaml")
    steps = -(-36 // run["batch_size"]) * run["loop"]["epochs"]
    assert 200 <= steps <= 210
    assert run["evaluation"]["every_epochs"] > 1
    assert f"make {steps} steps" in " ".join(made.decisions)


SHORT_ROWS = {
    "conversations": ["question,answer,source"] + ["What?,That.,me"] * 9 + ["cut,short"],
    "pictures": ["file,kind"] + [f"{number}.png,{'ab'[number % 2]}" for number in range(9)] + ["9.png"],
    "documents": ["text,number"] + [f"A long text that goes on,{number}" for number in range(300)] + ["cut"],
}


@pytest.mark.parametrize("lines", SHORT_ROWS.values(), ids=SHORT_ROWS)
def test_short_rows_are_refused_where_training_refuses_them(here: Path, lines: list[str]) -> None:
    pictures(here / "png")
    for file in (here / "png").iterdir():
        file.rename(here / file.name)
    (here / "a.csv").write_text("\n".join(lines[:-1]))
    kind_of(here / "a.csv")
    (here / "a.csv").write_text("\n".join(lines))
    with pytest.raises(UserError, match=f"line {len(lines)} has"):
        kind_of(here / "a.csv")


def test_a_first_line_with_a_column_too_many_is_named_as_the_cause(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label,\n" + "good,1\nbad,0\n" * 9)
    with pytest.raises(UserError, match=r"all 18 rows of .*a\.csv have fewer columns than its first line"):
        kind_of(tmp_path / "a.csv")
