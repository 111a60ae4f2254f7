"""A user's file with a loss of several terms, statistics of the whole batch and models beside the trained one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain.config.workload import UserModule
from drivetrain.errors import UserError
from drivetrain.workloads.loss_contract import LossContext, Statistics
from drivetrain.workloads.user_module import UserModuleWorkload

Build = Callable[[str], UserModuleWorkload]
HEADER = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
x = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
y = torch.where(torch.arange(24) % 3 == 0, -100, torch.arange(24) % 2)
train_data = TensorDataset(x, y)
model = nn.Linear(3, 2)
"""
COUNTS = """
def counts(batch):
    return {"label": int((batch["target"] != -100).sum()), "small": len(batch["target"])}
"""
TERMS = """
def loss_terms(model, batch):
    output = model(batch["input"])
    label = F.cross_entropy(output, batch["target"], ignore_index=-100, reduction="sum")
    return {"label": label, "small": output.square().sum()}
"""
SUMMED = """
def count(batch):
    return len(batch["target"])
"""
STATISTICS = """
auxiliary = {"teacher": nn.Linear(3, 2)}
def statistics(model, batch, auxiliary):
    far = (model(batch["input"]) - auxiliary["teacher"](batch["input"])).square().sum(1)
    return {"sum": {"far": far.sum(), "samples": torch.tensor(float(len(far)))}, "gather": {"far": far}}
def loss_sum(model, batch, auxiliary, statistics):
    far = (model(batch["input"]) - auxiliary["teacher"](batch["input"])).square().sum(1)
    mean = statistics.sums["far"] / statistics.sums["samples"]
    assert torch.allclose(statistics.rows["far"][statistics.own], far)
    return (far - mean).abs().sum()
"""


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def made(text: str) -> UserModuleWorkload:
        path = tmp_path / "task.py"
        path.write_text(HEADER + text)
        return UserModuleWorkload(UserModule(path=path), seed=0)

    return made


def test_terms_have_sums_counts_and_weights_by_name(build: Build) -> None:
    workload = build(COUNTS + TERMS + "term_weights = {'small': 0.25}\n")
    model, batch = workload.build_model(), workload.collate([workload.train.load(i, 0) for i in range(9)])
    assert workload.terms == {"label": 1.0, "small": 0.25}
    assert workload.counts(batch) == {"label": 6, "small": 9}
    output = model(batch["input"])
    known = batch["target"] != -100
    sums = workload.loss_sums(model, batch, LossContext())
    torch.testing.assert_close(sums["label"], F.cross_entropy(output[known], batch["target"][known], reduction="sum"))
    torch.testing.assert_close(sums["small"], output.square().sum())
    found = workload.outputs(model, batch).terms
    assert {name: count for name, (_, count) in found.items()} == {"label": 6, "small": 9}


def test_statistics_and_auxiliary_models_reach_a_loss_that_names_them(build: Build) -> None:
    workload = build(SUMMED + STATISTICS)
    assert workload.has_statistics
    [(name, teacher)] = workload.auxiliary.items()
    assert (name, teacher.role, teacher.source) == ("teacher", "frozen", "task.py:teacher")
    model, batch = workload.build_model(), workload.collate([workload.train.load(i, 0) for i in range(4)])
    assert teacher.build is not None
    context = LossContext({"teacher": teacher.build()})
    partial = workload.statistics(model, batch, context)
    assert partial.rows["far"].shape == (4,)
    whole = LossContext(context.auxiliary, Statistics(partial.sums, partial.rows, torch.arange(4)))
    far = partial.rows["far"]
    torch.testing.assert_close(workload.loss_sums(model, batch, whole)["loss"], (far - far.mean()).abs().sum())


def test_a_reference_without_a_model_is_a_copy_that_follows(build: Build) -> None:
    roles = "auxiliary = {'reference': {'role': 'moved', 'every': 5, 'mixing': 0.5}, "
    workload = build(SUMMED + roles + "'head': {'role': 'trained', 'model': lambda: nn.Linear(2, 1)}}\n" + LOSS)
    reference, head = workload.auxiliary["reference"], workload.auxiliary["head"]
    assert (reference.build, reference.every, reference.mixing) == (None, 5, 0.5)
    assert head.build is not None
    assert isinstance(head.build(), nn.Linear)


LOSS = "def loss_sum(model, batch):\n    return model(batch['input']).sum()\n"
ONE = SUMMED + LOSS
REFUSED: dict[str, tuple[str, list[str]]] = {
    "names that differ": (COUNTS.replace("small", "tiny") + TERMS, ["label, small", "label, tiny", "same names"]),
    "a weight of no term": (COUNTS + TERMS + "term_weights = {'big': 2}\n", ["term_weights has big", "label, small"]),
    "a term that is a mean": (
        COUNTS + TERMS.replace("square().sum()", "square().mean()"),
        ["loss_terms gives as small", "is not the sum of each one's"],
    ),
    "a term of many numbers": (
        COUNTS + TERMS.replace("output.square().sum()", "output"),
        ["loss_terms, as small, gives a tensor of shape (2, 2), not one number"],
    ),
    "a count that is no whole number": (
        COUNTS.replace("len(batch", "0.3 * len(batch") + TERMS,
        ["counts gives 0.6, no whole number"],
    ),
    "terms without counts": (TERMS, ["loss (or loss_sum and count)"]),
    "both kinds of sums": (COUNTS + TERMS + ONE, ["defines both loss_sum and loss_terms"]),
    "a loss of outputs beside statistics": (
        "loss = nn.CrossEntropyLoss()\ndef statistics(model, batch):\n    return {}\n",
        ["defines statistics, which loss(output, target) does not see"],
    ),
    "statistics of another form": (
        ONE + "def statistics(model, batch):\n    return {'far': 1}\n",
        ["statistics gives 'far'"],
    ),
    "too few rows": (
        ONE + "def statistics(model, batch):\n    return {'gather': {'far': torch.zeros(1)}}\n",
        ["the statistic far to gather has 1 rows, of 2 samples"],
    ),
    "a role that there is not": (ONE + "auxiliary = {'a': {'role': 'still'}}\n", ["the role 'still'", "frozen, moved"]),
    "a key that there is not": (ONE + "auxiliary = {'a': {'modle': 1}}\n", ["auxiliary a has modle", "mixing, model"]),
    "no steps": (ONE + "auxiliary = {'a': {'role': 'moved', 'every': 0}}\n", ["every=0"]),
    "a head without a model": (ONE + "auxiliary = {'a': {'role': 'trained'}}\n", ["a is trained and has no model"]),
    "a model that is none": (ONE + "auxiliary = {'a': 3}\n", ["auxiliary a is a int"]),
    "a list of models": (ONE + "auxiliary = [nn.Linear(3, 2)]\n", ["auxiliary is a list", "give a dict"]),
}


@pytest.mark.parametrize(("text", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_a_loss_is_refused_before_work_starts(build: Build, text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        build(text)
    message = str(caught.value)
    assert "workload.path: " in message
    assert all(part in message for part in words), message
