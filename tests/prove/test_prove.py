"""`drivetrain prove`: PASS where the promises hold, FAIL with the place where they do not."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.cli import prove_run
from drivetrain.config.load import load, validate
from drivetrain.config.run import RunConfig
from drivetrain.launch.job import Result
from drivetrain.prove.deterministic_workload import Stilled
from drivetrain.prove.trace import Trace, trace
from drivetrain.prove.verdicts import Verdict, remarks, verdicts
from drivetrain.workloads.base import Workload
from tests.parity import promises
from tests.prove.traced import mutated_traces, traced_on_ranks
from tests.ranks import RankPool
from tests.runtime.test_scratch import dead
from tests.tiny_language import LLAMA, ROWS, write_lines
from tests.tiny_workload import CPU

WORKLOAD = """
import torch
from torch import nn

torch.manual_seed(0)
inputs = torch.randn(120, 6)
targets = (inputs @ torch.randn(6, 4)).argmax(1)
train_data = list(zip(inputs[:45], targets[:45]))
evaluation_data = list(zip(inputs[45:], targets[45:]))
loss = nn.CrossEntropyLoss()

def build_model():
    return nn.Sequential(nn.Linear(6, 16), MIDDLE, nn.Tanh(), nn.Linear(16, 4))
"""
RUN = """
workload: {type: module, path: PATH}
batch_size: 9
loop: {steps: 20, max_grad_norm: 0.5}
optimizer: {name: sgd, lr: 0.3, momentum: 0.9}
evaluation: {batch_size: 2}
"""
STEPS = 6


def config(folder: Path, middle: str = "nn.LayerNorm(16)", *overrides: str) -> RunConfig:
    path = folder / "workload.py"
    path.write_text(WORKLOAD.replace("MIDDLE", middle))
    (folder / "run.yaml").write_text(RUN.replace("PATH", str(path)))
    run, problems = load(folder / "run.yaml", overrides)
    assert run is not None
    assert not problems
    return run


def sides(run: RunConfig) -> tuple[Trace, Trace]:
    """In one process, whole and cut."""
    single = run.model_copy(update={"processes": None})
    cut = single.model_copy(update={"micro_batch_size": 5})
    return trace(single, CPU, STEPS, resume=False), trace(cut, CPU, STEPS, resume=False)


def by_promise(found: list[Verdict]) -> dict[str, bool | None]:
    return {verdict.promise: verdict.holds for verdict in found}


ALL = {"same curve": True, "engaged": True, "each sample once": True, "same evaluation": True, "exact resume": True}


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_an_engine_that_keeps_its_promises_passes(
    engine: str, ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    run = config(tmp_path, "nn.LayerNorm(16)")
    spread = config(tmp_path, "nn.LayerNorm(16)", f"engine={engine}", "processes=2")
    asked = ranks(2).run(traced_on_ranks, spread, STEPS)[0]
    found = verdicts(spread, asked, *sides(run))
    assert by_promise(found) == ALL, found
    assert not remarks(asked, STEPS)


def test_a_stilled_workload_answers_all_that_a_workload_is_asked() -> None:
    assert {name for name in vars(Workload) if not name.startswith("_")} <= vars(Stilled).keys()


def test_dropout_and_batch_norm_are_recognised_stilled_and_explained(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    middle = "nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.5))"
    spread = config(tmp_path, middle, "engine=ddp", "processes=2")
    asked = ranks(2).run(traced_on_ranks, spread, STEPS)[0]
    reference, rounding = sides(config(tmp_path, middle))
    assert by_promise(verdicts(spread, asked, reference, rounding)) == ALL
    dropout, batch_norm = remarks(reference, STEPS)
    assert "dropout (1 modules)" in dropout
    assert "BatchNorm (1 modules)" in batch_norm


def test_a_loss_that_depends_on_how_the_batch_is_cut_fails_on_every_engine(tmp_path: Path) -> None:
    run = config(tmp_path, "nn.LayerNorm(16)")
    reference, rounding = sides(run)
    mean_for_sum = rounding.model_copy(update={"losses": [loss / 2 for loss in rounding.losses]})
    (found, *_) = verdicts(run, mean_for_sum, reference, mean_for_sum)
    assert found.promise == "same curve"
    assert found.holds is False
    assert "it is no sum over samples" in found.why


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_what_is_broken_fails_and_is_named(engine: str, ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    settings = ("precision=fp16-mixed", "scaler.init_scale=128")
    run = config(tmp_path, "nn.LayerNorm(16)", *settings)
    spread = config(tmp_path, "nn.LayerNorm(16)", *settings, f"engine={engine}", "processes=2")
    reference, rounding = sides(run)
    found = {
        name: {v.promise for v in verdicts(spread, traced, reference, rounding) if v.holds is False}
        for name, traced in ranks(2).run(mutated_traces, spread, STEPS)[0].items()
    }
    assert found.pop("nothing wrong") == set()
    assert found.keys() == promises.MUTATIONS.keys() - {"nothing wrong"}
    for name, failed in found.items():
        assert "same curve" in failed, name
    assert "each sample once" in found["sample reused"]


def test_the_first_parameter_that_diverges_is_named(tmp_path: Path) -> None:
    run = config(tmp_path)
    reference, rounding = sides(run)
    broken = reference.model_copy(deep=True)
    for step in (2, 3):
        norm, projection = broken.gradients[step]["3.weight"]
        broken.gradients[step]["3.weight"] = (norm * 1.5, projection)
    (curve,) = [v for v in verdicts(run, broken, reference, rounding) if v.promise == "same curve"]
    assert curve.holds is False
    assert "3.weight, at step 3" in curve.why


def test_a_resume_that_differs_and_a_silent_single_process_fail(tmp_path: Path) -> None:
    run = config(tmp_path)
    reference, rounding = sides(run)
    asked = reference.model_copy(update={"resumed": False})
    spread = config(tmp_path, "nn.LayerNorm(16)", "engine=ddp", "processes=2")
    held = by_promise(verdicts(spread, asked, reference, rounding))
    assert held["exact resume"] is False
    assert held["engaged"] is False
    assert held["same curve"] is True


STREAM = """
class Lines(torch.utils.data.IterableDataset):
    def __init__(self):
        self.at = 0
    def __iter__(self):
        while self.at < 45:
            self.at += 1
            yield inputs[self.at - 1], targets[self.at - 1]
        self.at = 0
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"]

train_data = Lines()
"""


def test_a_run_of_an_iterable_dataset_is_proved(tmp_path: Path) -> None:
    run = config(tmp_path)
    with (tmp_path / "workload.py").open("a") as opened:
        opened.write(STREAM)
    steps = 12  # so that the state of the middle is no longer among those at hand
    rounding = trace(run.model_copy(update={"micro_batch_size": 5}), CPU, steps, resume=False)
    reference, asked = trace(run, CPU, steps, resume=False), trace(run, CPU, steps, resume=True)
    assert by_promise(verdicts(run, asked, reference, rounding)) == ALL


def test_a_step_that_training_would_refuse_is_refused_in_a_proof(tmp_path: Path) -> None:
    run = config(tmp_path)
    with (tmp_path / "workload.py").open("a") as opened:
        opened.write('\ninputs[7] = float("nan")\n')  # it is in one of the five steps of an epoch
    reference, rounding = sides(run)
    bad = [step for step, loss in enumerate(reference.losses) if not math.isfinite(loss)]
    assert len(bad) in (1, 2)
    assert bad[0] < STEPS - 1, "else no step comes after it"
    curve = verdicts(run, reference, reference, rounding)[0]
    assert curve.holds is False
    assert curve.why == f"step {bad[0] + 1}: the loss is nan in one process too, where training ends"


def test_a_run_with_fewer_steps_than_asked_for_is_compared_to_its_end(tmp_path: Path) -> None:
    run = config(tmp_path, "nn.LayerNorm(16)", "loop.steps=3").model_copy(update={"processes": None})
    found = trace(run, CPU, STEPS, resume=True)
    assert len(found.losses) == len(found.batches) == 3
    assert found.resumed is True
    assert remarks(found, STEPS) == ["the run has 3 steps, and so many were compared"]


@pytest.mark.parametrize(
    ("stage", "learning"), [("grpo", {}), ("grpo", {"beta": 0.1, "loss": "dapo"}), ("rloo", {}), ("ppo", {})]
)
def test_a_model_that_learns_from_rewards_is_compared_by_invented_answers(
    stage: str, learning: dict[str, object], tmp_path: Path
) -> None:
    data = {"train": write_lines(tmp_path / "rows.jsonl", ROWS), "template": "plain", "length": 24}
    data |= {"evaluation_fraction": 0.2, "cache": str(tmp_path / "cache")}
    rewards = {"rewards": "exact_match", "max_new_tokens": 8, "answers": 3, **learning}
    block = {"type": "language_model", "stage": stage, "model": {"config": LLAMA}, "data": data}
    given = {"workload": {**block, "reinforcement": rewards}, "batch_size": 6, "loop": {"steps": 3}}
    run, problems = validate({**given, "optimizer": {"name": "sgd", "lr": 0.1}}, [])
    assert run is not None
    assert not problems
    reference, rounding = sides(run)
    assert len(set(reference.losses)) == len(reference.losses) == 3
    assert all(norm > 0 for step in reference.gradients for norm, _ in step.values()), "else nothing would be compared"
    asked = trace(run, CPU, STEPS, resume=True)
    found = verdicts(run, asked, reference, rounding)
    assert by_promise(found) == {**ALL, "same evaluation": None}
    assert "evaluations judge answers of the model's own" in found[3].why
    assert remarks(reference, 3) == [
        "the model wrote no answers, since rounding alone can change one: steps learned from stand-ins for them"
    ]
    wrong = asked.model_copy(update={"norms": [norm * 1.01 for norm in asked.norms]})
    assert by_promise(verdicts(run, wrong, reference, rounding))["same curve"] is False


@pytest.mark.parametrize(
    ("length", "words"), [("loop.steps=3", "3 steps"), ("loop.steps=40", "10 steps"), ("", "at most 10 steps")]
)
def test_the_steps_of_a_shorter_run_are_announced(
    length: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config(tmp_path, "nn.LayerNorm(16)", *([length] if length else ["loop.steps=null", "loop.epochs=1"]))
    found = trace(run, CPU, 2, resume=False)
    monkeypatch.setattr(prove_run, "start", lambda _: Result(code=0, value=found.model_dump()))
    lines: list[str] = []
    prove_run.prove(run, 10, lines.append)
    assert lines[0] == f"{words} in one process"


def test_a_proof_resumes_from_a_checkpoint_that_was_written_in_the_background(tmp_path: Path) -> None:
    run = config(tmp_path, "nn.LayerNorm(16)", "checkpoints.asynchronous=true").model_copy(update={"processes": None})
    assert trace(run, CPU, STEPS, resume=True).resumed is True


@pytest.mark.long
def test_the_command_prints_a_verdict_a_promise(
    tmp_path: Path, drivetrain: Callable[..., tuple[int, str, str]]
) -> None:
    config(tmp_path)
    code, out, words = drivetrain("prove", str(tmp_path / "run.yaml"), "engine=fsdp", "processes=2", "--steps", "4")
    assert code == 0, out + words
    assert out.count("PASS") == 5
    assert "FAIL" not in out
    assert "FSDPSequential, 2 ranks of 2 asked for" in " ".join(out.split())
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"run.yaml", "workload.py"}, "nothing is kept"


def test_a_proof_takes_away_what_a_killed_one_left_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    left = dead(place)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    run = config(tmp_path).model_copy(update={"processes": None})
    assert trace(run, CPU, 2, resume=True).resumed is True
    assert not left.exists()
    assert list(place.iterdir()) == []
