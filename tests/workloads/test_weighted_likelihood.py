"""The losses of supervised fine-tuning that weigh tokens: each by its formula in plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.workloads.build import build_workload
from drivetrain.workloads.loss_contract import LossContext
from drivetrain.workloads.weighted_likelihood import WeightedLikelihoodWorkload
from tests.tiny_language import ROWS, config, plain_loss

LOSSES: list[dict[str, Any]] = [
    {"loss": "dft"},
    {"loss": "eaft"},
    {"loss": "eaft", "alpha": 0.5},
    {"loss": "asft"},
    {"loss": "asft", "alpha": 2.0},
]


def weighted(folder: Path, data: dict[str, Any] | None = None, **given: Any) -> WeightedLikelihoodWorkload:
    model = given.pop("model", {})
    made = config(folder, ROWS, "sft", **(data or {}), model=model)
    block = made.sft.model_validate({"reference": "copy" if given["loss"] == "asft" else "none", **given})
    work: Any = build_workload(made.model_copy(update={"sft": block}), 0)
    return work


def peaked(model: Any) -> nn.Module:
    """A model whose distributions are far from even, and from another's."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        model.get_output_embeddings().weight *= 2
    return model


def by_hand(given: dict[str, Any], losses: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """The papers' formulas. losses: (N,); logits (N, V)."""
    probabilities = torch.exp(-losses).detach()
    match given["loss"]:
        case "dft":
            return losses * probabilities
        case "eaft":
            shares = own.detach().sort(descending=True).values[:, :20].softmax(1)
            return losses * (-(shares * shares.log()).sum(1) / 3) ** given.get("alpha", 1.0)
        case "asft":
            q, p = own.softmax(1), other.detach().softmax(1)
            return losses * probabilities + given.get("alpha", 0.1) * (p * (p / q).log()).sum(1)
    raise AssertionError(given)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("given", LOSSES, ids=str)
def test_a_loss_and_its_gradient_are_those_of_plain_pytorch(
    tmp_path: Path, given: dict[str, Any], packing: bool
) -> None:
    work = weighted(tmp_path, {"packing": packing}, **given)
    assert type(work) is WeightedLikelihoodWorkload
    torch.manual_seed(0)
    model = peaked(work.build_model())
    reference = peaked(copy.deepcopy(model)).requires_grad_(False)
    batch = work.collate([work.train.load(index, 0) for index in range(7)])
    loss = work.loss_sums(model, batch, LossContext({"reference": reference}))["loss"] / work.count(batch)
    loss.backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    found = []
    for index in range(7):
        ids, trained = work.train.load(index, 0)
        losses, own, _ = plain_loss(model, ids, trained)
        found.append(by_hand(given, losses, own, plain_loss(reference, ids, trained)[1]))
    expected = torch.cat(found).mean()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    largest = max(float(parameter.grad.abs().max()) for parameter in model.parameters())  # type: ignore[union-attr]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-5 * largest)
    assert largest > 0


def test_dft_is_computed_without_logits_too(tmp_path: Path) -> None:
    """In slabs of the vocabulary: the weight follows from the loss itself."""
    found = []
    for fused in (True, False):
        work = weighted(tmp_path, loss="dft", model={"fused_loss": fused})
        torch.manual_seed(0)
        model = work.build_model()
        batch = work.collate([work.train.load(index, 0) for index in range(7)])
        loss = work.loss_sums(model, batch, LossContext())["loss"]
        loss.backward()
        assert (work._head.fallback is None) or not fused
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_an_evaluation_reports_the_plain_cross_entropy(tmp_path: Path) -> None:
    work = weighted(tmp_path, loss="eaft")
    model = work.build_model()
    batch = work.collate([work.train.load(index, 0) for index in range(7)])
    found = work.outputs(model, batch)
    expected = torch.cat([plain_loss(model, *work.train.load(index, 0))[0] for index in range(7)])
    assert found.loss_sum.item() == pytest.approx(expected.sum().item(), rel=1e-5)


def test_positions_may_be_cut_where_no_reference_reads_whole_sequences(tmp_path: Path) -> None:
    assert set(weighted(tmp_path, loss="dft").by_position) == {"input_ids", "position_ids", "targets"}
    assert weighted(tmp_path, loss="asft").by_position == {}
