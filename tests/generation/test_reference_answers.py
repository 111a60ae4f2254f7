"""Prompts that the policy answers beside the reference it is held to: those answers are the reference's own."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from transformers import AutoModelForCausalLM

from drivetrain.config.engines import EngineConfig
from drivetrain.config.language import LanguageModel
from drivetrain.distributed.communicator import Communicator
from drivetrain.generation.answering import sampler_beside
from drivetrain.workloads.generating import Prompt
from drivetrain.workloads.language_model import LanguageModelWorkload
from drivetrain.workloads.preference import PreferenceWorkload
from tests.ranks import RankPool
from tests.tiny_language import LLAMA, config, write_lines
from tests.tiny_workload import tiny_engine

Run = Callable[..., tuple[int, str, str]]
PAIRS = [{"prompt": f"ask {n}", "chosen": "yes " * (n % 3 + 1), "rejected": "no, never"} for n in range(12)]
TALKS = [{"instruction": row["prompt"], "output": row["chosen"]} for row in PAIRS]
NEW = 10
ROOT = Path(__file__).resolve().parents[2]
LORA = "adapter={method: lora, rank: 4, alpha: 64}"


def model_in(folder: Path, seed: int) -> Path:
    """Writes a model with its tokenizer, as Transformers loads it. Its vocabulary is even, for tensor parallelism."""
    made = config(folder, PAIRS, stage="dpo", template="chatml", model={"config": {**LLAMA, "vocab_size": 260}})
    work = LanguageModelWorkload(made, 0)
    torch.manual_seed(seed)
    model: Any = work.build_model()
    model.save_pretrained(folder / f"model-{seed}")
    work.tokenizer.save_pretrained(folder / f"model-{seed}")
    return folder / f"model-{seed}"


def by_transformers(folder: Path, prompts: Sequence[Prompt], work: Any) -> list[str]:
    """Returns the model's likeliest answers, each prompt by itself."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt.ids])
        named = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        made = model.generate(ids, eos_token_id=sorted(work.ends), **named)
        found.append(work.decoded(made[0, ids.shape[1] :].tolist()))
    return found


def trained(drivetrain: Run, start: Path, *more: str, stage: str = "dpo") -> list[dict[str, Any]]:
    rows = {"grpo": TALKS}.get(stage, PAIRS)
    path = write_lines(start.parent / f"{stage}.jsonl", rows)
    data = (
        f"{{train: {path}, template: chatml, length: 60, evaluation_fraction: 0.25, cache: {start.parent / 'cache'}}}"
    )
    block = f"type: language_model, stage: {stage}, model: {{path: {start}}}, data: {data}"
    asked = f"generate: {{samples: 3, max_new_tokens: {NEW}, temperature: 0}}"
    output = start.parent / "run"
    given = [f"workload={{{block}, {asked}}}", f"output={output}", "batch_size=6", "loop.steps=6"]
    given += ["evaluation.every_steps=3", "optimizer={name: adamw, lr: 0.02}", "--quiet", "--overwrite", *more]
    code, _, words = drivetrain("train", str(empty(start.parent)), *given)
    assert code == 0, words
    lines = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    return [line for line in lines if "event" not in line]


def empty(folder: Path) -> Path:
    (folder / "run.yaml").write_text("{}")
    return folder / "run.yaml"


def expected(start: Path, answering: Path) -> list[str]:
    made = config(start.parent, stage="dpo", train=str(start.parent / "dpo.jsonl"), template="chatml", length=60)
    made = made.model_copy(update={"data": made.data.model_copy(update={"evaluation_fraction": 0.25})})
    asking = LanguageModel.model_validate(
        {**made.model_dump(), "generate": {"samples": 3}, "model": {"path": str(start)}}
    )
    work = PreferenceWorkload(asking, 0)
    return by_transformers(answering, work.prompts, work)


@pytest.mark.parametrize(
    "more", [(), (LORA,), ("workload.preference.reference_every=100",)], ids=["copy", "lora", "moved"]
)
def test_the_reference_answers_as_the_model_did_at_the_start(
    drivetrain: Run, tmp_path: Path, more: tuple[str, ...]
) -> None:
    start = model_in(tmp_path, 3)
    lines = trained(drivetrain, start, *more)
    known = expected(start, start)
    assert [line["step"] for line in lines] == [3, 3, 3, 6, 6, 6]
    assert [line["reference_model"] for line in lines] == 2 * known
    assert [line["answer"] for line in lines[3:]] != known, "the model itself has learned"


def test_a_win_rate_over_the_reference_is_a_metric_of_evaluations_and_may_decide(
    drivetrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "how-to" / "evaluate.md").read_text(encoding="utf-8")
    (tmp_path / "my_scores.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    asked = ("evaluation={generation: ['my_scores:brevity'], metric: win_rate_brevity}",)
    lines = trained(drivetrain, model_in(tmp_path, 3), *asked)
    rows = [line for line in lines if line["step"] == 6]
    gains = [len(row["reference_model"]) - len(row["answer"]) for row in rows]
    wins = [(gain > 0) + 0.5 * (gain == 0) for gain in gains]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["metrics"]["win_rate_brevity"] == pytest.approx(sum(wins) / 3)
    assert report["metrics"]["win_rate_brevity_error"] == pytest.approx(statistics.pstdev([*wins, 1, 0]) / 5**0.5)
    assert report["best"]["metric"] == "win_rate_brevity"
    assert report["directions"]["win_rate_brevity"] is True
    code, out, err = drivetrain("evaluate", str(tmp_path / "run"), "--checkpoint", "last")
    assert code == 0, err
    assert json.loads(out)["metrics"]["win_rate_brevity"] == pytest.approx(sum(wins) / 3)
    low, high = json.loads(out)["intervals"]["win_rate_brevity"]
    assert low <= sum(wins) / 3 <= high


def test_another_model_as_reference_answers_by_its_own_weights(drivetrain: Run, tmp_path: Path) -> None:
    start, other = model_in(tmp_path, 3), model_in(tmp_path, 5)
    lines = trained(drivetrain, start, f"workload.preference.reference_model={other}")
    assert [line["reference_model"] for line in lines[:3]] == expected(start, other) != expected(start, start)


def test_a_reference_that_follows_the_model_answers_anew(drivetrain: Run, tmp_path: Path) -> None:
    follows = ("workload.preference.reference_every=1", "workload.preference.reference_mixing=1.0")
    lines = trained(drivetrain, model_in(tmp_path, 3), *follows)
    assert all(line["reference_model"] == line["answer"] for line in lines)


def test_a_model_that_learns_from_rewards_is_shown_beside_its_reference(drivetrain: Run, tmp_path: Path) -> None:
    start = model_in(tmp_path, 3)
    learning = "workload.reinforcement={rewards: [exact_match], answers: 2, max_new_tokens: 6, beta: %s}"
    lines = trained(drivetrain, start, learning % 0.1, stage="grpo")
    prompts = {line["prompt"] for line in lines}
    assert len(prompts) == 3
    assert len({(line["prompt"], line["reference_model"]) for line in lines}) == 3, "the same at each evaluation"
    without = trained(drivetrain, start, learning % 0.0, stage="grpo")
    assert not any("reference_model" in line for line in without)


@pytest.mark.parametrize(("stage", "reference"), [("dpo", "cached"), ("dpo", "none"), ("simpo", "auto")])
def test_a_reference_that_cannot_answer_is_not_asked(
    drivetrain: Run, tmp_path: Path, stage: str, reference: str
) -> None:
    lines = trained(drivetrain, model_in(tmp_path, 3), f"workload.preference.reference={reference}", stage=stage)
    assert len(lines) == 6
    assert not any("reference_model" in line for line in lines)


# --- over ranks -------------------------------------------------------------------------------------------------------

ENGINES: Mapping[str, dict[str, Any]] = {
    "ddp": {"name": "ddp"},
    "fsdp": {"name": "fsdp"},
    "zero3": {"name": "deepspeed", "stage": 3},
    "tp": {"name": "mesh", "tp": 2},
}


def asking(folder: Path) -> PreferenceWorkload:
    path = write_lines(folder / f"rows-{os.getpid()}.jsonl", PAIRS)
    block = {
        "stage": "dpo",
        "model": {"path": str(folder / "model-3")},
        "data": {"train": path, "length": 60, "cache": folder / "cache", "evaluation": path, "template": "chatml"},
        "preference": {"reference": "copy", "reference_model": str(folder / "model-5")},
        "generate": {"samples": 5, "max_new_tokens": NEW, "temperature": 0},
    }
    return PreferenceWorkload(LanguageModel.model_validate(block), 0)


def answered(folder: str, engines: Sequence[Mapping[str, Any]]) -> list[list[tuple[str, str]]]:
    found = []
    for given in engines:
        own, world = asking(Path(folder)), torch.distributed.get_world_size()
        engine_config: Any = TypeAdapter(EngineConfig).validate_python(given)
        engine = tiny_engine(own, config=engine_config, devices=world)
        samples = sampler_beside(engine, own, Communicator(), 2)
        assert samples is not None
        found.append([(row["answer"], row["reference_model"]) for row in samples()])
        engine.close()
    return found


@pytest.mark.slow
def test_the_reference_answers_under_every_engine_as_on_one_device(ranks: Callable[[int], RankPool]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        models = [model_in(Path(folder), seed) for seed in (3, 5)]
        of_ranks = ranks(2).run(answered, folder, list(ENGINES.values()))
        work = asking(Path(folder))
        own, other = (by_transformers(model, work.prompts, work) for model in models)
    assert own != other
    for number, name in enumerate(ENGINES):
        for rank in of_ranks:
            assert rank[number] == list(zip(own, other, strict=True)), name
