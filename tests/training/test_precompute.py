"""Log-probabilities of a reference that are computed once: the curve of a frozen copy, kept for later runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drivetrain.data.cache_entries import entries
from drivetrain.training import precompute

Run = Callable[..., tuple[int, str, str]]
SIZES = "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4}"
PAIRS = [
    {"prompt": f"ask {n}", "chosen": "yes " * (n % 3 + 1), "rejected": "no, never " * (n % 4 + 1)} for n in range(24)
]
LABELLED = [{"prompt": f"ask {n}", "completion": "yes " * (n % 5 + 1), "label": n % 2 == 0} for n in range(24)]
STAGES = {"dpo": PAIRS, "kto": LABELLED}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("{}")
    for stage, rows in STAGES.items():
        Path(f"{stage}.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the number of samples whenever references are computed."""
    found: list[int] = []
    whole = precompute._compute

    def counted(each: Any, *others: Any) -> None:
        found.append(len(each.samples))
        whole(each, *others)

    monkeypatch.setattr(precompute, "_compute", counted)
    return found


def trained(drivetrain: Run, name: str, reference: str, *more: str, stage: str = "dpo") -> None:
    data = f"{{train: {stage}.jsonl, template: plain, length: 48, evaluation_fraction: 0.2, cache: cache}}"
    blocks = [f"workload={{type: language_model, stage: {stage}, model: {{config: {SIZES}}}, data: {data}}}"]
    blocks += [f"workload.preference.reference={reference}", f"output={name}", "batch_size=8", "micro_batch_size=3"]
    blocks += [
        "loop.steps=6",
        "tracking.log_every=1",
        "optimizer={name: adamw, lr: 1.0e-3}",
        "checkpoints.every_steps=3",
    ]
    code, _, words = drivetrain("train", "run.yaml", *blocks, "--quiet", *more)
    assert code == 0, words


def points(name: str) -> np.ndarray:
    events = map(json.loads, Path(name, "events.jsonl").read_text().splitlines())
    return np.array([(e["loss"], e["grad_norm"]) for e in events if e["event"] == "step"])


def metrics(name: str) -> dict[str, float]:
    found: dict[str, float] = json.loads(Path(name, "report.json").read_text())["metrics"]
    return found


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("packing", ["true", "false"])
def test_cached_log_probabilities_give_the_curve_of_a_frozen_copy(drivetrain: Run, stage: str, packing: str) -> None:
    for reference in ("copy", "cached"):
        trained(drivetrain, reference, reference, f"workload.data.packing={packing}", stage=stage)
    assert len(points("copy")) == 6
    np.testing.assert_allclose(points("cached"), points("copy"), rtol=1e-6, atol=1e-6)
    assert metrics("cached") == pytest.approx(metrics("copy"), rel=1e-5, abs=1e-6)
    assert abs(metrics("cached")["reward_margin"]) > 0


def test_later_runs_read_them_and_other_weights_data_or_precision_do_not(drivetrain: Run, computed: list[int]) -> None:
    trained(drivetrain, "one", "cached")
    assert computed == [19, 5]  # the training data, and those held out
    listed = [each.kind for each in entries(Path("cache"))]
    assert listed.count("log-probabilities under a reference") == 2, "`drivetrain cache` shows and prunes them"
    trained(drivetrain, "two", "cached", "optimizer.lr=0.1", "workload.preference.beta=0.3")
    assert computed == [19, 5]
    for number, other in enumerate(("seed=1", "precision=bf16-mixed", "workload.data.length=20"), 2):
        trained(drivetrain, f"run{number}", "cached", other)
        assert len(computed) == 2 * number, other


def test_a_resume_reads_them_and_makes_damaged_ones_again(drivetrain: Run, computed: list[int]) -> None:
    trained(drivetrain, "whole", "cached")
    trained(drivetrain, "parts", "cached", "loop.steps=3")
    assert computed == [19, 5]
    for file in Path("cache").glob("reference-*.npy"):
        file.write_bytes(file.read_bytes()[:100])
    trained(drivetrain, "parts", "cached", "--resume")
    assert computed == [19, 5, 19, 5]
    np.testing.assert_array_equal(points("parts"), points("whole"))


def test_an_evaluation_of_a_checkpoint_compares_with_the_model_as_it_started(drivetrain: Run) -> None:
    trained(drivetrain, "one", "cached")
    code, words, _ = drivetrain("evaluate", "one", "--json")
    assert code == 0
    assert json.loads(words)["metrics"] == pytest.approx(metrics("one"), rel=1e-5)


def other_model(drivetrain: Run) -> str:
    """Returns a model of another run, with the same tokenizer."""
    trained(drivetrain, "other", "copy", "seed=7", "workload.model.config.hidden_size=48", "optimizer.lr=0.01")
    return str(max(Path("other", "checkpoints").glob("step-*")).resolve())


@pytest.mark.parametrize("stage", STAGES)
def test_log_probabilities_under_another_model_give_the_curve_of_that_model_beside(
    drivetrain: Run, computed: list[int], stage: str
) -> None:
    other = f"workload.preference.reference_model={other_model(drivetrain)}"
    for reference in ("copy", "cached"):
        trained(drivetrain, reference, reference, other, stage=stage)
    trained(drivetrain, "own", "copy", stage=stage)
    np.testing.assert_allclose(points("cached"), points("copy"), rtol=1e-6, atol=1e-6)
    assert metrics("cached") == pytest.approx(metrics("copy"), rel=1e-5, abs=1e-6)
    assert abs(points("own") - points("copy")).max() > 1e-3, "it is another reference"
    assert computed == [19, 5]
    trained(drivetrain, "again", "cached", other, "optimizer.lr=0.1", stage=stage)
    assert computed == [19, 5], "later runs read them"


def test_a_disk_without_room_costs_the_file_and_not_the_run(drivetrain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(drivetrain, "whole", "cached")
    for file in Path("cache").glob("reference-*"):
        file.unlink()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(precompute, "_reserve", full)
    trained(drivetrain, "full", "cached")
    np.testing.assert_array_equal(points("full"), points("whole"))
    assert not [*Path("cache").glob("*reference-*")], "nothing of it is left"


def test_a_pass_that_fails_leaves_no_file(drivetrain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("a cable was pulled")

    monkeypatch.setattr(precompute, "_compute", failing)
    with pytest.raises(RuntimeError, match="a cable was pulled"):
        trained(drivetrain, "failed", "cached")
    assert not [*Path("cache").glob("*reference-*")]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero3"])
def test_ranks_compute_a_part_each_under_another_model(drivetrain: Run, engine: str) -> None:
    other = f"workload.preference.reference_model={other_model(drivetrain)}"
    trained(drivetrain, "alone", "copy", other)
    trained(drivetrain, "together", "cached", other, f"engine={engine}", "processes=2", "micro_batch_size=2")
    np.testing.assert_allclose(points("together"), points("alone"), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero3"])
def test_ranks_compute_a_part_each(drivetrain: Run, engine: str) -> None:
    trained(drivetrain, "alone", "copy")
    trained(drivetrain, "together", "cached", f"engine={engine}", "processes=2", "micro_batch_size=2")
    np.testing.assert_allclose(points("together"), points("alone"), rtol=1e-5, atol=1e-6)
