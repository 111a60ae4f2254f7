"""Every shipped recipe trains: as it is where its data are bundled, else on small data of the same form."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import LlamaConfig, LlamaForCausalLM

from drivetrain.cli import main
from drivetrain.data.language.vocabularies import byte_tokenizer

ROOT = Path(__file__).resolve().parents[1]
# other runs of these data and models, or of these engines, run always
SLOW = {f"{kind}-{engine}.yaml" for kind in ("cifar10-resnet50", "hotel-bert") for engine in ("ddp", "fsdp")}
RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*.yaml"))
SMALL_BERT = ["config.num_hidden_layers=2", "config.hidden_size=32", "config.intermediate_size=32", "loop.epochs=1"]
# 16 channels: oneDNN writes beyond its memory for 8 in bf16 (docs/reference/precision.md)
SMALL_RESNET = [
    "image_size=64", "crop_padding=4", "config.depths=[1,1,1,1]", "config.hidden_sizes=[16,16,32,64]",
    "config.embedding_size=16", "loop.epochs=1", "batch_size=16", "loader.workers=1",
]  # fmt: skip
FEW_PROCESSES = ["processes=2", "loader.workers=0"]  # each imports what the others do, on the same cores
# what makes a recipe small; everything else stays as it ships
SMALLER = {
    "digits.yaml": ["workload.data.limit_train=128", "workload.data.limit_evaluation=50", "loop.epochs=1"],
    "digits-small-lr.yaml": ["workload.data.limit_train=64", "workload.data.limit_evaluation=50", "loop.epochs=1"],
    "linear.yaml": [],
    "hotel-bert.yaml": SMALL_BERT,
    "shakespeare-mesh.yaml": ["engine={name: mesh, pp: 2}", "config.hidden_size=32", "length=32", "loop.epochs=1"],
    "shakespeare-char.yaml": ["loop.steps=10", "schedule.warmup_steps=2"],
    "alpaca-sft.yaml": ["config.hidden_size=32", "config.num_hidden_layers=1", "vocabulary_size=300", "loop.epochs=1"],
    "alpaca-qlora.yaml": ["data.template=alpaca", "loop.epochs=1"],
    "distill.yaml": ["data.template=alpaca", "data.length=64"],
    "preferences-dpo.yaml": ["data.template=alpaca", "data.length=64", "adapter.rank=2"],
    "rewards-grpo.yaml": [
        "data.template=alpaca",
        "adapter.rank=2",
        "loop.steps=2",
        "reinforcement.max_new_tokens=6",
        "batch_size=4",
    ],
    "cifar10-small.yaml": ["limit_train=64", "limit_evaluation=20", "loop.epochs=1"],
    **{f"cifar10-resnet50-{name}.yaml": SMALL_RESNET for name in ("224", "dp")},
    **{f"cifar10-resnet50-{name}.yaml": [*SMALL_RESNET, *FEW_PROCESSES] for name in ("ddp", "fsdp")},
    **{f"hotel-bert-{engine}.yaml": SMALL_BERT for engine in ("dp", "ddp", "fsdp")},
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipes and examples, with small data where the recipes look for large ones; the current folder."""
    for name in ("recipes", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    reviews(tmp_path / "data")
    (tmp_path / "data" / "tinyshakespeare.txt").write_text("What say you? A pox on it, quoth she.\n" * 60)
    instructions(tmp_path / "data" / "llama-factory")
    questions = [{"instruction": f"{number} + 1?", "output": str(number + 1)} for number in range(24)]
    (tmp_path / "data" / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    model_of_your_own(tmp_path / "models" / "my-model")
    model_of_your_own(tmp_path / "models" / "my-teacher", 48)
    cifar_pickles(tmp_path / "data" / "cifar-10-batches-py", rng)
    for part, number in (("train", 8), ("test", 3)):
        for name in ("airplane", "bird", "cat"):
            folder = tmp_path / "data" / "cifar10" / part / name
            folder.mkdir(parents=True)
            for i in range(number * 3):
                Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(folder / f"{i}.jpg")
    return tmp_path


def reviews(folder: Path) -> None:
    """CSV with a BOM, as the real file has it, and a vocabulary of its characters."""
    good, bad = "房间很干净", "服务太差了"
    lines = [f"1,{good}\n0,{bad}\n"] * 40 + ["1,\n"]
    (folder / "bert-base-chinese").mkdir(parents=True)
    (folder / "ChnSentiCorp_htl_all.csv").write_text("label,review\n" + "".join(lines), encoding="utf-8-sig")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(good + bad))]
    (folder / "bert-base-chinese" / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")


def instructions(folder: Path) -> None:
    """LLaMA-Factory's registry, and the data sets of it that the recipes name."""
    folder.mkdir(parents=True)
    names = ("alpaca_en_demo", "alpaca_zh_demo", "identity")
    registry: dict[str, Any] = {name: {"file_name": f"{name}.json"} for name in (*names, "dpo_en_demo")}
    registry["dpo_en_demo"] |= {"ranking": True, "formatting": "sharegpt"}
    (folder / "dataset_info.json").write_text(json.dumps(registry))
    asked = [[{"from": "human", "value": f"What is {i}?"}] for i in range(24)]
    answered = {side: {"from": "gpt", "value": text} for side, text in (("chosen", "A number."), ("rejected", "No."))}
    (folder / "dpo_en_demo.json").write_text(json.dumps([{"conversations": each, **answered} for each in asked]))
    answers = ("It is {}.", "是{}。", "I am {{{{name}}}} {}, made by {{{{author}}}}.")
    for name, answer in zip(names, answers, strict=True):
        rows = [{"instruction": f"What is {i}?", "input": "", "output": answer.format(i)} for i in range(24)]
        (folder / f"{name}.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")


def model_of_your_own(folder: Path, width: int = 32) -> None:
    tokenizer = byte_tokenizer(["<|endoftext|>"])
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": width, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)


def cifar_pickles(folder: Path, rng: np.random.Generator) -> None:
    """The layout of the original archive: five training batches, a test batch, the names of the classes."""
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        pixels = rng.integers(0, 255, (10, 3072), dtype=np.uint8)
        with (folder / name).open("wb") as file:
            pickle.dump({b"data": pixels, b"labels": [int(i) for i in range(10)], b"batch_label": b"x"}, file)
    names = [b"airplane", b"automobile", b"bird", b"cat", b"deer", b"dog", b"frog", b"horse", b"ship", b"truck"]
    with (folder / "batches.meta").open("wb") as file:
        pickle.dump({b"label_names": names}, file)


def test_no_recipe_is_left_out() -> None:
    assert sorted(SMALLER) == RECIPES


@pytest.mark.usefixtures("checkout")
@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in RECIPES]
)
def test_a_recipe_trains(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ)
    with pytest.raises(SystemExit) as ended:
        main(["train", f"recipes/{recipe}", *SMALLER[recipe], "--quiet"])
    assert ended.value.code == 0, capsys.readouterr().err
    report = json.loads((Path("runs") / Path(recipe).stem / "report.json").read_text())
    assert report["status"] == "completed"
    assert report["steps"] > 0
    assert report["metrics"]["loss"] < 100
    set_here = {name for name, value in os.environ.items() if before.get(name) != value}
    assert not {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "RANK"} & set_here, "what ranks are started with is theirs"


@pytest.mark.usefixtures("checkout")
@pytest.mark.parametrize("recipe", ["alpaca-sft.yaml", "shakespeare-char.yaml"])
def test_the_data_of_a_language_recipe_can_be_looked_at(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["data", f"recipes/{recipe}", *SMALLER[recipe], "--json"])
    assert ended.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert not report["refused by train"]
    assert sum(each["an epoch"] for each in report["sets"] if "an epoch" in each) in {0, report["training samples"]}


def test_the_data_that_the_recipes_were_written_for_are_read(
    shared_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole, with placeholders filled in. In bytes: a vocabulary takes longer to make."""
    registry = f"workload.data.registry={shared_data / 'sft'}"
    made = ["tokenizer=bytes", "vocabulary_size=null", "config.max_position_embeddings=4096", "length=4096"]
    with pytest.raises(SystemExit) as ended:
        main(["data", str(ROOT / "recipes/alpaca-sft.yaml"), registry, *made, "too_long=drop", "--json"])
    assert ended.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["rows"] for each in report["sets"]] == [999, 1000, 91]
    assert [each["unusable rows"] for each in report["sets"]] == [0, 0, 0]
    assert [each["an epoch"] / report["training samples"] for each in report["sets"]] == pytest.approx(
        [0.4, 0.4, 0.2], abs=1e-3
    )
    identity = "data.train={path: identity, replace: {'{{name}}': Ada, '{{author}}': us}}"
    with pytest.raises(SystemExit) as ended:
        main(["data", str(ROOT / "recipes/alpaca-sft.yaml"), registry, *made, identity, "--json"])
    assert ended.value.code == 0
    sample = "".join(piece["text"] for piece in json.loads(capsys.readouterr().out)["sample"]["pieces"])
    assert "Ada" in sample
    assert "{{" not in sample


@pytest.mark.usefixtures("checkout")
def test_the_ten_line_script_learns_at_every_precision() -> None:
    for precision in ("fp32", "bf16", "bf16-mixed", "fp16-mixed"):
        with pytest.raises(SystemExit) as ended:
            main(["train", "recipes/linear.yaml", f"precision={precision}", f"output={precision}", "--quiet"])
        assert ended.value.code == 0
        metrics = json.loads((Path(precision) / "report.json").read_text())["metrics"]
        assert metrics["r2"] > 0.99, precision
