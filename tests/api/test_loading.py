"""drivetrain.load, predict and evaluate on the folders that runs left."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import TensorDataset
from transformers import PreTrainedModel

import drivetrain
from drivetrain.checkpoint.directory import read
from drivetrain.cli import main
from drivetrain.errors import UserError
from drivetrain.inference.run_sources import checkpoint_of, run_of
from drivetrain.workloads.build import build_workload
from tests.test_recipes import model_of_your_own

ROOT = Path(__file__).resolve().parents[2]
X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    drivetrain.train(
        ROOT / "recipes" / "digits.yaml",
        output=folder,
        quiet=True,
        epochs=2,
        limit_train=128,
        limit_evaluation=64,
    )
    return folder


def test_the_best_weights_are_loaded_without_the_data_and_predict_as_the_run_does(digits: Path) -> None:
    net = drivetrain.load(digits)
    assert isinstance(net, PreTrainedModel)
    assert not net.training
    assert any(isinstance(module, nn.GroupNorm) for module in net.modules())
    run = run_of(digits)
    whole = build_workload(run.workload, run.seed).build_model().eval()  # as training built it, from the data
    whole.load_state_dict(read(checkpoint_of(run, "best"))["model"])
    pixels = torch.randn(5, 1, 32, 32)
    torch.testing.assert_close(net(pixels).logits, whole(pixels).logits)
    rows, found = list(drivetrain.predict(digits)), drivetrain.evaluate(digits)
    assert len(rows) == found["samples"] == 64
    report = json.loads((digits / "report.json").read_text())
    assert found["metrics"][report["best"]["metric"]] == pytest.approx(report["best"]["value"])


def test_a_script_that_loads_a_model_sees_no_message_of_a_library(digits: Path) -> None:
    """In a process of its own, where Transformers imports torchao for the first time."""
    script = f"import drivetrain; print(type(drivetrain.load({str(digits)!r})).__name__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("ResNetForImageClassification", "")


def test_the_last_weights_are_those_of_the_newest_checkpoint(digits: Path) -> None:
    newest = sorted((digits / "checkpoints").glob("step-*"))[-1]
    one, other = drivetrain.load(digits, "last"), drivetrain.load(digits, str(newest))
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_folder_that_was_moved_is_loaded_where_it_is(digits: Path, tmp_path: Path) -> None:
    shutil.copytree(digits, tmp_path / "moved", symlinks=True)
    net = drivetrain.load(tmp_path / "moved")
    for a, b in zip(net.parameters(), drivetrain.load(digits).parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_is_no_run_is_refused(tmp_path: Path, digits: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        drivetrain.load(tmp_path / "none")
    with pytest.raises(UserError, match="holds no run"):
        drivetrain.load(tmp_path)
    with pytest.raises(UserError, match="is no checkpoint folder"):
        drivetrain.load(digits, "first")
    with pytest.raises(UserError, match="of another model"):
        drivetrain.load(digits, model=nn.Linear(2, 2))


def test_a_run_of_objects_needs_its_model(tmp_path: Path) -> None:
    net, data = nn.Linear(4, 2), TensorDataset(X, Y)
    loss = nn.CrossEntropyLoss()
    report = drivetrain.train(
        model=net,
        train_data=data,
        evaluation_data=data,
        loss=loss,
        output=tmp_path / "run",
        batch_size=16,
        epochs=3,
        lr=0.5,
        optimizer="sgd",
        quiet=True,
    )
    with pytest.raises(UserError, match="model="):
        drivetrain.load(report)
    found = drivetrain.load(report, "last", model=nn.Linear(4, 2))
    assert torch.equal(found.weight, net.weight)  # type: ignore[arg-type]
    values = drivetrain.evaluate(report, "last", model=nn.Linear(4, 2), evaluation_data=data, loss=loss)
    right = (net(X).argmax(1) == Y).float().mean().item()
    assert values["metrics"]["accuracy"] == pytest.approx(right)
    rows = list(drivetrain.predict(found, data, loss=loss, batch_size=7))
    assert [row["prediction"] for row in rows] == net(X).argmax(1).tolist()
    expected = net(X).softmax(1)
    assert [row["probabilities"]["1"] for row in rows] == pytest.approx(expected[:, 1].tolist(), abs=1e-5)
    assert [row["prediction"] for row in drivetrain.predict(found, X[:3])] == [
        pytest.approx(each) for each in net(X[:3]).tolist()
    ]


def test_code_that_a_folder_names_from_elsewhere_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "from").mkdir()
    monkeypatch.chdir(tmp_path / "from")
    shutil.copy(ROOT / "recipes" / "linear.py", "linear.py")
    run = {"workload": {"type": "module", "path": str(tmp_path / "from" / "linear.py")}, "batch_size": 32}
    drivetrain.train({**run, "loop": {"steps": 3}}, output=tmp_path / "run", quiet=True)
    monkeypatch.chdir(tmp_path / "run")
    for call in (drivetrain.load, drivetrain.predict, drivetrain.evaluate):
        with pytest.raises(UserError, match="trust=True"):
            call(tmp_path / "run")
    run_yaml = tmp_path / "run" / "run.yaml"
    for call in (
        lambda: drivetrain.evaluate(run_yaml),
        lambda: drivetrain.train(run_yaml, resume=True),
    ):
        with pytest.raises(UserError, match="trust=True"):
            call()
    assert drivetrain.evaluate(run_yaml, trust=True, output=tmp_path / "run")["samples"] == 200
    assert isinstance(drivetrain.load(tmp_path / "run", trust=True), nn.Linear)
    assert len(list(drivetrain.predict(tmp_path / "run", trust=True))) == 200


def test_an_adapter_is_merged_or_kept_and_the_tokenizer_comes_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model_of_your_own(tmp_path / "base")
    rows = [{"instruction": f"What is {i}?", "output": f"It is {i}."} for i in range(24)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    data = {"train": "rows.json", "template": "alpaca", "length": 128}
    report = drivetrain.train(
        {"workload": {"type": "language_model", "stage": "sft", "model": {"path": "base"}, "data": data}},
        adapter="lora",
        batch_size=8,
        steps=4,
        lr=1e-2,
        quiet=True,
        output="run",
    )
    kept, merged = drivetrain.load(report, adapter="keep"), drivetrain.load(report)
    assert type(merged).__name__ == "LlamaForCausalLM"
    assert not [name for name, _ in merged.named_parameters() if "lora" in name]
    ids = merged.tokenizer("What is 3?", return_tensors="pt")["input_ids"]  # type: ignore[operator]
    torch.testing.assert_close(merged(ids).logits, kept(ids).logits, rtol=1e-4, atol=1e-5)
    base = merged.from_pretrained("base")  # type: ignore[operator]
    assert merged.state_dict().keys() == base.state_dict().keys()
    assert not torch.allclose(merged(ids).logits, base(ids).logits)
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "convert", "run", "--to", "transformers", "--merge", "--output", "whole"])
    assert ended.value.code == 0
    plain = transformers.AutoModelForCausalLM.from_pretrained("whole").eval()
    assert torch.equal(plain(ids).logits, merged(ids).logits)
    tokenizer = transformers.AutoTokenizer.from_pretrained("whole")
    messages = [{"role": "user", "content": "What is 3?"}]
    own = merged.tokenizer.apply_chat_template(messages, tokenize=False)  # type: ignore[union-attr]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == own
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "convert", "run", "--to", "transformers", "--merge", "--output", "whole"])
    assert ended.value.code == 2, "the folder is taken"


WITH_A_HEAD = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
y = x.sum(1, keepdim=True)
model = nn.Linear(4, 1)
train_data = evaluation_data = TensorDataset(x, y)
auxiliary = {"value": {"model": nn.Linear(4, 1), "role": "trained"}}


def loss_terms(model, batch, auxiliary):
    target = batch["target"]
    terms = {"fit": model(batch["input"]), "value": auxiliary["value"](batch["input"])}
    return {name: (output - target).square().sum() for name, output in terms.items()}


def counts(batch):
    return dict.fromkeys(("fit", "value"), len(batch["input"]))
"""


def test_a_model_that_learned_beside_a_trained_auxiliary_one_is_loaded_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("headed.py").write_text(WITH_A_HEAD)
    run = {"workload": {"type": "module", "path": "headed.py"}, "batch_size": 16, "loop": {"steps": 3}}
    drivetrain.train(run, output="run", quiet=True)
    own, passed = drivetrain.load("run"), nn.Linear(4, 1)
    assert [name for name, _ in own.named_parameters()] == ["weight", "bias"]
    drivetrain.load("run", model=passed)
    predicted = [row["prediction"] for row in drivetrain.predict("run")]
    for net in (own, passed):
        assert net(X).flatten().tolist() == pytest.approx(predicted, abs=1e-5)


def test_a_permission_for_the_code_of_a_model_here_is_none_for_the_code_beside_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = {"path": ".", "trust_remote_code": True}
    workload = {"type": "language_model", "stage": "pretrain", "model": model, "data": {"train": "t.txt"}}
    step = tmp_path / "theirs" / "checkpoints" / "step-00000001"
    step.mkdir(parents=True)
    (step.parent.parent / "run.yaml").write_text(
        json.dumps({"workload": workload, "batch_size": 1, "loop": {"steps": 1}})
    )
    (step / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "net.Config"}}))
    (step / "net.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(UserError, match=r"came with Python code \(net.py\)(.|\n)*trust=True"):
        drivetrain.load("theirs", str(step))


def test_a_model_without_its_loss_predicts_classes_where_targets_are_class_numbers() -> None:
    net = torch.nn.Linear(3, 4)
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    rows = list(drivetrain.predict(net, [(x, torch.tensor(1)) for x in inputs]))
    assert [row["prediction"] for row in rows] == net(inputs).argmax(1).tolist()
    assert len(rows[0]["probabilities"]) == 4
    alone = list(drivetrain.predict(net, list(inputs)))
    assert len(alone[0]["prediction"]) == 4
