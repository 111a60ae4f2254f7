"""Multiple choice by log-probability, against plain PyTorch and lm-evaluation-harness on the same questions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from drivetrain.compare.choice_evaluations import choice_evaluations
from drivetrain.compare.evaluations import table_of
from drivetrain.data.language.choice_sets import Subject, read_subjects
from drivetrain.data.language.vocabularies import byte_tokenizer
from drivetrain.inference.loading import load_model
from drivetrain.inference.multiple_choice import choose
from tests.choice_files import ceval, cmmlu, harness_task, mmlu

Run = Callable[..., tuple[int, str, str]]
LAYOUTS = {"mmlu": mmlu, "ceval": ceval, "cmmlu": cmmlu}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of random weights, wide enough apart that they answer with all letters."""
    folders = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        tokenizer = byte_tokenizer(["<|end|>"])
        config = LlamaConfig(
            vocab_size=len(tokenizer), max_position_embeddings=1200, initializer_range=0.4, eos_token_id=256, **sizes
        )
        folders.append(tmp_path_factory.mktemp("models") / f"model{seed}")
        LlamaForCausalLM(config).save_pretrained(folders[-1])
        tokenizer.save_pretrained(folders[-1])
    return folders


def by_torch(folder: Path, subject: Subject, shots: int) -> list[list[float]]:
    """Returns the log-probability of each letter, one forward pass of Transformers' model a question."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    letters = [tokenizer(f" {letter}")["input_ids"] for letter in "ABCD"]
    found = []
    for question in subject.questions:
        ids = tokenizer(subject.prompt(question, shots))["input_ids"]
        sums = []
        for letter in letters:
            with torch.no_grad():
                logs = model(torch.tensor([ids + letter])).logits[0].log_softmax(-1)
            sums.append(sum(logs[len(ids) - 1 + n, token].item() for n, token in enumerate(letter)))
        found.append(sums)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probabilities_are_those_of_plain_torch(layout: str, models: list[Path], tmp_path: Path) -> None:
    for subject in read_subjects(LAYOUTS[layout](tmp_path, ["law"]), [], shots=2):
        with closing(load_model(models[0])) as model:
            chosen = choose(model, subject, shots=2)
        expected = torch.tensor(by_torch(models[0], subject, 2))
        assert torch.allclose(torch.tensor(chosen.logprobs, dtype=torch.float32), expected, atol=1e-4)
        right = expected.argmax(-1) == torch.tensor([question.right for question in subject.questions])
        assert chosen.right.tolist() == right.tolist()
        assert chosen.cut == 0


def test_prompts_beyond_the_context_lose_their_beginning(models: list[Path], tmp_path: Path) -> None:
    (subject,) = read_subjects(mmlu(tmp_path, ["law"], count=2), [], shots=5)
    long = Subject("law", "x" * 2000, None, subject.layout, subject.questions, subject.shots)
    with closing(load_model(models[0])) as model:
        assert choose(model, long, shots=1).cut == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_accuracies_and_errors_are_those_of_lm_evaluation_harness(
    layout: str, models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (pip install lm_eval)")
    task_manager = pytest.importorskip("lm_eval.tasks").TaskManager
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    folder = LAYOUTS[layout](tmp_path / "files", ["law", "physics"])
    tasks = [harness_task(tmp_path / "tasks", layout, each) for each in read_subjects(folder, [], shots=2)]
    (tmp_path / "tasks" / "group.yaml").write_text(
        json.dumps(
            {
                "group": "together",
                "task": tasks,
                "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
                "metadata": {"version": 1},
            }
        )
    )
    manager = task_manager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    arguments = {"pretrained": str(models[0]), "dtype": "float32"}
    told = lm_eval.simple_evaluate(
        "hf", model_args=arguments, tasks=["together"], num_fewshot=2, task_manager=manager, device="cpu", batch_size=4
    )["results"]
    rows = table_of(choice_evaluations([("one", models[0], "best")], folder, 2, [], False, lambda _: None))
    ours = {row["data"]: row for row in rows}
    for task, name in zip((*tasks, "together"), ("law", "physics", "all"), strict=True):
        assert ours[name]["metrics"]["accuracy"] == pytest.approx(told[task]["acc,none"], abs=1e-9)
        assert ours[name]["standard_errors"]["accuracy"] == pytest.approx(told[task]["acc_stderr,none"], rel=1e-6)


def test_models_make_a_row_a_subject_with_paired_differences(
    drivetrain: Run, models: list[Path], tmp_path: Path
) -> None:
    folder = str(ceval(tmp_path, ["law", "physics"]))
    code, told, err = drivetrain("evaluate", *map(str, models), "--multiple-choice", folder, "--shots", "1", "--json")
    assert code == 0, err
    rows = json.loads(told)["rows"]
    assert [row["data"] for row in rows[::2]] == ["law", "physics", "Other", "STEM", "all"]
    for one, other in zip(rows[::2], rows[1::2], strict=True):
        gain = other["metrics"]["accuracy"] - one["metrics"]["accuracy"]
        assert other["differences"]["accuracy"]["value"] == pytest.approx(gain)
        assert other["differences"]["accuracy"]["paired"]
    law, physics, together = (rows[place]["metrics"]["accuracy"] for place in (0, 2, 8))
    assert together == pytest.approx((law + physics) / 2)
    within = [10 * share * (1 - share) for share in (law, physics)]
    assert rows[8]["standard_errors"]["accuracy"] == pytest.approx(math.sqrt(sum(within) / 18 / 20))
    code, table, err = drivetrain("evaluate", str(models[0]), "--multiple-choice", folder, "--subject", "law")
    assert code == 0, err
    assert table.splitlines()[1].startswith("law")


def test_what_has_no_effect_on_questions_is_refused(drivetrain: Run, models: list[Path], tmp_path: Path) -> None:
    folder = str(mmlu(tmp_path, ["law"], count=2))
    for more, words in (
        (["batch_size=4", "--multiple-choice", folder], "batch_size=4 has no effect"),
        (["--data", "a.csv", "--multiple-choice", folder], "--data a.csv has no effect"),
        (["--shots", "2"], "they are of questions of multiple choice"),
        (["--multiple-choice", str(tmp_path)[:-1]], "no test/ or val/"),
    ):
        code, _, err = drivetrain("evaluate", str(models[0]), *more)
        assert code == 2, more
        assert words in " ".join(err.split())
