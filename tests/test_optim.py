from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.config.training import Optimizer, Schedule
from drivetrain.errors import UserError
from drivetrain.optim import lr_factor, optimizer_factory
from tests.tiny_workload import perceptron


def config(**fields: Any) -> Optimizer:
    return Optimizer(**{"name": "sgd", "lr": 0.1, **fields})


# --- schedules -------------------------------------------------------------------------------------------------------


def factors(total: int, **schedule: Any) -> list[float]:
    factor = lr_factor(Schedule(**schedule), total)
    return [factor(updates) for updates in range(total)]


def test_constant_stays_at_the_peak() -> None:
    assert factors(5) == [1.0] * 5


def test_warm_up_rises_by_equal_steps_from_above_zero_to_the_peak() -> None:
    assert factors(7, warmup_steps=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0])


def test_a_warm_up_ratio_is_a_share_of_all_steps() -> None:
    for name in ("constant", "linear", "cosine"):
        assert factors(50, name=name, warmup_ratio=0.1) == factors(50, name=name, warmup_steps=5)


def test_linear_falls_by_equal_steps_to_the_final_ratio_after_the_last_update() -> None:
    assert factors(6, name="linear", warmup_steps=2) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25])
    assert factors(4, name="linear", final_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])
    assert lr_factor(Schedule(name="linear", final_lr_ratio=0.2), 4)(4) == pytest.approx(0.2)


def test_cosine_is_half_a_wave_down_to_the_final_ratio() -> None:
    half_wave = [(1 + math.cos(math.pi * i / 8)) / 2 for i in range(8)]
    assert factors(8, name="cosine") == pytest.approx(half_wave)
    assert factors(11, name="cosine", warmup_steps=3)[3:] == pytest.approx(half_wave)
    assert factors(8, name="cosine", final_lr_ratio=0.1) == pytest.approx([0.1 + 0.9 * x for x in half_wave])
    after_the_end = lr_factor(Schedule(name="cosine", final_lr_ratio=0.1), 8)
    assert after_the_end(8) == after_the_end(20) == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_without_warm_up_schedules_are_those_of_transformers(name: str) -> None:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(name, optimizer, num_warmup_steps=0, num_training_steps=20)
    expected = []
    for _ in range(20):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert factors(20, name=name) == pytest.approx(expected)


def test_a_warm_up_of_all_steps_never_divides_by_zero() -> None:
    assert factors(3, name="cosine", warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75])


# --- optimizers ------------------------------------------------------------------------------------------------------


def stepped(make: Any, steps: int = 4) -> list[torch.Tensor]:
    model = perceptron()
    optimizer = make(model)
    for step in range(steps):
        for i, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * step + i)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


BUILT_IN: dict[str, tuple[dict[str, Any], type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": ({"lr": 0.1}, torch.optim.SGD, {"lr": 0.1}),
    "sgd with momentum": ({"momentum": 0.9}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "nesterov": (
        {"momentum": 0.9, "options": {"nesterov": True}},
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ),
    "damped": (
        {"momentum": 0.9, "options": {"dampening": 0.5}},
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
    ),
    "adam": (
        {"name": "adam", "betas": (0.8, 0.95), "eps": 1e-5},
        torch.optim.Adam,
        {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-5},
    ),
    "adamw": ({"name": "adamw"}, torch.optim.AdamW, {"lr": 0.1}),
    "amsgrad": ({"name": "adamw", "options": {"amsgrad": True}}, torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    "foreach": ({"name": "adam", "options": {"foreach": True}}, torch.optim.Adam, {"lr": 0.1}),
    "adafactor": ({"name": "adafactor"}, torch.optim.Adafactor, {"lr": 0.1}),
    "adafactor with options": (
        {"name": "adafactor", "options": {"beta2_decay": -0.5, "d": 2.0}},
        torch.optim.Adafactor,
        {"lr": 0.1, "beta2_decay": -0.5, "d": 2.0},
    ),
    "by import path": (
        {"name": "torch.optim:RAdam", "options": {"betas": [0.7, 0.9]}},
        torch.optim.RAdam,
        {"lr": 0.1, "betas": (0.7, 0.9)},
    ),
    "by dotted path": ({"name": "torch.optim.Adagrad"}, torch.optim.Adagrad, {"lr": 0.1}),
}


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize(("ours", "cls", "theirs"), BUILT_IN.values(), ids=BUILT_IN)
def test_updates_are_those_of_the_torch_class_with_vectors_undecayed(
    ours: dict[str, Any], cls: type[torch.optim.Optimizer], theirs: dict[str, Any], weight_decay: float
) -> None:
    def plain(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return cls(groups, **theirs)

    mine = stepped(optimizer_factory(config(**ours, weight_decay=weight_decay)))
    for one, other in zip(mine, stepped(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_biases_and_normalisation_weights_do_not_decay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2), nn.Embedding(5, 2))
    groups = optimizer_factory(config(weight_decay=0.5))(model).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    decayed = {name for name, p in model.named_parameters() if decay[id(p)] == 0.5}
    assert decayed == {"0.weight", "3.weight", "4.weight"}
    assert {decay[id(p)] for name, p in model.named_parameters() if name not in decayed} == {0.0}


def test_frozen_parameters_are_left_out_and_tied_ones_are_updated_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    model[2].weight = model[1].weight
    held = [p for group in optimizer_factory(config())(model).param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in (model[1].weight, model[1].bias, model[2].bias)}
    assert len(held) == 3


def test_an_all_frozen_model_is_a_problem_of_the_user() -> None:
    with pytest.raises(UserError, match="empty parameter list"):
        optimizer_factory(config())(nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_16_bit_parameters_are_updated(name: str, dtype: torch.dtype) -> None:
    model = nn.Linear(40, 40).to(dtype)
    before = model.weight.detach().clone()
    optimizer = optimizer_factory(config(name=name, eps=1e-6))(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.1, rtol=0.02, atol=0.01)


def test_torchs_fused_sgd_still_fails_16_bit_parameters_on_a_cpu() -> None:
    """When this fails, torch has mended it: let `_fuses` take every dtype."""
    parameter = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.1, fused=True).step()
    assert not parameter.any()


def test_a_parameter_may_get_its_first_gradient_late() -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    optimizer = optimizer_factory(config(momentum=0.9))(model)
    before = model[1].weight.detach().clone()
    for used in (model[0], model):
        optimizer.zero_grad()
        for parameter in used.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    torch.testing.assert_close(model[1].weight.detach(), before - 0.1)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no optimizer": ({"name": "torch.nn:Linear"}, "optimizer.name", "is no torch.optim.Optimizer"),
    "a function": ({"name": "math:sqrt"}, "optimizer.name", "is no torch.optim.Optimizer"),
    "unknown module": ({"name": "no_such_package:Best"}, "optimizer.name", "no_such_package"),
    "unknown class": ({"name": "torch.optim:AdmW"}, "optimizer.name", "did you mean torch.optim:AdamW"),
    "unknown argument": ({"options": {"nestorov": True}}, "optimizer.options.nestorov", "nesterov"),
    "argument with a field": ({"options": {"lr": 3.0}}, "optimizer.options.lr", "give optimizer.lr"),
    "decay as an option": ({"options": {"weight_decay": 0.1}}, "optimizer.options.weight_decay", "optimizer.weight"),
    "decay that is not read": ({"name": "torch.optim:Rprop", "weight_decay": 0.1}, "optimizer.weight_decay", "Rprop"),
    "impossible betas": ({"name": "adam", "betas": (1.5, 0.9)}, "optimizer", "1.5"),
    "nesterov without momentum": ({"options": {"nesterov": True}}, "optimizer", "momentum"),
    "options that exclude each other": ({"options": {"fused": True, "foreach": True}}, "optimizer", "fused"),
}


@pytest.mark.parametrize(("fields", "field", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_a_problem_on_its_field(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        optimizer_factory(config(**fields))(perceptron())
    (found,) = caught.value.problems
    assert found.field == field
    assert words in f"{found.why} {found.fix}"
