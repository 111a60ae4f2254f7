from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_model
from torch import nn

from drivetrain.config.workload import TextClassification
from drivetrain.errors import UserError
from drivetrain.workloads.text_batches import decoded
from drivetrain.workloads.text_classification import TextClassificationWorkload

WORDS = ["good", "bad", "hotel", "room", "the", "was", "##s"]
BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
}
LINES = [*["1,good hotel"] * 10, *["0,the bad bad room"] * 20]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TextClassificationWorkload]:
    """A workload over LINES, or other lines, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    Path("vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    Path("train.csv").write_text("\n".join(["label,text", *LINES]))

    def made(
        model: dict[str, Any] | None = None, seed: int = 0, loss: dict[str, Any] | None = None, **data: Any
    ) -> TextClassificationWorkload:
        for name in ("train", "evaluation"):
            if isinstance(data.get(name), list):
                Path(f"{name}.csv").write_text("\n".join(["label,text", *data[name]]))
                data[name] = f"{name}.csv"
        given = {"train": "train.csv", "cache": "cache", "max_length": 16, **data}
        model = {"tokenizer": "vocab.txt", "config": BERT} if model is None else model
        config = {"model": model, "data": given, "loss": loss or {}}
        return TextClassificationWorkload(TextClassification.model_validate(config), seed)

    return made


Build = Callable[..., TextClassificationWorkload]


def everything(workload: TextClassificationWorkload, part: str = "train") -> dict[str, torch.Tensor]:
    samples = getattr(workload, part)
    return workload.collate([samples.load(i, 0) for i in range(len(samples))])


def test_the_split_holds_every_class_though_the_file_is_sorted(build: Build) -> None:
    workload = build(evaluation_fraction=0.2)
    assert Counter(everything(workload, "evaluation")["labels"].tolist()) == {1: 2, 0: 4}
    assert not set(workload.train.names) & set(workload.evaluation.names)
    assert len(workload.train) + len(workload.evaluation) == 30


def test_classes_that_are_numbers_sort_as_numbers(build: Build) -> None:
    workload = build(train=[f"{label},good" for label in (10, 9, 2) for _ in range(4)])
    assert workload.build_model().config.id2label == {0: "2", 1: "9", 2: "10"}  # type: ignore[union-attr]


def test_dynamic_padding_reaches_the_longest_of_the_batch(build: Build) -> None:
    workload = build(train=["1,good", "0,the bad room"] * 6)
    pick = {tuple(workload.train.load(i, 0)[0]): workload.train.load(i, 0) for i in range(len(workload.train))}
    batch = workload.collate([pick[key] for key in sorted(pick, key=len)])
    assert batch["input_ids"].tolist() == [[2, 5, 3, 0, 0], [2, 9, 6, 8, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_fixed_padding_always_reaches_max_length(build: Build) -> None:
    workload = build(padding="fixed")
    assert everything(workload)["input_ids"].shape == (27, 16)
    assert workload.lengths is None


def test_lengths_are_known_for_grouping_unless_it_is_off(build: Build) -> None:
    workload = build()
    assert workload.lengths is not None
    assert sorted(set(workload.lengths)) == [4, 6]
    assert build(group_by_length=False).lengths is None


def test_a_row_of_texts_end_to_end_has_each_texts_own_positions_and_no_padding(build: Build) -> None:
    workload = build(train=["1,good", "0,the bad room"] * 6)
    workload.build_model()
    assert workload.packs
    pick = {tuple(workload.train.load(i, 0)[0]): workload.train.load(i, 0) for i in range(len(workload.train))}
    batch = workload.collate([pick[key] for key in sorted(pick, key=len)])
    assert batch["input_ids"].tolist() == [[2, 5, 3, 2, 9, 6, 8, 3]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert batch["lengths"].tolist() == [3, 5]
    assert batch["labels"].tolist() == [1, 0]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


@pytest.mark.parametrize("data", [{"unpadded": False}, {"padding": "fixed"}])
def test_texts_are_padded_where_the_run_file_says_so(build: Build, data: dict[str, Any]) -> None:
    workload = build(**data)
    workload.build_model()
    assert not workload.packs
    assert "attention_mask" in everything(workload)


def test_a_model_that_cannot_take_such_a_row_is_named_where_that_was_asked(build: Build) -> None:
    albert = {**BERT, "model_type": "albert", "embedding_size": 16}
    words = [build({"tokenizer": "vocab.txt", "config": albert}, unpadded=wish) for wish in (True, "auto")]
    for workload in words:
        workload.build_model()
        assert not workload.packs
    assert [len([each for each in w.warnings if "texts are padded" in each]) for w in words] == [1, 0]


def test_loss_is_cross_entropy_summed_and_does_not_depend_on_padding(build: Build) -> None:
    workload = build()
    model = workload.build_model().eval()
    batch, padded = everything(workload), everything(build(unpadded=False))
    logits = model(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"]).logits
    expected = nn.CrossEntropyLoss()(logits, batch["labels"]) * 27
    assert workload.count(batch) == 27
    torch.testing.assert_close(workload.loss_sum(model, batch), expected)
    one_by_one = [workload.loss_sum(model, workload.collate([workload.train.load(i, 0)])) for i in range(27)]
    torch.testing.assert_close(sum(one_by_one), expected)


def test_metrics_are_plain_accuracy_and_macro_f1(build: Build) -> None:
    metrics = build().metrics()
    for metric in metrics.values():
        metric.update(torch.tensor([1, 1, 0, 0]), torch.tensor([1, 0, 0, 0]))
    assert float(metrics["accuracy"].compute()) == pytest.approx(3 / 4)
    assert float(metrics["macro_f1"].compute()) == pytest.approx((2 / 3 + 4 / 5) / 2)


def test_rows_without_text_are_dropped_and_reported(build: Build) -> None:
    workload = build(train=[*LINES, "1,", "0,  "], bad_rows=0.1)
    assert len(workload.train) + len(workload.evaluation) == 30
    assert workload.facts["unusable_rows"] == 2
    (warning,) = workload.warnings
    assert warning.startswith("2 rows left out: 2 because it has no text (first line 32 (row 31) of ")


def test_vocabulary_and_padding_come_from_the_tokenizer(build: Build) -> None:
    model = build(model={"tokenizer": "vocab.txt", "config": {**BERT, "model_type": "roberta"}}).build_model()
    assert model.config.vocab_size == 12  # type: ignore[union-attr]
    assert model.config.pad_token_id == 0  # type: ignore[union-attr]


def test_evaluation_texts_that_are_training_texts_are_reported(build: Build) -> None:
    workload = build(evaluation=["1,good hotel", "0,was bad"])
    assert list(workload.warnings) == ["1 of 2 evaluation texts are also training texts: metrics will flatter"]


def test_limits_keep_the_classes_shares(build: Build) -> None:
    workload = build(limit_train=6, limit_evaluation=3)
    assert Counter(everything(workload)["labels"].tolist()) == {0: 4, 1: 2}
    assert Counter(everything(workload, "evaluation")["labels"].tolist()) == {0: 2, 1: 1}
    assert not workload.warnings


def test_a_class_that_a_limit_leaves_out_is_named_and_stays_a_class(build: Build) -> None:
    workload = build(train=[*LINES, *["2,was good"] * 2], evaluation=["2,good good", *LINES], limit_train=3)
    assert Counter(everything(workload)["labels"].tolist()) == {0: 2, 1: 1}
    assert "workload.data.limit_train=3 leaves no sample of 1 of 3 classes: 2" in workload.warnings
    assert 2 in everything(workload, "evaluation")["labels"].tolist()


@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert", "gpt2"])
def test_pairs_go_through_any_architecture(build: Build, model_type: str) -> None:
    Path("train.jsonl").write_text(
        "\n".join(json.dumps({"label": i % 2, "text": "good", "other": "the room"}) for i in range(12))
    )
    sizes = {
        "distilbert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16},
        "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
    }
    config = {**sizes.get(model_type, BERT), "model_type": model_type, "max_position_embeddings": 32}
    if model_type == "roberta":
        config["type_vocab_size"] = 2  # a BERT vocabulary's pairs have two
    model_block = {"tokenizer": "vocab.txt", "config": config}
    workload = build(model_block, train="train.jsonl", text_pair_column="other")
    batch = everything(workload)
    assert batch["token_type_ids"][0].tolist() == [0, 0, 0, 1, 1, 1]
    assert workload.loss_sum(workload.build_model(), batch).isfinite()


@pytest.mark.parametrize("distinguished", [True, False])
def test_a_model_gets_the_text_of_each_token_if_its_tokenizer_has_it(build: Build, distinguished: bool) -> None:
    Path("pairs.csv").write_text("label,text,other\n" + "0,good,the room\n1,bad,hotel\n" * 6)
    workload = build(train="pairs.csv", text_pair_column="other")
    if not distinguished:
        workload._tokenizer.model_input_names = ["input_ids", "attention_mask"]
    model, batch = workload.build_model().eval(), everything(workload)
    forgotten = {**batch, "token_type_ids": torch.zeros_like(batch["token_type_ids"])}
    same = torch.equal(*(workload._logits(model, each) for each in (batch, forgotten)))
    assert same is not distinguished


def test_a_file_without_a_header_is_reported_with_how_to_say_so(build: Build) -> None:
    Path("bare.csv").write_text("1,good\n0,bad\n" * 5)
    with pytest.raises(UserError, match=r"if its first row \(1, good\) is data, give header: false"):
        build(train="bare.csv")


def test_a_long_first_row_in_the_place_of_names_is_reported_by_its_beginning(build: Build) -> None:
    Path("bare.csv").write_text(f"1,{'very ' * 100}good\n0,bad\n" * 5)
    with pytest.raises(UserError) as refused:
        build(train="bare.csv")
    assert all(len(each.fix) < 250 for each in refused.value.problems)


def test_a_header_with_a_column_of_nearly_the_name_is_not_taken_for_data(build: Build) -> None:
    Path("named.csv").write_text("lable,txt\n1,good\n0,bad\n" * 5)
    with pytest.raises(UserError, match="did you mean lable") as refused:
        build(train="named.csv", text_column="review")
    assert "header: false" not in str(refused.value)


def test_training_data_of_one_class_are_reported_with_what_that_may_come_from(build: Build) -> None:
    Path("sorted.csv").write_text("label,text\n" + "1,good\n" * 20)
    with pytest.raises(UserError) as refused:
        build(train="sorted.csv")
    (words,) = refused.value.problems
    assert words.why == "all 18 training samples are of one class, '1'"
    assert "sorted by label" in words.fix
    assert "if 'label' is not it" in words.fix


def test_an_archive_by_another_name_is_called_what_it_is(build: Build) -> None:
    Path("zipped.csv").write_bytes(b"PK\x03\x04" + bytes(range(256)))
    with pytest.raises(UserError, match=r"zipped\.csv is a zip archive"):
        build(train="zipped.csv")


def test_prediction_takes_a_file_without_labels(build: Build) -> None:
    workload = build()
    Path("new.csv").write_text("text\ngood\n\nbad room\n")
    samples = workload.prediction_samples("new.csv")
    assert list(samples.names) == ["row 1", "row 2"]
    rows = workload.predict(workload.build_model(), workload.collate([samples.load(i, 0) for i in range(2)]))
    assert {row["label"] for row in rows} <= {"0", "1"}
    assert all(0.5 <= row["probability"] <= 1 for row in rows)
    assert workload.prediction_samples(None) is workload.evaluation


def test_texts_that_are_typed_and_lines_of_a_file_are_predicted_as_rows_of_a_table_are(build: Build) -> None:
    workload = build()
    Path("new.csv").write_text("text\ngood hotel\nbad room\n")
    Path("new.txt").write_text("good hotel\n\nbad room\n")
    ways = [workload.prediction_samples("new.csv"), workload.prediction_samples("new.txt")]
    ways.append(workload.text_samples(["good hotel", "bad room"]))
    model = workload.build_model().eval()
    rows = [workload.predict(model, workload.collate([way.load(i, 0) for i in range(2)])) for way in ways]
    assert rows[0] == rows[1] == rows[2]
    assert [list(way.names) for way in ways] == [["row 1", "row 2"], ["line 1", "line 3"], ["text 1", "text 2"]]
    assert [workload.described(way, 1) for way in ways] == [{"text": "bad room"}] * 3


def test_a_prediction_is_the_likeliest_class_and_has_the_probability_of_each(build: Build) -> None:
    workload = build()
    model, batch = workload.build_model().eval(), everything(workload)
    padded = everything(build(unpadded=False))
    inputs = {name: tensor for name, tensor in padded.items() if name != "labels"}
    expected = model(**inputs).logits.softmax(-1)
    for row, found in zip(workload.predict(model, batch), expected.tolist(), strict=True):
        assert list(row["probabilities"].values()) == pytest.approx(found, abs=1e-6)
        assert row["probabilities"][row["label"]] == row["probability"] == max(row["probabilities"].values())


def test_a_row_of_predictions_shows_the_text_and_the_label_that_the_data_give(build: Build) -> None:
    workload = build()
    shown = workload.described(workload.evaluation, 0)
    assert list(shown) == ["text", "reference"]
    label = workload.evaluation.load(0, 0)[2]
    assert shown["reference"] == str(label)


def test_typed_texts_are_refused_where_the_model_takes_pairs_and_where_one_is_empty(build: Build) -> None:
    with pytest.raises(UserError, match="number 2 is empty"):
        build().text_samples(["good", " "])
    Path("pairs.csv").write_text("label,text,other\n" + "0,good,the room\n1,bad,hotel\n" * 6)
    with pytest.raises(UserError, match="takes pairs of texts"):
        build(train="pairs.csv", text_pair_column="other").text_samples(["good"])


def test_class_weights_change_the_loss_and_are_in_the_report(build: Build) -> None:
    plain, weighted = build(), build(loss={"class_weights": {"1": 3.0}})
    model, batch = weighted.build_model().eval(), everything(weighted)
    padded = everything(build(unpadded=False))
    logits = model(**{name: tensor for name, tensor in padded.items() if name != "labels"}).logits
    weight = torch.tensor([1.0, 3.0])
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"], weight)  # over all training samples
    torch.testing.assert_close(weighted.loss_sum(model, batch) / weighted.count(batch), expected)
    assert weighted.facts["class_weights"]["1"] == pytest.approx(3 * weighted.facts["class_weights"]["0"])
    assert "class_weights" not in plain.facts


def test_saved_assets_and_weights_load_into_plain_transformers(build: Build, tmp_path: Path) -> None:
    from transformers import pipeline

    workload = build(train=[*["great,good hotel"] * 10, *["awful,bad room"] * 10])
    model = workload.build_model().eval()
    folder = tmp_path / "saved"
    folder.mkdir()
    workload.save_assets(model, folder)
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (theirs,) = pipeline("text-classification", model=str(folder))("good hotel")
    ids = torch.tensor([workload._tokenizer("good hotel")["input_ids"]])
    ours = workload.predict(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})[0]
    assert theirs["label"] == ours["label"]
    assert theirs["score"] == pytest.approx(ours["probability"], abs=1e-5)


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "one class": ({"train": ["1,good"] * 5}, ["one class", "'1'"]),
    "a class of one sample": ({"train": [*LINES, "2,good"]}, ["one sample", ": 2"]),
    "columns that are swapped": (
        {
            "train": [f"bad,{'good hotel ' * 40}{place}" for place in range(30)],
            "text_column": "label",
            "label_column": "text",
        },
        [
            "workload.data.label_column: column text has 30 different labels in 30 rows, nearly one for each: "
            "'good hotel good hotel good hotel good...'",
            "the columns look swapped: give text_column=text label_column=label",
        ],
    ),
    "the texts as labels too": (
        {"train": [f"bad,good {place}" for place in range(30)], "label_column": "text"},
        ["text_column is the same one"],
    ),
    "a long class of one sample": ({"train": [*LINES, f"{'2' * 400},good"]}, ["one sample", f": {'2' * 37}...\n"]),
    "no label": (
        {"train": [*LINES, ",good"], "bad_rows": "error"},
        ["1 of the 31 rows", "it has no label (first line 32 (row 31) of"],
    ),
    "a label that training lacks": ({"evaluation": ["1,good", "7,bad"]}, ["data.evaluation", "'7'", "known: 0, 1"]),
    "no text at all": ({"train": ["1,", "0, "]}, ["no row of", "text"]),
    "two wrong columns": ({"text_column": "txt", "label_column": "lable"}, ["data.text_column", "data.label_column"]),
    "a subset of a file": ({"subset": "en"}, ["data.subset", "train.csv is of this machine"]),
    "a stream of a hub data set": (
        {"train": "owner/reviews", "evaluation": ["1,good", "0,bad"], "stream": True},
        ["data.train", "owner/reviews is no file or folder here", "rows of texts are not streamed"],
    ),
    "data and tokenizer": (
        {"train": "no.csv", "evaluation": "none.csv", "model": {"tokenizer": "voc.txt", "config": BERT}},
        ["workload.model.tokenizer", "workload.data.train", "workload.data.evaluation"],
    ),
}


@pytest.mark.parametrize(("given", "reported"), REFUSED.values(), ids=REFUSED)
def test_data_that_cannot_serve_are_refused_with_every_reason(
    build: Build, given: dict[str, Any], reported: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        build(**given)
    assert all(part in str(caught.value) for part in reported), str(caught.value)


@pytest.mark.parametrize(
    ("config", "max_length", "reported"),
    [
        ({"vocab_size": 7}, 16, ["workload.model.config.vocab_size", "vocab_size (7) < the tokenizer's tokens (12)"]),
        ({}, 33, ["workload.data.max_length", "max_length (33) > the model's context (32"]),
        ({"vocab_size": 7}, 33, ["vocab_size", "max_length"]),
        ({"model_type": "roberta"}, 32, ["max_length (32) > the model's context (31"]),  # one is the padding's
        ({"pad_token_id": 3}, 16, ["workload.model.config.pad_token_id", "(3) is not the tokenizer's (0)"]),
    ],
)
def test_a_model_that_the_tokens_do_not_fit_is_refused(
    build: Build, config: dict[str, Any], max_length: int, reported: list[str]
) -> None:
    workload = build(model={"tokenizer": "vocab.txt", "config": {**BERT, **config}}, max_length=max_length)
    with pytest.raises(UserError) as caught:
        workload.build_model()
    assert all(part in str(caught.value) for part in reported), str(caught.value)


def test_the_hotel_reviews_lose_their_one_empty_row(shared_data: Path, tmp_path: Path) -> None:
    config = {
        "model": {"tokenizer": str(shared_data / "vocab/bert-base-chinese/vocab.txt"), "config": BERT},
        "data": {
            "train": str(shared_data / "ChnSentiCorp_htl_all.csv"),
            "text_column": "review",
            "cache": str(tmp_path),
            "max_length": 32,
        },
    }
    workload = TextClassificationWorkload(TextClassification.model_validate(config), seed=0)
    assert len(workload.train) + len(workload.evaluation) == 7_765
    assert workload.facts["unusable_rows"] == 1
    assert "row 6375" not in [*workload.train.names, *workload.evaluation.names]
    assert Counter(everything(workload, "evaluation")["labels"].tolist()) == {1: 532, 0: 244}


# --- streams ---------------------------------------------------------------------------------------------------------


def _shards(folder: Path, rows: list[dict[str, Any]], size: int = 7) -> str:
    folder.mkdir()
    for number, start in enumerate(range(0, len(rows), size)):
        content = "".join(json.dumps(row) + "\n" for row in rows[start : start + size]).encode()
        (folder / f"{number:03}.jsonl.gz").write_bytes(gzip.compress(content))
    return f"{folder}/*.gz"


ROWS = [
    {"text": f"{'good' if number % 3 else 'bad'} hotel {'the ' * (number % 5)}", "label": int(number % 3 > 0)}
    for number in range(40)
]


def test_a_stream_has_the_samples_that_it_has_read_whole(build: Build, tmp_path: Path) -> None:
    Path("whole.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    evaluation = ["1,good hotel", "0,the bad bad room"]
    whole = build(train="whole.jsonl", evaluation=evaluation)
    stream = build(train=_shards(tmp_path / "shards", ROWS), evaluation="evaluation.csv", stream=True, stream_buffer=9)

    def sorted_rows(workload: TextClassificationWorkload) -> list[tuple[list[int], int]]:
        batch = everything(workload)
        pairs = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
        return sorted(([token for token in ids if token], label) for ids, label in pairs)

    assert sorted_rows(stream) == sorted_rows(whole)
    assert stream.lengths is None
    assert stream.facts["train_samples"] is None
    assert "its 6 shards are shuffled" in "".join(stream.warnings)
    order = stream.order(8, 0, by_epochs=True)
    taken = [int(index) for step in range(5) for index in order.batch(step)[1]]
    assert sorted(taken) == list(range(40))


def test_rows_of_a_stream_without_text_or_label_count_for_nothing_or_are_refused(build: Build, tmp_path: Path) -> None:
    rows = [*ROWS[:5], {"text": " ", "label": 1}, *ROWS[5:9], {"text": "good", "label": None}]
    given: dict[str, Any] = {"train": _shards(tmp_path / "shards", rows), "evaluation": ["1,good", "0,bad"]}
    workload = build(**given, stream=True, bad_rows=0.2)
    batch = everything(workload)
    assert workload.count(batch) == 9
    model = workload.build_model().eval()
    kept = {name: tensor[batch["labels"] >= 0] for name, tensor in batch.items()}
    torch.testing.assert_close(workload.loss_sum(model, batch), workload.loss_sum(model, kept))
    with pytest.raises(UserError) as caught:
        build(**{**given, "evaluation": "evaluation.csv"}, stream=True, bad_rows="error")
    for named in ("it has no text (first 000.jsonl.gz line 6)", "it has no label (first 001.jsonl.gz line 4)"):
        assert named in str(caught.value)


def test_a_stream_whose_first_rows_lack_labels_is_refused_as_the_whole_reading_is(build: Build, tmp_path: Path) -> None:
    rows = [{**row, "label": None} for row in ROWS]
    given: dict[str, Any] = {"train": _shards(tmp_path / "shards", rows), "evaluation": ["1,good", "0,bad"]}
    with pytest.raises(UserError, match=r"40 of the 40 rows of the beginning of .* cannot be used, more than 5 %"):
        build(**given, stream=True)
    with pytest.raises(UserError, match="cannot be used, more than 5 %"):
        build(**{**given, "train": _shards(tmp_path / "few", [*rows[:3], *ROWS]), "evaluation": "evaluation.csv"})
    with pytest.raises(UserError, match=r"3 of the 43 rows of the beginning of .* cannot be used, more than 5 %"):
        build(**{**given, "train": f"{tmp_path}/few/*.gz", "evaluation": "evaluation.csv"}, stream=True)


def test_what_a_stream_of_texts_cannot_do_is_refused_all_at_once(build: Build, tmp_path: Path) -> None:
    path = _shards(tmp_path / "shards", ROWS)
    with pytest.raises(UserError) as caught:
        build(train=path, stream=True, limit_train=3, label_column=0, loss={"class_weights": "balanced"})
    fields = {problem.field for problem in caught.value.problems}
    named = ("data.evaluation", "loss.class_weights", "data.limit_train", "data.label_column")
    assert fields == {f"workload.{name}" for name in named}
    with pytest.raises(UserError, match=r"000\.jsonl\.gz line 1 has the label '0', which is none of 1, 2"):
        build(train=path, stream=True, evaluation=["1,good", "2,bad"])
    Path("stars.csv").write_text("stars,text\n1,good\n0,bad\n")
    with pytest.raises(UserError, match="no row has a column 'stars'"):
        build(train=path, stream=True, evaluation="stars.csv", label_column="stars")


def test_a_preview_is_the_text_that_the_model_reads(build: Build) -> None:
    workload = build()
    found = [workload.preview(workload.train, index) for index in range(len(workload.train))]
    texts = {each["text"].replace(" ", "") for each in found}
    assert texts
    assert not any("int" in text or "[CLS]" in text for text in texts)
    assert all({"text", "reference"} <= each.keys() for each in found)
    chinese = decoded(Spaced(), np.array([1]))
    assert chinese == "房间干净，服务 OK 好"


class Spaced:
    """A tokenizer that puts a space between all tokens, as BERT's does."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert (ids, skip_special_tokens) == ([1], True)
        return "房 间 干 净 ， 服 务 OK 好"
