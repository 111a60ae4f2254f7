from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from drivetrain.config.workload import UserModule
from drivetrain.errors import UserError
from drivetrain.workloads.base import Batch
from drivetrain.workloads.user_loss import SummedLoss
from drivetrain.workloads.user_module import UserModuleWorkload

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "linear.py"
HEADER = "import torch\nfrom torch import nn\nfrom torch.utils.data import TensorDataset\nx = torch.randn(12, 3)\n"
REGRESSION = HEADER + "train_data = TensorDataset(x, x.sum(1, keepdim=True))\nevaluation_data = train_data\n"
LINEAR = REGRESSION + "model = nn.Linear(3, 1)\n"
CLASSES = (
    HEADER
    + "train_data = TensorDataset(x, torch.arange(12) % 4)\nevaluation_data = train_data\nmodel = nn.Linear(3, 4)\n"
)

Build = Callable[..., UserModuleWorkload]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """A workload from the text of a file."""
    torch.set_num_threads(1)

    def made(text: str, seed: int = 0, **options: Any) -> UserModuleWorkload:
        (tmp_path / "mine.py").write_text(text)
        return UserModuleWorkload(UserModule(path=tmp_path / "mine.py", options=options), seed)

    return made


def whole(workload: UserModuleWorkload) -> Batch:
    return workload.collate([workload.train.load(i, 0) for i in range(len(workload.train))])


def refusal(build: Build, text: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        build(text, **options)
    return str(caught.value)


def test_the_example_learns_what_a_plain_loop_learns() -> None:
    workload = UserModuleWorkload(UserModule(path=EXAMPLE), seed=0)
    ours, theirs = workload.build_model(), workload.build_model()
    batch = whole(workload)
    for model, mean_loss in ((ours, None), (theirs, nn.MSELoss())):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(100):
            if mean_loss is None:
                loss = workload.loss_sum(model, batch) / workload.count(batch)
            else:
                loss = mean_loss(model(batch["input"]), batch["target"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.weight, torch.arange(10.0).unsqueeze(0), rtol=0.01, atol=0.01)


def test_a_run_starts_from_weights_that_its_seed_decides(build: Build) -> None:
    text = LINEAR + "loss = nn.MSELoss()\n"
    first, again, other = (build(text, seed).build_model().weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_each_build_is_a_model_of_its_own_with_the_same_start(build: Build) -> None:
    workload = build(LINEAR + "loss = nn.MSELoss()\n")
    one, other = workload.build_model(), workload.build_model()
    assert torch.equal(one.weight, other.weight)
    assert one.weight is not other.weight


@pytest.mark.parametrize(
    "line", ["model = Net", "build_model = Net", "def build_model(width=3):\n    return Net(width)"]
)
def test_a_model_may_be_made_by_a_class_or_a_function(build: Build, line: str) -> None:
    net = "class Net(nn.Linear):\n    def __init__(self, width=3):\n        super().__init__(width, 1)\n"
    workload = build(REGRESSION + net + line + "\nloss = nn.MSELoss()\n")
    assert type(workload.build_model()).__name__ == "Net"


def test_options_reach_the_functions_that_accept_them(build: Build) -> None:
    text = HEADER + (
        "def train_data(size, **rest):\n    assert rest == {'width': 5}\n    return [(torch.randn(5), 1.0)] * size\n"
        "def build_model(width=1):\n    return nn.Sequential(nn.Linear(width, 1), nn.Flatten(0))\n"
        "loss = nn.MSELoss()\n"
    )
    workload = build(text, size=7, width=5)
    assert len(workload.train) == 7
    assert workload.build_model()[0].in_features == 5  # type: ignore[index]


def test_dicts_reach_the_model_by_name_without_the_target(build: Build) -> None:
    text = HEADER + (
        "train_data = [{'a': x[i], 'b': x[i], 'target': x[i, :1]} for i in range(12)]\n"
        "class Net(nn.Linear):\n    def forward(self, a, b):\n        return super().forward(a + b)\n"
        "model = Net(3, 1)\nloss = nn.MSELoss()\n"
    )
    workload = build(text)
    batch = whole(workload)
    model = workload.build_model()
    expected = F.mse_loss(F.linear(2 * batch["a"], model.weight, model.bias), batch["target"], reduction="sum")
    torch.testing.assert_close(workload.loss_sum(model, batch), expected)


def test_float64_samples_are_taken_as_the_models_float32(build: Build) -> None:
    workload = build(HEADER + "train_data = [(x[0].numpy().astype('f8'), [1.0])] * 4\n"
                     "def collate(samples):\n    return {'input': torch.ones(4, 3), 'target': torch.ones(4, 1)}\n"
                     "model = nn.Linear(3, 1)\nloss = nn.MSELoss()\n")  # fmt: skip
    assert whole(workload)["input"].dtype == torch.float32
    plain = build(HEADER + "import numpy\ntrain_data = [(numpy.ones(3), numpy.ones(1))] * 4\n"
                  "model = nn.Linear(3, 1)\nloss = nn.MSELoss()\n")  # fmt: skip
    assert {tensor.dtype for tensor in whole(plain).values()} == {torch.float32}


def test_loss_sum_and_count_take_the_place_of_a_loss(build: Build) -> None:
    text = LINEAR + (
        "def loss_sum(model, batch):\n    return (model(batch['input']) - batch['target']).abs().sum()\n"
        "def count(batch):\n    return batch['target'].numel()\n"
        "splits_batches = False\n"
    )
    workload = build(text)
    model, batch = workload.build_model(), whole(workload)
    outputs = workload.outputs(model, batch)
    assert not workload.splits_batches
    assert outputs.count == 12
    torch.testing.assert_close(outputs.loss_sum / 12, F.l1_loss(model(batch["input"]), batch["target"]))
    assert workload.metrics() == {}


def test_classes_are_predicted_beside_a_loss_sum_too(build: Build) -> None:
    text = CLASSES + (
        "def loss_sum(model, batch):\n"
        "    return nn.functional.cross_entropy(model(batch['input']), batch['target'], reduction='sum')\n"
        "def count(batch):\n    return len(batch['target'])\n"
    )
    workload = build(text)
    model, batch = workload.build_model(), whole(workload)
    expected = model(batch["input"]).softmax(1)
    for row, found in zip(workload.predict(model, batch), expected, strict=True):
        assert row["prediction"] == int(found.argmax())
        assert list(row["probabilities"].values()) == pytest.approx(found.tolist(), abs=1e-6)
    assert workload.metrics() == {}


def test_a_loss_sum_may_call_its_model_in_a_way_of_its_own(build: Build) -> None:
    text = HEADER + (
        "train_data = TensorDataset(x, torch.arange(12) % 4)\nclass Two(nn.Linear):\n"
        "    def forward(self, x, scale):\n        return scale * super().forward(x)\nmodel = Two(3, 4)\n"
        "def loss_sum(model, batch):\n"
        "    return nn.functional.cross_entropy(model(batch['input'], 2.0), batch['target'], reduction='sum')\n"
        "def count(batch):\n    return len(batch['target'])\n"
    )
    assert build(text).metrics() == {}


def test_a_loss_of_another_kind_is_the_only_metric(build: Build) -> None:
    text = HEADER + (
        "train_data = evaluation_data = TensorDataset(x, x)\nmodel = nn.Linear(3, 2)\n"
        "def loss(output, target):\n    return (output.sum(1) - target.sum(1)).square().mean()\n"
    )
    workload = build(text)
    model, batch = workload.build_model(), whole(workload)
    outputs, output = workload.outputs(model, batch), model(batch["input"])
    assert workload.metrics() == {}
    expected = (output.sum(1) - batch["target"].sum(1)).square().mean()
    torch.testing.assert_close(outputs.loss_sum / outputs.count, expected)
    assert workload.predict(model, batch)[3] == {"prediction": pytest.approx(output[3].tolist())}


def evaluated(workload: UserModuleWorkload) -> tuple[dict[str, float], Tensor, Batch]:
    """The metrics over two unequal batches, the outputs, and all samples."""
    assert workload.evaluation is not None
    model, metrics = workload.build_model(), workload.metrics()
    samples = [workload.evaluation.load(i, 0) for i in range(12)]
    for part in (samples[:7], samples[7:]):
        outputs = workload.outputs(model, workload.collate(part))
        for metric in metrics.values():
            metric.update(outputs.predictions, outputs.targets)
    batch = workload.collate(samples)
    with torch.no_grad():
        return {name: float(metric.compute()) for name, metric in metrics.items()}, model(batch["input"]), batch


def test_numbers_get_the_metrics_of_regression(build: Build) -> None:
    values, output, batch = evaluated(build(LINEAR + "loss = nn.MSELoss()\n"))
    error = output - batch["target"]
    spread = batch["target"] - batch["target"].mean()
    assert values["mean_absolute_error"] == pytest.approx(float(error.abs().mean()), rel=1e-5)
    assert values["mean_squared_error"] == pytest.approx(float((error**2).mean()), rel=1e-5)
    assert values["r2"] == pytest.approx(1 - float((error**2).sum() / (spread**2).sum()), rel=1e-4)


@pytest.mark.parametrize("loss", ["nn.CrossEntropyLoss()", "nn.functional.cross_entropy"])
def test_class_numbers_get_accuracy_and_macro_f1(build: Build, loss: str) -> None:
    workload = build(CLASSES + f"loss = {loss}\n")
    values, output, batch = evaluated(workload)
    assert set(values) == {"accuracy", "macro_f1"}
    assert values["accuracy"] == pytest.approx(float((output.argmax(1) == batch["target"]).float().mean()))
    rows = workload.predict(workload.build_model(), batch)
    assert [row["prediction"] for row in rows] == output.argmax(1).tolist()


def test_classes_a_token_leave_ignored_targets_out(build: Build) -> None:
    text = HEADER + (
        "target = torch.arange(12).view(4, 3) % 5\ntarget[:, 0] = -100\n"
        "train_data = TensorDataset(torch.randn(4, 3, 2), target)\nevaluation_data = train_data\n"
        "class Net(nn.Linear):\n    def forward(self, x):\n        return super().forward(x).transpose(1, 2)\n"
        "model = Net(2, 5)\nloss = nn.CrossEntropyLoss()\n"
    )
    workload = build(text)
    model, batch = workload.build_model(), whole(workload)
    outputs = workload.outputs(model, batch)
    assert outputs.count == 8
    output = model(batch["input"])
    torch.testing.assert_close(outputs.loss_sum, F.cross_entropy(output, batch["target"], reduction="sum"))
    metric = workload.metrics()["accuracy"]
    metric.update(outputs.predictions, outputs.targets)
    right = (output.argmax(1) == batch["target"])[batch["target"] >= 0]
    assert float(metric.compute()) == pytest.approx(float(right.float().mean()))


def test_yes_and_no_get_accuracy_and_a_probability(build: Build) -> None:
    text = HEADER + (
        "train_data = TensorDataset(x, (x[:, :1] > 0).float())\nevaluation_data = train_data\n"
        "model = nn.Linear(3, 1)\nloss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0]))\n"
    )
    workload = build(text)
    values, output, batch = evaluated(workload)
    assert values == {"accuracy": pytest.approx(float(((output > 0) == (batch["target"] > 0.5)).float().mean()))}
    rows = workload.predict(workload.build_model(), batch)
    assert rows[0]["prediction"] == pytest.approx(float(output[0].sigmoid()))


def test_own_metrics_and_predictions_see_the_models_output(build: Build) -> None:
    text = CLASSES + (
        "from torchmetrics.classification import MulticlassAUROC\nloss = nn.CrossEntropyLoss()\n"
        "metrics = {'auroc': MulticlassAUROC(num_classes=4)}\n"
        "def predict(output):\n    return output.softmax(1)\n"
    )
    workload = build(text)
    values, output, batch = evaluated(workload)
    assert 0 <= values["auroc"] <= 1
    assert workload.metrics()["auroc"] is not workload.metrics()["auroc"]
    rows = json.loads(json.dumps(workload.predict(workload.build_model(), batch)))
    assert rows[0]["prediction"] == pytest.approx(output[0].softmax(0).tolist())


def test_a_plain_function_is_a_metric(build: Build) -> None:
    text = REGRESSION + (
        "model = nn.Linear(3, 1)\nloss = nn.MSELoss()\n"
        "def worst(output, target):\n    return (output - target).abs().max()\n"
        "metrics = {'worst': worst}\n"
    )
    values, output, batch = evaluated(build(text))
    assert values["worst"] == pytest.approx(float((output - batch["target"]).abs().max()))


def test_a_metric_that_cannot_work_is_reported_with_the_file(build: Build) -> None:
    text = LINEAR + "loss = nn.MSELoss()\nmetrics = {'rate': lambda output, target: output.no_such_thing()}\n"
    assert "the metric 'rate' failed" in refusal(build, text)
    assert "metrics['rate'] is of type float, no metric" in refusal(
        build, LINEAR + "loss = nn.MSELoss()\nmetrics = {'rate': 0.5}\n"
    )


def test_one_sample_gets_one_row_even_if_the_model_squeezes(build: Build) -> None:
    text = HEADER + (
        "train_data = TensorDataset(x, x.sum(1))\n"
        "class Net(nn.Linear):\n    def forward(self, x):\n        return super().forward(x).squeeze()\n"
        "model = Net(3, 1)\nloss = nn.MSELoss()\n"
    )
    workload = build(text)
    assert len(workload.predict(workload.build_model(), workload.collate([workload.train.load(0, 0)]))) == 1


def test_trying_the_file_out_leaves_the_random_generators_as_they_were(build: Build) -> None:
    text = REGRESSION + "def build_model():\n    return nn.Linear(3, 1)\n" + "loss = nn.MSELoss()\n"
    build(text)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    exec(text, {})
    assert torch.equal(drawn, torch.rand(1))


def test_the_file_is_kept_beside_the_weights(build: Build, tmp_path: Path) -> None:
    workload = build(LINEAR + "loss = nn.MSELoss()\n")
    (tmp_path / "saved").mkdir()
    workload.save_assets(workload.build_model(), tmp_path / "saved")
    assert (tmp_path / "saved" / "workload.py").read_text() == LINEAR + "loss = nn.MSELoss()\n"


def test_a_checkpoint_keeps_the_file_that_is_trained_whatever_becomes_of_it(build: Build, tmp_path: Path) -> None:
    workload = build(LINEAR + "loss = nn.MSELoss()\n")
    workload._file.path.unlink()
    workload.save_assets(workload.build_model(), tmp_path)
    assert (tmp_path / "workload.py").read_text() == LINEAR + "loss = nn.MSELoss()\n"


EVALUATION_OF = """
def evaluation_data(path="held_out.csv"):
    size = 7 if path == "new.csv" else 3
    return TensorDataset(x[:size], x[:size].sum(1, keepdim=True))
"""


def test_prediction_takes_the_files_own_evaluation_data_only(build: Build) -> None:
    workload = build(LINEAR + "loss = nn.MSELoss()\n")
    assert list(workload.prediction_samples(None).names)[:2] == ["evaluation sample 0", "evaluation sample 1"]
    with pytest.raises(
        UserError, match=r"(?s)x\.csv was given, but mine\.py makes its data.*workload\.options\.path=FILE"
    ):
        workload.prediction_samples("x.csv")
    new = LINEAR.replace("evaluation_data = train_data", EVALUATION_OF) + "loss = nn.MSELoss()\n"
    assert len(build(new).evaluation or ()) == 3
    assert len(build(new, path="new.csv").evaluation or ()) == 7, "as the message says"
    without = build(LINEAR.replace("evaluation_data", "_unused") + "loss = nn.MSELoss()\n")
    with pytest.raises(UserError, match="has no evaluation_data"):
        without.prediction_samples(None)


IGNORING = CLASSES.replace("torch.arange(12) % 4", "torch.tensor([0, -100, 2] * 4)")


@pytest.mark.parametrize(
    "loss",
    [
        "from torch.nn import functional as F\nloss = F.cross_entropy\n",
        "class Own(nn.CrossEntropyLoss):\n    pass\nloss = Own()\n",
    ],
    ids=["function", "subclass"],
)
def test_ignored_targets_do_not_count_however_cross_entropy_is_named(build: Build, loss: str) -> None:
    workload = build(IGNORING + loss)
    model = workload.build_model()
    batch = workload.collate([workload.train.load(i, 0) for i in range(12)])
    assert workload.count(batch) == 8
    expected = nn.functional.cross_entropy(model(batch["input"]), batch["target"], reduction="sum")
    assert workload.loss_sum(model, batch).item() == pytest.approx(expected.item(), rel=1e-6)
    nothing = workload.collate([workload.train.load(1, 0)])
    assert workload.loss_sum(model, nothing).item() == 0, "and no NaN where none is left"


def test_ignored_targets_of_a_loss_that_says_nothing_of_them_are_refused(build: Build) -> None:
    own = "def loss(o, t):\n    return nn.functional.cross_entropy(o, t)\n"
    assert "define loss_sum" in refusal(build, IGNORING.replace("[0, -100, 2]", "[0, 1, -100]") + own)
    with pytest.raises(UserError, match="define loss_sum"):  # of a sample that was not looked at before
        SummedLoss(lambda o, t: F.cross_entropy(o, t)).count(torch.tensor([0, -100]))


MSE = "loss = nn.MSELoss()\n"
REFUSED: dict[str, tuple[str, list[str]]] = {
    "a loss that does not split": (
        LINEAR + "def loss(o, t):\n    return (o - t).abs().max()\n",
        ["is not the sum of each one's", "splits_batches = False"],
    ),
    "a target that the loss would broadcast": (
        HEADER + "train_data = TensorDataset(x, x.sum(1))\nmodel = nn.Linear(3, 1)\n" + MSE,
        ["output is (2, 1), the target (2,)"],
    ),
    "a model of another width": (REGRESSION + "model = nn.Linear(4, 1)\n" + MSE, ["two samples", "mat1 and mat2"]),
    "no model": (REGRESSION + "model = 3\n" + MSE, ["model gives a int, no nn.Module"]),
    "class numbers with a fraction's dtype": (
        CLASSES.replace("% 4", "% 4.0") + "loss = nn.CrossEntropyLoss()\n",
        [
            "mine.py: train_data gives targets of torch.float32, shape (2,)",
            "CrossEntropyLoss takes the classes' numbers as torch.int64, or a probability of each class",
            "target.long()",
        ],
    ),
    "pixels' class numbers with a fraction's dtype": (
        HEADER + "train_data = [(torch.rand(3, 5), torch.zeros(5))] * 4\nmodel = nn.Conv1d(3, 2, 1)\n"
        "loss = nn.NLLLoss()\n",
        ["targets of torch.float32, shape (2, 5); NLLLoss takes the classes' numbers as torch.int64\n"],
    ),
    "reduction none": (LINEAR + "loss = nn.MSELoss(reduction='none')\n", ["reduction='none'"]),
    "reduction sum": (LINEAR + "loss = nn.MSELoss(reduction='sum')\n", ["reduction='sum'"]),
    "class weights": (CLASSES + "loss = nn.CrossEntropyLoss(weight=torch.ones(4))\n", ["weighted mean", "loss_sum"]),
    "a loss of many numbers": (LINEAR + "def loss(o, t):\n    return o - t\n", ["shape (2, 1), not one number"]),
    "a loss that fails": (LINEAR + "def loss(o, t):\n    return o.nothing\n", ["at line 9 (return o.nothing)"]),
    "batches without a target": (
        HEADER + "train_data = [{'a': x[0], 'labels': x[0]}] * 4\nmodel = nn.Linear(3, 1)\n" + MSE,
        ["no 'target', but 'a', 'labels'"],
    ),
    "text in a batch": (
        HEADER + "train_data = [{'input': x[0], 'text': 'a', 'target': x[0]}] * 4\nmodel = nn.Linear(3, 3)\n" + MSE,
        ["'text' of a batch is a list"],
    ),
    "an empty data set": (HEADER + "train_data = []\nmodel = nn.Linear(3, 1)\n" + MSE, ["train_data is empty"]),
    "a tuple of tensors": (HEADER + "train_data = (x, x)\nmodel = nn.Linear(3, 3)\n" + MSE, ["TensorDataset(inputs"]),
    "a loader": (
        LINEAR.replace("TensorDataset(x, x.sum(1, keepdim=True))", "torch.utils.data.DataLoader([1, 2])") + MSE,
        ["is a DataLoader", "its data set"],
    ),
    "a stream": (HEADER + "train_data = iter([1])\nmodel = nn.Linear(3, 1)\n" + MSE, ["no length or no items"]),
    "a model that gives a tuple": (
        REGRESSION + "class Net(nn.Linear):\n    def forward(self, x):\n        return x, x\nmodel = Net(3, 1)\n" + MSE,
        ["the model gives a tuple", "loss_sum and count"],
    ),
}


@pytest.mark.parametrize(("text", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_train_is_refused_before_work_starts(build: Build, text: str, words: list[str]) -> None:
    message = refusal(build, text)
    assert "workload.path: " in message
    assert all(part in message for part in words), message


def test_a_plain_data_set_is_what_a_tutorial_passes_to_a_loader(build: Build) -> None:
    workload = build(LINEAR + MSE)
    data = workload.train._data
    assert isinstance(data, TensorDataset)
    assert torch.equal(whole(workload)["input"], data.tensors[0])


def test_a_file_may_say_how_its_layers_are_split(build: Build) -> None:
    words = 'tensor_parallel = {"layers.*.first": "colwise", "layers.*.second": "rowwise"}\n'
    text = LINEAR + "loss = nn.MSELoss()\n"
    assert build(text).layout.tensor_parallel is None
    assert build(text + words).layout.tensor_parallel == {"layers.*.first": "colwise", "layers.*.second": "rowwise"}
    assert "tensor_parallel is ['layers.0']" in refusal(build, text + 'tensor_parallel = ["layers.0"]\n')
