"""Rarer kinds of others' checkpoints: 16 bits, no ZeRO, other optimizers, Accelerate's shards, adapters, a Trainer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from drivetrain.checkpoint.directory import load
from drivetrain.cli import main
from tests.checkpoint.convert import scripts
from tests.checkpoint.convert.scripts import KINDS, SAVED, plain
from tests.ranks import RankPool
from tests.tiny_language import LLAMA, ROWS, write_lines

Command = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kinds(
    ranks: Callable[[int], RankPool], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("kinds")
    return folder, ranks(2).run(scripts.save_kinds, folder)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_deepspeeds_checkpoints_gives_its_masters(
    kinds: tuple[Path, dict[str, dict[str, Tensor]]], drivetrain: Command, run_file: Path, tmp_path: Path, kind: str
) -> None:
    folder, masters = kinds
    output = f"output={tmp_path / 'ours'}"
    code, out, err = drivetrain("checkpoint", "convert", str(folder / kind), "--run", str(run_file), output)
    assert code == 0, err
    saved = load(tmp_path / "ours" / "checkpoints" / f"step-{SAVED:08d}")
    for name, master in masters[kind].items():
        assert torch.equal(saved["model"][name], master), name
    has_moments = bool(saved["optimizer"]["state"])
    assert has_moments == (kind != "sgd")
    assert ("left\tloss scale" in out) == kind.startswith("fp16")
    assert ("ds_to_universal knows Adam's moments alone" in out) == (kind == "sgd")


def test_shards_of_accelerates_fsdp_are_put_together(
    ranks: Callable[[int], RankPool], goes_on: Callable[..., list[float]], tmp_path: Path
) -> None:
    try:
        ranks(2).run(scripts.save_accelerated, tmp_path / "theirs")
    finally:
        ranks(2).close()  # Accelerate remembers that its processes had FSDP
    assert goes_on(tmp_path / "theirs") == pytest.approx(plain()[2], rel=1e-6)


RUN = """
workload: {{type: language_model, stage: sft, model: {model}, data: {data}}}
batch_size: 6
loop: {{steps: 2}}
optimizer: {{name: adamw, lr: 1.0e-2, weight_decay: 0.1}}
"""


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run of a small language model, and a run file that goes on from it."""
    folder = tmp_path_factory.mktemp("language")
    rows = write_lines(folder / "rows.jsonl", ROWS)
    data = json.dumps({"train": rows, "template": "plain", "length": 64, "cache": str(folder / "cache")})
    base = folder / "base" / "checkpoints" / "step-00000002"
    for name, model in (("base", {"config": LLAMA}), ("further", {"path": str(base)})):
        (folder / f"{name}.yaml").write_text(RUN.format(model=json.dumps(model), data=data))
    with pytest.raises(SystemExit) as ended:
        main(["train", str(folder / "base.yaml"), f"output={folder}/base", "--quiet"])
    assert ended.value.code == 0
    return folder


def test_a_checkpoint_of_the_transformers_trainer_is_taken_up(
    language: Path, drivetrain: Command, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(language / "base" / "checkpoints" / "step-00000002")
    rows = [{"input_ids": torch.arange(8) + number, "labels": torch.arange(8) + number} for number in range(16)]
    arguments = TrainingArguments(
        str(tmp_path / "trainer"),
        max_steps=3,
        save_steps=3,
        per_device_train_batch_size=4,
        weight_decay=0.1,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    given = (str(language / "further.yaml"), f"output={tmp_path / 'ours'}")
    code, out, err = drivetrain("checkpoint", "convert", str(tmp_path / "trainer" / "checkpoint-3"), "--run", *given)
    assert code == 0, err
    assert "left\tscheduler.pt" in out
    saved = load(tmp_path / "ours" / "checkpoints" / "step-00000003")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, tensor in model.state_dict().items():
        assert torch.equal(saved["model"][name], tensor), name
    states = trainer.optimizer.optimizer.state
    assert len(states) == len(saved["optimizer"]["state"])
    for parameter, state in states.items():
        ours = saved["optimizer"]["state"][names[id(parameter)]]
        assert all(torch.equal(ours[key], state[key]) for key in ("exp_avg", "exp_avg_sq", "step"))


def test_adapters_are_written_as_peft_reads_them(language: Path, drivetrain: Command, tmp_path: Path) -> None:
    given = (str(language / "further.yaml"), f"output={tmp_path / 'ours'}")
    code, _, err = drivetrain("train", *given, "adapter=lora", "--quiet")
    assert code == 0, err
    for form in ("transformers", "dcp"):
        theirs = ("--to", form, "--output", str(tmp_path / form))
        code, out, err = drivetrain("checkpoint", "convert", str(tmp_path / "ours"), *theirs)
        assert code == 0, err
        assert "left\tbase" in out
    base = AutoModelForCausalLM.from_pretrained(language / "base" / "checkpoints" / "step-00000002")
    ids = torch.arange(10)[None]
    before = base(ids).logits
    model = peft.PeftModel.from_pretrained(base, str(tmp_path / "transformers"))
    saved = load(tmp_path / "ours" / "checkpoints" / "step-00000002")["model"]
    written = {name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if "lora" in name}
    assert {name: tuple(tensor.shape) for name, tensor in written.items()} == {
        name: tuple(tensor.shape) for name, tensor in saved.items()
    }
    assert all(torch.equal(written[name], saved[name]) for name in saved)
    assert not torch.equal(model(ids).logits, before)
