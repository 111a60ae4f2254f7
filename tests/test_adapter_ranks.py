"""Adapters over two ranks, whole runs in one spawn: trained, gone on, evaluated and predicted as in one process."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    LlamaConfig,
    LlamaForCausalLM,
)

from drivetrain.checkpoint.directory import load
from drivetrain.checkpoint.state import same
from drivetrain.config import rules
from drivetrain.config.load import validate
from drivetrain.config.run import RunConfig
from drivetrain.data.language.vocabularies import END_OF_TEXT, byte_tokenizer
from drivetrain.launch.execute import perform
from drivetrain.launch.job import Job, Verb
from drivetrain.runtime.hardware import detect
from tests.ranks import RankPool
from tests.tiny_language import LLAMA, ROWS, write_lines

OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.blocks = nn.Sequential(Block(), Block(), Block())
    def forward(self, x):
        return self.head(self.blocks(self.first(x)))

def build_model():
    torch.manual_seed(5)
    return Net()

x = torch.randn(110, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x[:, :3].argmax(1))
train_data, evaluation_data = TensorDataset(*data[:80]), TensorDataset(*data[80:])
loss = nn.CrossEntropyLoss()
"""
COMMON: dict[str, Any] = {
    "batch_size": 8,
    "optimizer": {"name": "adamw", "lr": 1e-2},
    "evaluation": {"every_steps": 4, "batch_size": 4},
    "checkpoints": {"keep_last": 2},
    "tracking": {"trackers": []},
    "processes": 2,
}
TWO = [{"name": "one", "rank": 4}, {"name": "two", "rank": 2, "targets": ["q_proj", "down_proj"]}]
ADAPTERS: dict[str, Any] = {
    "bert": {"rank": 4, "dropout": 0.1},
    "own": {"rank": 4, "train_also": ["head"]},
    "llama": {"rank": 4, "dropout": 0.1},
    "llama-two": TWO,
    "llama-nf4": {"rank": 4},
}
CASES = [("bert", "zero3"), ("llama-two", "fsdp")]
ENGINES = ("ddp", "fsdp", "zero2", "zero3")
REST = [
    *((what, engine) for what in ("bert", "own", "llama", "llama-two") for engine in ENGINES),
    *(("llama-nf4", engine) for engine in ENGINES),
    *(("bert", engine) for engine in ("zero1", "accelerate-fsdp", "accelerate-zero3")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bases, data, a module of one's own."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "own.py").write_text(OWN)
    torch.manual_seed(0)
    tokenizer = byte_tokenizer([END_OF_TEXT])
    tokenizer.save_pretrained(folder / "llama")
    LlamaForCausalLM(LlamaConfig(**{**LLAMA, "vocab_size": len(tokenizer)})).save_pretrained(folder / "llama")
    write_lines(folder / "chats.jsonl", ROWS)
    words = [f"w{number}" for number in range(12)]
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "bert")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertForSequenceClassification(BertConfig(vocab_size=17, num_labels=2, **sizes)).save_pretrained(folder / "bert")
    picked = torch.randint(0, 12, (90, 5), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [f"{int(min(row) < 2)},{' '.join(words[i] for i in row[: 1 + sum(row) % 5])}" for row in picked]
    (folder / "texts.csv").write_text("\n".join(["label,text", *rows]))
    return folder


def raw(folder: Path, what: str) -> dict[str, Any]:
    """A run of what is trained, on no engine yet."""
    data = {"cache": str(folder / "cache"), "evaluation_fraction": 0.2}
    workloads: dict[str, dict[str, Any]] = {
        "own": {"type": "module", "path": str(folder / "own.py")},
        "bert": {
            "type": "text_classification",
            "model": {"path": str(folder / "bert")},
            "data": {**data, "train": str(folder / "texts.csv")},
        },
        "llama": {
            "type": "language_model",
            "stage": "sft",
            "model": {"path": str(folder / "llama")},
            "data": {**data, "train": str(folder / "chats.jsonl"), "template": "plain", "length": 64},
        },
    }
    quantised = {"quantised_base": {"format": "nf4"}} if what.endswith("nf4") else {}
    return {**COMMON, **quantised, "workload": workloads[what.partition("-")[0]], "adapter": ADAPTERS[what]}


def config(raw: dict[str, Any], steps: int = 8, **changes: Any) -> RunConfig:
    built, problems = validate({**raw, "loop": {"steps": steps}, **changes}, [])
    assert built is not None, problems
    run, problems = rules.judged(built, problems, detect(built.device))
    assert not problems
    return run


def done(verb: Verb, run: RunConfig, **options: Any) -> Any:
    return perform(Job(verb=verb, run=run, quiet=True, checkpoint="last", **options)).value


def whole_runs(folder: Path, cases: Sequence[tuple[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    """On each rank. Of a case: what the report of eight steps says, and what evaluating and predicting gave."""
    found = {}
    for what, engine in cases:
        output = folder / f"{what}-{engine}"
        run = functools.partial(config, raw(folder, what), engine=engine, output=str(output))
        report = done("train", run())
        parts = functools.partial(run, output=f"{output}-parts")
        done("train", parts(steps=4))
        done("train", parts(), resume=True)
        evaluated = done("evaluate", run())
        done("predict", run(), output=output / "two.jsonl")
        found[what, engine] = {"report": report, "metrics": evaluated["metrics"]}
    return found


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, folder: Path, ranks: Callable[[int], RankPool]
) -> dict[tuple[str, str], dict[str, Any]]:
    """By the first rank."""
    items = [item for item in request.session.items if item.fspath == request.fspath]
    cases = [item.callspec.params["case"] for item in items if hasattr(item, "callspec")]  # type: ignore[attr-defined]
    results: dict[tuple[str, str], dict[str, Any]] = ranks(2).run(whole_runs, folder, cases)[0]
    return results


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id="-".join(case)) for case in CASES),
        *(pytest.param(case, id="-".join(case), marks=pytest.mark.slow) for case in REST if case not in CASES),
    ],
)
def test_an_adapter_over_two_ranks_goes_on_exactly_and_is_used_as_in_one_process(
    case: tuple[str, str], folder: Path, found: dict[tuple[str, str], dict[str, Any]]
) -> None:
    what, engine = case
    output = folder / f"{what}-{engine}"
    at_once = load(output / "checkpoints" / "step-00000008")
    gone_on = load(Path(f"{output}-parts") / "checkpoints" / "step-00000008")
    assert same(at_once["model"], gone_on["model"])
    assert same(at_once["optimizer"], gone_on["optimizer"])
    report = found[case]["report"]
    assert report["engaged"]["trained_parameters"] == sum(t.numel() for t in at_once["model"].values())

    alone = config(raw(folder, what), engine="single", processes=1, output=str(output))
    metrics = done("evaluate", alone)["metrics"]
    assert found[case]["metrics"] == pytest.approx(metrics, rel=1e-4)
    assert report["metrics"] == pytest.approx(metrics, rel=1e-4)
    done("predict", alone, output=output / "one.jsonl")
    theirs, ours = rows(output / "one.jsonl"), rows(output / "two.jsonl")
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == {
            k: pytest.approx(v, rel=1e-3, abs=1e-5) if isinstance(v, float) else v for k, v in other.items()
        }


@pytest.mark.long
def test_what_two_ranks_saved_is_in_files_for_plain_peft(
    folder: Path, found: dict[tuple[str, str], dict[str, Any]]
) -> None:
    """The head of a classifier and both of two adapters among it."""
    assert found
    last = folder / "bert-zero3" / "checkpoints" / "step-00000008"
    kind: Any = AutoModelForSequenceClassification
    theirs = PeftModel.from_pretrained(kind.from_pretrained(folder / "bert"), str(last))
    head = load_file(last / "model.safetensors")["classifier.weight"]
    assert torch.equal(theirs.base_model.model.classifier.modules_to_save["default"].weight, head)
    last = folder / "llama-two-fsdp" / "checkpoints" / "step-00000008"
    base = AutoModelForCausalLM.from_pretrained(folder / "llama")
    both = PeftModel.from_pretrained(base, str(last / "one"), adapter_name="one")
    both.load_adapter(str(last / "two"), adapter_name="two")
    state, saved = both.state_dict(), load_file(last / "model.safetensors")
    mine = {f"base_model.model.{name}": tensor for name, tensor in saved.items()}
    assert len(mine) == 2 * (7 + 2) * 2
    assert all(torch.equal(state[name], tensor) for name, tensor in mine.items())
