"""Distillation on replies that the model writes itself: which they are, what is learned from them, and on any ranks."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn
from transformers import AutoModelForCausalLM

from drivetrain.config.engines import EngineConfig
from drivetrain.config.load import validate
from drivetrain.data.loader import MicroBatch
from drivetrain.data.micro_batches import Slice
from drivetrain.data.order import GlobalOrder
from drivetrain.distributed.communicator import Communicator
from drivetrain.generation.passes import Passes
from drivetrain.runtime.journal import Journal
from drivetrain.training.windows import windows_of
from drivetrain.workloads.own_answers import OwnAnswersWorkload
from tests.parity.policy_cases import run_config
from tests.ranks import RankPool
from tests.tiny_language import LLAMA, ROWS, config, loaded, write_lines
from tests.tiny_workload import tiny_engine
from tests.workloads.test_distillation import by_hand, teacher_in

Run = Callable[..., tuple[int, str, str]]
NEW = 8


class Seeded(OwnAnswersWorkload):
    def build_model(self) -> nn.Module:
        torch.manual_seed(3)
        return super().build_model()


def workload(folder: Path, share: float, **given: Any) -> Seeded:
    teacher = folder / "teacher" if (folder / "teacher").exists() else teacher_in(folder)
    data = {"evaluation_fraction": 0.25, **given.pop("data", {})}
    made = config(folder, ROWS, "distill", template="chatml", **data)
    block = {"teacher": str(teacher), "own_answers": share, "max_new_tokens": NEW, "loss": "forward_kl", **given}
    return Seeded(type(made).model_validate({**made.model_dump(), "distillation": block}), 0)


def made_of(work: Seeded, count: int = 15, journal: Journal | None = None) -> list[dict[str, Any]]:
    passes = Passes(tiny_engine(work), work, Communicator(), 4, journal)
    prompts = [work.train.load(index, 0) for index in range(count)]
    return [sample for [sample] in work.make_samples(prompts, range(20, 20 + count), passes)]


def test_a_share_of_samples_gets_a_reply_of_the_models_own_and_the_others_stay(tmp_path: Path) -> None:
    work = workload(tmp_path, 0.5)
    data, made = loaded(work.train), made_of(work)
    own = [each["own"] for each in made]
    assert own == [each["own"] for each in made_of(work)], "a function of the draws"
    assert 3 <= sum(own) <= 12
    for sample, (ids, targets) in zip(made, data, strict=True):
        new, trained = sample["ids"].tolist(), sample["targets"].tolist()
        prompt = targets.index(True)
        assert new[:prompt] == ids[:prompt]
        if not sample["own"]:
            assert (new, trained) == (ids, targets)
            continue
        assert trained == [False] * prompt + [True] * (len(new) - prompt)
        assert 1 <= len(new) - prompt <= NEW
        assert (new[-1] in work.ends) or len(new) - prompt == NEW
    assert [each["own"] for each in made_of(workload(tmp_path, 1.0))] == [1] * 15


def test_replies_are_drawn_from_the_model_and_none_goes_beyond_the_length(tmp_path: Path) -> None:
    work = workload(tmp_path, 1.0, drawing_temperature=1e-6, data={"length": 34})
    model: Any = work.build_model().eval()
    for sample in made_of(work, 5):
        ids = sample["ids"].tolist()
        prompt = sample["targets"].tolist().index(True)
        assert len(ids) == min(prompt + NEW, 34) or ids[-1] in work.ends
        for place in range(prompt, len(ids)):
            with torch.no_grad():
                assert int(model(input_ids=torch.tensor([ids[:place]])).logits[0, -1].argmax()) == ids[place]


@pytest.mark.parametrize("packing", [True, False])
def test_the_loss_of_own_replies_is_the_papers_formula_at_their_tokens(tmp_path: Path, packing: bool) -> None:
    work = workload(tmp_path, 0.5, data={"packing": packing})
    engine = tiny_engine(work)
    passes = Passes(engine, work, Communicator(), 4)
    samples = [each for [each] in work.make_samples([work.train.load(n, 0) for n in range(9)], range(9), passes)]
    assert 0 < sum(each["own"] for each in samples) < 9
    loss = engine.summed(engine.forward_backward([MicroBatch(work.collate(samples))])).item()
    model: Any = work.build_model().eval()
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher").eval()
    terms = []
    for sample in samples:
        ids, places = sample["ids"].long(), sample["targets"][1:]
        own, other = (each(input_ids=ids[None, :-1]).logits[0][places] for each in (model, teacher))
        terms += [by_hand("forward_kl", one, two, 0.5, 1.0) for one, two in zip(own, other, strict=True)]
    assert loss == pytest.approx(torch.stack(terms).mean().item(), rel=1e-5)


def test_what_a_journal_has_is_not_written_again(tmp_path: Path) -> None:
    work = workload(tmp_path, 1.0)
    first = made_of(work, 4, Journal(tmp_path / "j", 0, "a"))
    other = workload(tmp_path, 1.0)
    engine = tiny_engine(other)
    engine.load_weights({name: weight * 2 for name, weight in engine.weights().items()})  # would write otherwise
    passes = Passes(engine, other, Communicator(), 4, Journal(tmp_path / "j", 0, "a"))
    again = [each for [each] in other.make_samples([other.train.load(n, 0) for n in range(4)], range(20, 24), passes)]
    assert [each["ids"].tolist() for each in first] == [each["ids"].tolist() for each in again]


def test_a_run_goes_on_to_the_bit_and_shows_its_replies(drivetrain: Run, tmp_path: Path) -> None:
    teacher = teacher_in(tmp_path)
    data = {"train": write_lines(tmp_path / "rows.jsonl", ROWS * 2), "template": "chatml", "length": 64}
    learning = {"teacher": str(teacher), "own_answers": 0.6, "max_new_tokens": NEW}
    block = {"type": "language_model", "stage": "distill", "model": {"config": LLAMA}}
    run = {
        "workload": {**block, "data": {**data, "cache": str(tmp_path / "cache")}, "distillation": learning},
        "batch_size": 6,
        "loop": {"steps": 6},
        "optimizer": {"name": "adamw", "lr": 0.01},
        "checkpoints": {"every_steps": 2, "keep_last": 9},
        "tracking": {"log_every": 1},
        "output": str(tmp_path / "run"),
    }
    (tmp_path / "run.json").write_text(json.dumps(run))
    code, _, words = drivetrain("train", str(tmp_path / "run.json"), "--quiet")
    assert code == 0, words
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    rollouts = [each for each in events if each["event"] == "rollout"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [each["step"] for each in rollouts] == list(range(6))
    assert len(lines) == sum(round(6 * each["metrics"]["own_answers"]) for each in rollouts) > 6
    assert all(line["answer_tokens"] <= NEW and line["reference"] for line in lines)
    whole = (tmp_path / "run" / "checkpoints" / "step-00000006" / "model.safetensors").read_bytes()
    for step in (4, 6):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    code, _, words = drivetrain("train", str(tmp_path / "run.json"), "--quiet", "--resume")
    assert code == 0, words
    assert (tmp_path / "run" / "checkpoints" / "step-00000006" / "model.safetensors").read_bytes() == whole


def test_settings_of_own_replies_are_refused_where_there_are_none() -> None:
    def problems(**given: Any) -> str:
        block = {"type": "language_model", "stage": "distill", "model": {"path": "a/b"}, "data": {"train": "a/b"}}
        run = {
            "workload": {**block, "distillation": {"teacher": "a/c", **given}},
            "batch_size": 2,
            "loop": {"steps": 1},
        }
        made, found = validate(run, [])
        assert made is not None
        return " ".join(map(str, [*found, *made.workload.problems(made)]))

    assert "leave sft or own_answers out" in problems(own_answers=0.5, loss={"js": 1, "sft": 1})
    assert "the model writes no replies" in problems(max_new_tokens=9)
    assert "distillation" not in problems(own_answers=0.5, max_new_tokens=9, drawing_temperature=0.9)


# --- over ranks -------------------------------------------------------------------------------------------------------

ENGINES: Mapping[str, dict[str, Any]] = {
    "ddp": {"name": "ddp"},
    "fsdp": {"name": "fsdp"},
    "zero3": {"name": "deepspeed", "stage": 3},
}


def curves(folder: str, engines: Sequence[Mapping[str, Any]], world: int = 2) -> list[list[Any]]:
    """Returns of each engine the loss, the gradient norm and the replies of each step."""
    found = []
    for given in engines:
        own = Path(folder) / f"{os.getpid()}"
        own.mkdir(exist_ok=True)
        if not (own / "teacher").exists():
            shutil.copytree(Path(folder) / "teacher", own / "teacher")
        work = workload(own, 0.5)
        chosen: Any = TypeAdapter(EngineConfig).validate_python(given)
        engine = tiny_engine(work, config=chosen, devices=world)
        mine = Slice(engine.data_rank, engine.data_world, 2)
        points: list[Any] = []
        for window in windows_of(run_config(), work, engine, GlobalOrder(len(work.train), 5, seed=1), range(4), mine):
            loss = engine.summed(engine.forward_backward(window.micro_batches)).item()
            norm = engine.optimizer_step(1.0).grad_norm.item()
            points.append((loss, norm, [each["ids"].tolist() for each in work.made]))
        engine.close()
        found.append(points)
    return found


@pytest.mark.long
@pytest.mark.slow
def test_replies_and_curve_are_those_of_one_process_on_every_engine(ranks: Callable[[int], RankPool]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        teacher_in(Path(folder))
        of_ranks = ranks(2).run(curves, folder, list(ENGINES.values()))
        [alone] = ranks(1).run(curves, folder, [{"name": "single"}], 1)[0]
    for number, name in enumerate(ENGINES):
        for rank in of_ranks:
            for (loss, norm, ids), (expected, known, others) in zip(rank[number], alone, strict=True):
                assert loss == pytest.approx(expected, rel=1e-5), name
                assert norm == pytest.approx(known, rel=1e-4), name
                assert ids == others, name
