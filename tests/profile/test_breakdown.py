"""Tests how spans are added up: with spans made by hand, and with a model whose costly layer is known."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from drivetrain.profile.breakdown import breakdown
from drivetrain.profile.recording import named_modules, names_in
from drivetrain.profile.spans import PART, Span, spans_of


def test_an_exchange_behind_computation_is_hidden_and_the_rest_is_exposed() -> None:
    spans = [
        Span(PART + "backward", 0.0, 8.0),
        Span("aten::mm", 0.0, 4.0, own_seconds=4.0),
        Span("gloo:all_reduce", 3.0, 6.0, is_async=True),
        Span("aten::add", 7.0, 8.0, own_seconds=1.0),
        Span(PART + "optimizer", 8.0, 10.0),
    ]
    found = breakdown(spans, steps=2)
    assert found["step"] == pytest.approx(5.0)
    assert found["parts"] == {"backward": pytest.approx(4.0), "optimizer": pytest.approx(1.0)}
    assert found["computing"] == pytest.approx(2.5)
    assert found["exchange"] == pytest.approx(1.5)
    assert found["exposed_exchange"] == pytest.approx(1.0)  # from 4 to 6
    assert found["idle"] == pytest.approx(1.5)  # from 6 to 7 and from 8 to 10
    assert not found["on_gpu"]


def test_a_gpus_kernels_are_its_computation_and_not_the_operators_that_start_them() -> None:
    spans = [
        Span("aten::mm", 0.0, 1.0, own_seconds=1.0),
        Span("gemm_kernel", 1.0, 5.0, device=True, own_seconds=4.0),
        Span("ncclDevKernel_AllReduce", 4.0, 8.0, device=True, own_seconds=4.0),
    ]
    found = breakdown(spans, steps=1)
    assert found["on_gpu"]
    assert (found["computing"], found["exchange"], found["exposed_exchange"]) == (4.0, 4.0, 3.0)
    assert [each["name"] for each in found["operators"]] == ["gemm_kernel"]


class Model(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(3))
        self.head, self.recompute = nn.Linear(256, 2), recompute

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = checkpoint(block, inputs, use_reentrant=False) if self.recompute else block(inputs)
        return self.head(inputs)


def profiled(recompute: bool) -> dict:
    model, inputs = Model(recompute), torch.randn(512, 256)
    model(inputs).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as recorded, named_modules():
        model(inputs).sum().backward()
    return breakdown(spans_of(recorded.events() or ()), steps=1)


def test_forward_and_backward_are_counted_to_the_layer_that_computes_them() -> None:
    modules = {each["name"]: each for each in profiled(recompute=False)["modules"]}
    heavy = modules["blocks.*.0"]  # three products of 256 x 256 in the forward pass, six in the backward pass
    assert heavy["seconds"] > 3 * modules["head"]["seconds"]
    assert heavy["backward"] > 0
    assert heavy["forward"] > 0
    assert heavy["forward"] + heavy["backward"] == pytest.approx(heavy["seconds"])


def test_layers_that_run_again_within_the_backward_pass_are_recomputed() -> None:
    assert profiled(recompute=False)["recompute"] == 0
    assert profiled(recompute=True)["recompute"] > 0


def test_names_of_modules_lose_wrappers_and_numbers_of_blocks() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert list(names_in(plain).values()) == ["(the model itself)", "0", "1", "2"]
    wrapped = nn.Module()
    wrapped.module = Model(recompute=False)
    assert set(names_in(wrapped).values()) == {
        "(the model itself)",
        "blocks",
        "blocks.*",
        "blocks.*.0",
        "blocks.*.1",
        "head",
    }


def test_a_named_range_on_a_gpu_is_no_kernel() -> None:
    """It lasts from its first kernel to its last, so that no time between them would be idle."""
    spans = [
        Span("gemm_kernel", 0.0, 1.0, device=True, own_seconds=1.0),
        Span("Optimizer.step#AdamW.step", 0.0, 8.0, device=True, is_annotation=True, own_seconds=8.0),
        Span("add_kernel", 7.0, 8.0, device=True, own_seconds=1.0),
    ]
    found = breakdown(spans, steps=1)
    assert (found["computing"], found["idle"]) == (2.0, 6.0)
    assert {each["name"] for each in found["operators"]} == {"gemm_kernel", "add_kernel"}
