"""`drivetrain data`: what a user sees of the data before anything is trained."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.text import Text

from drivetrain.cli.data_examination import examine
from drivetrain.cli.data_report import show
from drivetrain.config.load import load
from tests.tiny_language import ROWS, talk, write_lines

Drivetrain = Callable[..., tuple[int, str, str]]
RUN = """
workload:
  type: language_model
  stage: sft
  model:
    config:
      {model_type: llama, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2,
       max_position_embeddings: 512}
  data: {train: train.jsonl, template: chatml, length: 256, cache: cache}
batch_size: 4
loop: {steps: 1}
"""
LOST = [talk("", "a"), {"instruction": "b"}, talk("c", ""), *[talk("d", "")] * 4]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with twenty conversations, and others with faults; the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    Path("run.yaml").write_text(RUN)
    write_lines(Path("train.jsonl"), ROWS)
    write_lines(Path("faulty.jsonl"), [*ROWS, *LOST])
    write_lines(Path("lost.jsonl"), LOST)
    write_lines(Path("strange.jsonl"), [{"question": "a", "answer": "b"}] * 5)
    write_lines(Path("long.jsonl"), [*ROWS, talk("say", "x" * 1000)])
    Path("empty.jsonl").write_text("")
    Path("mixed.jinja").write_text("{{ messages[-1].content }}{% if add_generation_prompt %} so:{% endif %}")
    Path("dataset_info.json").write_text(json.dumps({"train_en": {"file_name": "train.jsonl"}}))


def printed(*overrides: str, width: int = 80, terminal: bool = True, encoding: str = "utf-8") -> str:
    """Returns what a terminal of that width, or a file, gets."""
    run, problems = load(Path("run.yaml"), overrides)
    assert run is not None
    assert not problems
    report, _ = examine(run)
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    color = "standard" if terminal else None
    show(report, Console(file=file, width=width, force_terminal=terminal, color_system=color, highlight=False))
    file.flush()
    return raw.getvalue().decode(encoding)


# --- the account -----------------------------------------------------------------------------------------------------


def test_rows_that_train_refuses_are_shown_and_counted(drivetrain: Drivetrain) -> None:
    code, out, _ = drivetrain("data", "run.yaml", "data.train=faulty.jsonl")
    assert code == 0
    assert "faulty.jsonl    27       7       18     2" in out
    assert "faulty.jsonl line 21: instruction is empty" in out
    assert "faulty.jsonl line 22: output is missing" in out
    assert "and 2 more" in out
    assert (
        "train would refuse this: workload.data.bad_rows: 7 of 27 rows cannot be used; give workload.data.bad_rows=0.26"
        in out
    )
    assert "5 because output is empty (first faulty.jsonl line 23)" in out.split("of all:")[1]
    code, out, _ = drivetrain("data", "run.yaml", "data.train=faulty.jsonl", "bad_rows=drop")
    assert "train would refuse this: workload.data.bad_rows: 7 of 27 rows of faulty.jsonl cannot be used" in out
    assert "more than 5 %; give workload.data.bad_rows=0.26" in " ".join(out.split())
    code, _, err = drivetrain("train", "run.yaml", "data.train=faulty.jsonl")
    assert code == 2
    assert "faulty.jsonl line 21: instruction is empty" in err


def test_rows_that_cannot_be_read_are_reported_with_all_others_by_either_verb(drivetrain: Drivetrain) -> None:
    Path("broken.jsonl").write_text(Path("faulty.jsonl").read_text() + "{\n")
    for verb in ("data", "train"):
        code, _, err = drivetrain(verb, "run.yaml", "data.train=broken.jsonl")
        assert code == 2
        assert "broken.jsonl cannot be read: line 28 is broken JSON" in err
        assert "broken.jsonl line 21: instruction is empty" in err


def test_what_is_lost_is_reported_once_by_either_verb_and_placeholders_too(drivetrain: Drivetrain) -> None:
    write_lines(Path("named.jsonl"), [*ROWS, *LOST, talk("Who?", "{{name}}")])
    given = ("run.yaml", "data.train=named.jsonl", "data.bad_rows=0.25")
    code, out, err = drivetrain("data", *given)
    assert code == 0
    assert "unusable in named.jsonl" in out
    assert "left out" not in err
    assert "1 conversations of named.jsonl hold {{name}}" in err
    code, out, err = drivetrain("train", *given)
    assert code == 0
    assert "of the 28 rows of named.jsonl are left out: 7 cannot be used" in " ".join((out + err).split())
    assert "1 conversations of named.jsonl hold {{name}}" in " ".join((out + err).split())


def test_what_train_takes_is_refused_by_no_verb(drivetrain: Drivetrain) -> None:
    for given in (["data.train=faulty.jsonl", "bad_rows=0.26"], ["data.train=long.jsonl"], []):
        code, out, _ = drivetrain("data", "run.yaml", *given)
        assert code == 0
        assert "refuse" not in out
        assert drivetrain("train", "run.yaml", *given, "--overwrite", "--quiet")[0] == 0


def test_all_that_train_would_refuse_of_the_data_is_reported(drivetrain: Drivetrain) -> None:
    given = ["data.train=long.jsonl", "too_long=error", "batch_size=50", "evaluation.metric=perplexty"]
    code, out, _ = drivetrain("data", "run.yaml", *given)
    assert code == 0
    assert "workload.data.too_long: 1 of 21 rows are too long" in out
    assert "batch_size: the batch (50) > the training data (18 samples); give at most 18" in out
    assert "evaluation.metric: there is no metric perplexty" in out
    assert drivetrain("train", "run.yaml", *given)[0] == 2


def test_data_of_which_nothing_is_left_still_have_an_account(drivetrain: Drivetrain) -> None:
    code, out, _ = drivetrain("data", "run.yaml", "data.train=lost.jsonl")
    assert code == 0
    assert "lost.jsonl line 1: instruction is empty" in out
    assert "train would refuse this: workload.data.train: no sample is left of the 7 rows of lost.jsonl" in out
    code, out, _ = drivetrain("data", "run.yaml", "length=20")
    assert code == 0
    assert "train.jsonl    20       0        0     0          0     0       20" in out


REFUSED = {
    "an empty file": (["data.train=empty.jsonl"], "empty.jsonl is empty"),
    "no file": (["data.train=nowhere.jsonl"], "nowhere.jsonl does not exist"),
    "rows of no known form": (["data.train=strange.jsonl"], "question, answer: no format that is known"),
    "a wrong column": (["data.train={path: train.jsonl, columns: {prompt: instructon}}"], "did you mean instruction?"),
    "an unknown name": (["data.train=train_en_", "data.registry=."], "did you mean train_en?"),
    "an unknown template": (["data.template=chatlm"], "did you mean chatml?"),
    "no template": (["data.template=null"], "the tokenizer has no chat template"),
    "a template that tells no replies from prompts": (["data.template=mixed.jinja"], "does not tell replies from"),
    "a template that cannot end replies": (["data.template=alpaca", "model.tokenizer=plain"], "no reply would end"),
    "rows alone, and a vocabulary to be made of them": (
        ["data.train=lost.jsonl", "tokenizer=bpe", "vocabulary_size=300"],
        "lost.jsonl line 1: instruction is empty",
    ),
    "a broken run": (["batch_size=-1"], "-1 was given"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_leaves_nothing_to_show_is_refused_in_words(case: str, drivetrain: Drivetrain) -> None:
    from drivetrain.data.language.vocabularies import byte_tokenizer

    byte_tokenizer().save_pretrained("plain")
    overrides, words = REFUSED[case]
    code, out, err = drivetrain("data", "run.yaml", *overrides)
    assert (code, out) == (2, "")
    assert words in err


def test_no_model_is_made_and_no_process_started(drivetrain: Drivetrain) -> None:
    """One whose heads do not divide its width is refused by train, and of no account here."""
    broken = ["model.config.num_attention_heads=3", "engine=ddp", "processes=2"]
    assert drivetrain("data", "run.yaml", *broken)[0] == 0
    assert not torch.distributed.is_initialized()
    assert not Path("runs").exists()


def test_other_workloads_tell_their_facts(drivetrain: Drivetrain) -> None:
    Path("digits.yaml").write_text("""
workload:
  type: image_classification
  model: {norm: group, config: {model_type: resnet}}
  data: {source: digits, limit_train: 64, limit_evaluation: 40}
batch_size: 100
loop: {steps: 1}
""")
    code, out, _ = drivetrain("data", "digits.yaml")
    assert code == 0
    assert "train samples" in out
    assert "train would refuse this: batch_size: the batch (100) > the training data (64 samples)" in out
    report = json.loads(drivetrain("data", "digits.yaml", "--json")[1])
    assert (report["train_samples"], report["evaluation_samples"]) == (64, 40)
    assert sum(each["training"] for each in report["class counts"]) == 64
    assert [each["class"] for each in report["class counts"]] == list("0123456789")


REVIEWS = """
workload:
  type: text_classification
  model: {tokenizer: vocab.txt, config: {model_type: bert, hidden_size: 16}}
  data: {train: train.csv, evaluation: held.csv, cache: cache, max_length: 4}
batch_size: 4
loop: {steps: 1}
"""


def test_classes_are_counted_with_their_shares_and_lengths_have_units(drivetrain: Drivetrain) -> None:
    Path("reviews.yaml").write_text(REVIEWS)
    Path("vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]))
    Path("train.csv").write_text("label,text\n" + "yes,good good good good\n" * 6 + "no,bad\n" * 2)
    Path("held.csv").write_text("label,text\nyes,good\nyes,good bad\n")
    code, out, err = drivetrain("data", "reviews.yaml")
    assert code == 0, err
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.split()[:1] in (["yes"], ["no"])}
    assert rows == {"yes": ["6", "75.0%", "2", "100.0%"], "no": ["2", "25.0%", "0", "0.0%"]}
    assert "75.0% of the training texts" in out
    assert "3.8 a text" in out
    assert "all 2 evaluation samples are of one class, 'yes': accuracy means nothing" in " ".join(err.split())


def reviews(words: str, train: str, held: str, more: str = "") -> None:
    Path("reviews.yaml").write_text(REVIEWS.replace("max_length: 4", f"max_length: 512{more}"))
    Path("vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words.split()]))
    Path("train.csv").write_text("label,text\n" + train)
    Path("held.csv").write_text("label,text\n" + held)


def test_the_first_texts_of_each_class_are_shown_as_the_model_reads_them(drivetrain: Drivetrain) -> None:
    train = "yes,GOOD [bold]\nno,bad\nyes,good bad\nyes,bad bad\nno," + "bad " * 100 + "\n"
    reviews("good bad bold [ ]", train, "yes,good\nno,bad\n")
    code, out, err = drivetrain("data", "reviews.yaml")
    assert code == 0, err
    shown = [line.rstrip() for line in out.splitlines()]
    start = shown.index("first texts of no")
    assert shown[start + 1] == "bad"
    assert shown[start + 2] == ("bad " * 50)[:197] + "..."
    assert shown[start + 3 :][:4] == ["", "first texts of yes", "good [ bold ]", "good bad"]
    assert "bad bad" not in shown, "two texts of a class are enough"
    report = json.loads(drivetrain("data", "reviews.yaml", "--json")[1])
    assert [each["class"] for each in report["class samples"]] == ["no", "yes"]
    assert report["class samples"][1]["texts"] == ["good [ bold ]", "good bad"]
    assert "GOOD" not in drivetrain("data", "reviews.yaml", "--rows", "1")[1]
    assert "good bad" not in drivetrain("data", "reviews.yaml", "--rows", "1")[1], "the samples that were asked for"


def test_texts_of_twenty_classes_are_shown_at_most(drivetrain: Drivetrain) -> None:
    rows = "".join(f"{number:02},good\n" * 3 for number in range(30))
    reviews("good", rows, rows)
    code, out, err = drivetrain("data", "reviews.yaml", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert [each["class"] for each in report["class samples"]] == [f"{number:02}" for number in range(20)]
    assert len(report["class counts"]) == 30


def test_a_stream_shows_texts_of_its_evaluation_data(drivetrain: Drivetrain) -> None:
    reviews("good bad", "yes,good\nno,bad\n" * 20, "yes,good good\nno,bad bad\n", ", stream: true")
    report = json.loads(drivetrain("data", "reviews.yaml", "--json")[1])
    assert [each["texts"] for each in report["class samples"]] == [["bad bad"], ["good good"]]


# --- how it looks ----------------------------------------------------------------------------------------------------


def test_packing_does_in_so_many_positions_what_is_no_padding() -> None:
    lines = [line for line in printed(width=120, terminal=False).splitlines() if line.endswith("of the positions")]
    assert [line.split(" (")[0].split(",")[0] for line in lines] == ["the length", "a batch's longest"]
    for line in lines:
        padding, packed = map(int, re.findall(r"(\d+)%", line))
        assert 0 < packed < 100
        assert padding + packed == pytest.approx(100, abs=1)


def test_json_is_the_report_and_nothing_else(drivetrain: Drivetrain) -> None:
    code, out, _ = drivetrain("data", "run.yaml", "data.train=faulty.jsonl", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["sets"][0]["unusable rows"] == 7
    assert len(report["refused by train"]) == 1
    assert report["sample"]["pieces"][1] == {"text": "0<|im_end|>", "trained": True}


def test_samples_are_shown_as_they_are_trained_on(drivetrain: Drivetrain) -> None:
    code, out, _ = drivetrain("data", "run.yaml", "--rows", "2", "--first", "1", "--json")
    assert code == 0
    [first, second] = json.loads(out)["samples"]
    assert (first["number"], second["number"]) == (1, 2)
    [side] = first["sides"]
    prompt, reply, end = side["segments"]
    assert [each["trained"] for each in (prompt, reply, end)] == [False, True, False]
    assert (reply["text"], end["text"]) == ("hello 1<|im_end|>", "\n")
    assert side["length"] > 5
    assert not side["at_length"]
    _, out, _ = drivetrain(
        "data", "run.yaml", "--rows", "1", "--evaluation", "data.evaluation=faulty.jsonl", "bad_rows=1"
    )
    assert "sample 0" in out
    assert "⟦0<|im_end|>⟧" in out.split("sample 0")[1]


REWARDS = ("workload.stage=grpo", "reinforcement.rewards=exact_match", "reinforcement.max_new_tokens=4")


def test_prompts_that_are_asked_for_are_shown_with_the_reference_of_their_answers(drivetrain: Drivetrain) -> None:
    code, out, _ = drivetrain("data", "run.yaml", *REWARDS, "--rows", "2", "--json")
    assert code == 0
    samples = json.loads(out)["samples"]
    assert [each["reference"] for each in samples] == ["0", "hello 1"]
    [side] = samples[1]["sides"]
    assert [each["trained"] for each in side["segments"]] == [False]
    assert "say 1" in side["segments"][0]["text"]


def test_the_first_prompt_is_shown_with_its_reference_and_no_token_as_trained(drivetrain: Drivetrain) -> None:
    code, out, _ = drivetrain("data", "run.yaml", *REWARDS)
    assert code == 0
    assert re.search(r"^tokens +[\d,]+, all of prompts", out, re.M)
    assert "which the model answers" in out
    assert "are trained on" not in out
    assert out.split("reference, which rewards may compare answers with\n")[1].startswith("0\n")


def test_a_prompt_alone_is_shown_as_a_prompt_without_a_reference(drivetrain: Drivetrain) -> None:
    Path("prompts.jsonl").write_text('{"prompt": "say 1"}\n{"prompt": "say 2"}\n')
    brief = ("reinforcement.rewards=[{use: length, options: {most: 4, over: 2}}]", "reinforcement.max_new_tokens=4")
    given = ("workload.stage=grpo", *brief, "data.train=prompts.jsonl", "data.evaluation=null", "--rows", "1")
    code, out, _ = drivetrain("data", "run.yaml", *given)
    assert code == 0
    assert re.search(r"^tokens +[\d,]+, all of prompts", out, re.M)
    assert "no reply in the data" in out
    assert "are trained on" not in out


def test_trained_tokens_are_marked_with_colour_and_without() -> None:
    assert "<|im_start|>assistant\n⟦0<|im_end|>⟧\n" in printed(terminal=False)
    coloured = printed()
    assert "\x1b[32m0<|im_end|>" in coloured
    assert "⟦" in coloured
    assert "\x1b" not in printed(terminal=False)


def test_a_sample_is_shown_whole_and_unwrapped_without_a_terminal() -> None:
    reply = " ".join(f"word{number}" for number in range(40))
    write_lines(Path("train.jsonl"), [talk("say", reply)] * 20)
    assert f"⟦{reply}<|im_end|>⟧" in printed("length=512", terminal=False)


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_is_never_wider_than_it_is(width: int) -> None:
    name = "a_data_set_with_a_name_as_long_as_those_on_the_hub_can_be.jsonl"
    reply = " ".join(f"word{number}" for number in range(40))
    write_lines(Path(name), [*[talk("say", reply)] * 1200, *LOST])
    source = f"data.train=[{{path: {name}, weight: 2}}, {{path: faulty.jsonl, weight: 1, samples: 1}}]"
    shown = printed(source, "bad_rows=error", "length=300", "batch_size=5000", width=width)
    for line in shown.splitlines():
        assert Text.from_ansi(line).cell_len <= width, line
    assert "…" not in shown
    for number in range(40):
        assert f"word{number}" in shown


def test_data_cannot_steer_the_terminal() -> None:
    write_lines(Path("train.jsonl"), [talk("[red]a[/red]\x1b[2J\a", "tab\there\r\n\x9b1m")] * 20)
    shown = printed(terminal=False)
    assert "[red]a[/red]\\x1b[2J\\x07" in shown
    assert "here\\r\n\\x9b1m" in shown
    assert "\x1b" not in shown
    assert "\x9b" not in shown


def test_an_output_of_another_encoding_gets_all_of_it() -> None:
    write_lines(Path("train.jsonl"), [talk("春", "眠")] * 20)
    shown = printed(terminal=False, encoding="ascii")
    assert "\\u6625" in shown
    assert "#####" in shown


def test_a_stream_says_what_was_looked_at(drivetrain: Drivetrain) -> None:
    write_lines(Path("train.jsonl"), [*LOST, *ROWS * 20])
    code, out, _ = drivetrain("data", "run.yaml", "stream=true")
    assert code == 0
    assert "a stream: all figures but those of rows and samples are of the first 256 rows of each data set" in out
    refused = "train would refuse this: workload.data.bad_rows: 7 of 256 rows cannot be used"
    assert f"{refused}; give workload.data.bad_rows=drop" in out


def test_a_length_beyond_the_models_context_is_reported_as_train_refuses_it(drivetrain: Drivetrain) -> None:
    code, out, err = drivetrain("data", "run.yaml", "data.length=600")
    assert (code, err.count("Traceback")) == (0, 0)
    refused = "length (600) > the model's context (512; max_position_embeddings)"
    assert f"train would refuse this: workload.data.length: {refused}" in out
    default = "length (3000) > the model's context (2048; max_position_embeddings)"
    Path("run.yaml").write_text(RUN.replace("max_position_embeddings: 512", ""))
    _, out, _ = drivetrain("data", "run.yaml", "data.length=3000")
    assert f"train would refuse this: workload.data.length: {default}" in out, "LlamaConfig's own"
    _, out, _ = drivetrain("data", "run.yaml", "model.config.model_type=lama")
    assert "train would refuse this: workload.model.config.model_type: Transformers knows no 'lama'" in out
    Path("run.yaml").write_text(RUN)
    code, _, err = drivetrain("train", "run.yaml", "data.length=600", "batch_size=null")
    assert code == 2
    assert refused in err
    assert "2 problems" in err, "it comes with what the run file alone shows"


def test_rows_of_several_answers_and_their_pairs_are_counted() -> None:
    answered = [{"prompt": f"ask {n}", "responses": ["a", "b", "c"], "scores": [3, 2, 2 + n % 2]} for n in range(4)]
    write_lines(Path("scored.jsonl"), answered)
    given = ("workload.stage=dpo", "workload.data.train=scored.jsonl", "workload.data.evaluation_fraction=0")
    assert "4 rows of several answers in scored.jsonl make 8 pairs" in printed(*given, "workload.data.pairs=all")
    assert "4 rows of several answers in scored.jsonl make 4 pairs" in printed(*given)
