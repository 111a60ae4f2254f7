"""Prompts answered at evaluations: as Transformers' generate does it, under any engine, without a trace in training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from transformers import AutoModelForCausalLM, AutoTokenizer

from drivetrain.config.language import LanguageModel
from drivetrain.data.language.template_sources import FOLDER
from drivetrain.distributed.communicator import Communicator
from drivetrain.errors import UserError
from drivetrain.generation.answering import Answering
from drivetrain.workloads.language_model import LanguageModelWorkload
from tests.tiny_language import LLAMA, talk, write_lines
from tests.tiny_workload import tiny_engine

Run = Callable[..., tuple[int, str, str]]
TALKS = [talk(f"say {number % 4}", f"it is {number % 4}") for number in range(32)]


def run_file(**generate: Any) -> None:
    write_lines(Path("t.jsonl"), TALKS)
    workload = {
        "type": "language_model",
        "stage": "sft",
        "model": {"config": {**LLAMA, "attention_dropout": 0.1}},
        "data": {"train": "t.jsonl", "evaluation": "t.jsonl", "template": "chatml", "length": 96, "cache": "cache"},
        "generate": {"samples": 2, "prompts": ["say 7"], "max_new_tokens": 8, **generate},
    }
    rhythm = {"loop": {"steps": 6}, "evaluation": {"every_steps": 3}, "tracking": {"log_every": 1}}
    run = {"workload": workload, "batch_size": 8, "optimizer": {"lr": 1e-2}, **rhythm}
    YAML(typ="safe", pure=True).dump(run, Path("run.yaml"))


def trained(drivetrain: Run, output: str, *overrides: str) -> tuple[list[Any], list[dict[str, Any]]]:
    """Its curve and evaluations, and its samples."""
    code, _, words = drivetrain("train", "run.yaml", f"output={output}", "--quiet", *overrides)
    assert code == 0, words
    events = [json.loads(line) for line in Path(output, "events.jsonl").read_text().splitlines()]
    steps = [(each["step"], each["loss"], each["grad_norm"]) for each in events if each["event"] == "step"]
    file = Path(output, "samples.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [*steps, *(each["metrics"] for each in events if each["event"] == "evaluation")], samples


def test_greedy_answers_are_those_of_transformers(
    drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_file()
    _, samples = trained(drivetrain, "out")
    assert [(each["step"], each["reference"]) for each in samples] == [
        (step, known) for step in (3, 6) for known in ("it is 0", "it is 1", None)
    ]
    folder = "out/checkpoints/step-00000006"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    for sample in samples[3:]:
        ids = tokenizer(sample["prompt"], add_special_tokens=False, return_tensors="pt")["input_ids"]
        found = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(found, skip_special_tokens=True) == sample["answer"]
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert model.generation_config.eos_token_id == sorted(ends), "generate() stops where replies do"
    talk = [{"role": "user", "content": "say 7"}]
    assert samples[5]["prompt"] == tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)


def test_training_goes_on_as_without_samples_and_draws_repeat(
    drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_file(temperature=1.0)
    first, again = trained(drivetrain, "a"), trained(drivetrain, "b")
    assert first == again
    without, none = trained(drivetrain, "c", "workload.generate=null")
    assert without == first[0]  # to the bit, with dropout
    assert none == []
    assert trained(drivetrain, "d", "generate.temperature=0")[1] != first[1]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_ranks_answer_as_one_process_and_train_as_without(
    engine: str, drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_file()
    quiet = "config.attention_dropout=0"
    alone = trained(drivetrain, "one", quiet)[1]
    curve, samples = trained(drivetrain, "two", quiet, f"engine={engine}", "processes=2")
    assert samples == alone
    assert trained(drivetrain, "three", quiet, f"engine={engine}", "processes=2", "workload.generate=null")[0] == curve


@pytest.mark.parametrize("packing", [True, False])
def test_predictions_have_the_answers_that_transformers_gives(
    packing: bool, drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_file()
    trained(drivetrain, "out")
    given = ("run.yaml", "output=out", f"data.packing={str(packing).lower()}", "evaluation.batch_size=3")
    write_lines(Path("new.jsonl"), [talk("say 2", "it is 2"), talk("Why?", "So"), *TALKS[:5]])
    code, _, words = drivetrain("predict", *given, "--data", "new.jsonl", "--checkpoint", "last", "--output", "p.jsonl")
    assert code == 0, words
    rows = [json.loads(line) for line in Path("p.jsonl").read_text().splitlines()]
    assert [row["reference"] for row in rows[:3]] == ["it is 2", "So", "it is 0"]
    folder = "out/checkpoints/step-00000006"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    for row, asked in zip(rows, ["say 2", "Why?", *(each["instruction"] for each in TALKS[:5])], strict=True):
        reported = [{"role": "user", "content": asked}]
        assert row["prompt"] == tokenizer.apply_chat_template(reported, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(row["prompt"], add_special_tokens=False, return_tensors="pt")["input_ids"]
        found = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(found, skip_special_tokens=True) == row["answer"]
    code, _, _ = drivetrain("predict", *given, "workload.generate=null", "--output", "losses.csv")
    assert code == 0
    assert Path("losses.csv").read_text().startswith("sample,loss,tokens\n")


def workload(folder: Path, stage: str = "sft", rows: Any = TALKS, generate: Any = None, **data: Any) -> Any:
    path = write_lines(folder / "t.jsonl", rows)
    template = {"template": "chatml"} if stage == "sft" else {}
    given = {"train": path, "length": 64, "cache": folder / "cache", "evaluation": path, **template, **data}
    model = {"stage": stage, "model": {"config": LLAMA}, "data": given, "generate": generate or {}}
    return LanguageModelWorkload(LanguageModel.model_validate(model), 0)


def test_prompts_of_texts_are_their_first_tokens(tmp_path: Path) -> None:
    work = workload(
        tmp_path, "pretrain", [{"text": "abcdefghij" * 30}], {"samples": 2, "prompt_tokens": 5, "prompts": ["xy"]}
    )
    assert [(each.text, each.reference) for each in work.prompts] == [("abcde", None), ("efghi", None), ("xy", None)]


def test_prompts_of_a_stream_are_those_of_its_rows(tmp_path: Path) -> None:
    whole, streamed = workload(tmp_path), workload(tmp_path, stream=True)
    assert whole.prompts == streamed.prompts
    assert [each.reference for each in whole.prompts] == [f"it is {number}" for number in range(4)]


def test_a_run_ends_answers_where_its_positions_and_its_replies_end(tmp_path: Path) -> None:
    work = workload(tmp_path, generate={"max_new_tokens": 1000})
    torch.manual_seed(0)
    engine = tiny_engine(work)
    prompt, end = work.prompts[0], work._reader.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end in work.ends
    [answer] = Answering(engine, work, Communicator(), 1).own([prompt], [0])
    room = LLAMA["max_position_embeddings"] - len(prompt.ids)  # type: ignore[operator]
    assert len(answer.tokens) == room or answer.tokens[-1] in work.ends
    assert work.decoded([65, 66, end]) == "AB"


def test_texts_are_answered_one_a_row(drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the run file asks for no answers."""
    monkeypatch.chdir(tmp_path)
    run_file()
    trained(drivetrain, "out", "workload.generate=null")
    given = ("predict", "run.yaml", "output=out", "--checkpoint", "last")
    code, output, told = drivetrain(
        *given, "workload.generate={max_new_tokens: 6}", "--text", "say 2", "--text", "你好"
    )
    assert code == 0, told
    rows = [json.loads(line) for line in output.splitlines()]
    folder = "out/checkpoints/step-00000006"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    for number, (row, text) in enumerate(zip(rows, ("say 2", "你好"), strict=True)):
        said = [{"role": "user", "content": text}]
        assert row["prompt"] == tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(row["prompt"], add_special_tokens=False, return_tensors="pt")["input_ids"]
        found = model.generate(ids, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
        new = found.sequences[0, ids.shape[1] :]
        assert row["answer"] == tokenizer.decode(new, skip_special_tokens=True)
        logprobs = torch.cat(found.logits).log_softmax(-1).gather(1, new[:, None])
        assert row["logprob"] == pytest.approx(float(logprobs.sum()), abs=1e-3)
        assert (row["sample"], row["reference"], row["answer_tokens"]) == (number, None, len(new))
        assert row["finish_reason"] == ("stop" if new[-1] in model.generation_config.eos_token_id else "length")
    assert drivetrain(*given)[0] == 0, "the loss alone, of data"
    code, _, told = drivetrain(*given, "--text", "x" * 200)
    assert (code, "of a length of 96" in told) == (2, True)


def assert_goes_on(drivetrain: Run, given: tuple[str, ...], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks the command off after its first answers, repeats it, and compares with the whole file."""
    answered: list[int] = []
    real = Answering.dealt

    def dealt(self: Answering, prompts: Any, top_logprobs: int | None = None) -> Any:
        if answered and breaks:
            raise RuntimeError("the power went out")
        answered.extend(prompts)
        return real(self, prompts, top_logprobs)

    monkeypatch.setattr(Answering, "dealt", dealt)
    breaks = True
    with pytest.raises(RuntimeError, match="the power went out"):
        drivetrain(*given, "cut.jsonl")
    assert not Path("cut.jsonl").exists()
    breaks = False
    assert drivetrain(*given, "cut.jsonl")[0] == 0
    assert answered == list(range(count)), "each once"
    assert Path("cut.jsonl").read_text() == Path("whole.jsonl").read_text()


def test_predictions_that_broke_off_go_on(drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_file()
    trained(drivetrain, "out")
    given = ("predict", "run.yaml", "output=out", "--checkpoint", "last", "evaluation.batch_size=1", "--output")
    assert drivetrain(*given, "whole.jsonl")[0] == 0
    assert_goes_on(drivetrain, given, len(TALKS), monkeypatch)


def test_a_file_of_prompts_alone_is_answered_as_stdin_is_and_goes_on_after_a_kill(
    drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the run file asks for no answers."""
    monkeypatch.chdir(tmp_path)
    run_file()
    trained(drivetrain, "out", "workload.generate=null")
    given = ("predict", "run.yaml", "output=out", "workload.generate=null", "--checkpoint", "last")
    texts = [f"say {number}" for number in range(20)]
    Path("p.txt").write_text("\n\n".join(texts))
    typed = [
        json.loads(line)
        for line in drivetrain(*given, *(part for each in texts for part in ("--text", each)))[1].splitlines()
    ]
    given = (*given, "evaluation.batch_size=1", "--data", "p.txt", "--output")
    code, _, told = drivetrain(*given, "whole.jsonl")
    assert code == 0, told
    rows = [json.loads(line) for line in Path("whole.jsonl").read_text().splitlines()]
    assert [row.pop("sample") for row in rows] == [f"p.txt line {2 * number + 1}" for number in range(20)]
    for row, expected in zip(rows, typed, strict=True):
        assert row.pop("logprob") == pytest.approx(expected.pop("logprob"), abs=1e-3)
        assert row == {name: value for name, value in expected.items() if name != "sample"}
    assert_goes_on(drivetrain, given, len(texts), monkeypatch)


@pytest.mark.parametrize(
    ("given", "field", "why"),
    [
        ({"evaluation": None, "evaluation_fraction": 0}, "workload.generate", "there are no evaluation data"),
        (
            {"evaluation": None, "evaluation_fraction": 0.001},
            "workload.generate",
            "there are no evaluation data: evaluation_fraction=0.001 of so little data holds none out",
        ),
        ({"generate": {"samples": 0}}, "workload.generate.samples", "no prompt is shorter"),
        ({"generate": {"prompts": ["x" * 99]}}, "workload.generate.prompts", "of a length of 64"),
        (
            {"generate": {"prompts": ["no"]}, "template": "no.jinja"},
            "workload.generate.prompts",
            "refuses 'no': not so",
        ),
    ],
)
def test_prompts_that_cannot_be_are_refused(
    given: dict[str, Any], field: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chatml = (FOLDER / "chatml.jinja").read_text()
    Path("no.jinja").write_text(
        chatml + "{% if messages[-1].content == 'no' %}{{ raise_exception('not so') }}{% endif %}"
    )
    with pytest.raises(UserError) as refused:
        workload(tmp_path, **given)
    assert refused.value.problems[0].field == field
    assert why in refused.value.problems[0].why
