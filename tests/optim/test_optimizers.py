from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.config.training import Optimizer
from drivetrain.errors import UserError
from drivetrain.optim.optimizers import optimizer_factory
from tests.tiny_workload import perceptron


def config(**fields: Any) -> Optimizer:
    return Optimizer(**{"name": "sgd", "lr": 0.1, **fields})


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


SIXTEEN_BITS = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("size", [7, 64, 1000], ids=["tail", "vectors", "both"])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_one_kernel_updates_16_bit_parameters_as_fp32_arithmetic_on_rounded_states(
    name: str, dtype: torch.dtype, size: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    own = nn.Module()
    own.weight = nn.Parameter(torch.randn(size, generator=generator).to(dtype))
    rounded = nn.Parameter(own.weight.detach().float())
    optimizer = optimizer_factory(config(name=name, eps=1e-6))(own)
    assert optimizer.param_groups[0]["fused"] is True
    theirs = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    plain = theirs([rounded], lr=0.1, eps=1e-6, weight_decay=0.0, foreach=False)
    for _ in range(5):
        own.weight.grad = torch.randn(size, generator=generator).to(dtype)
        rounded.grad = own.weight.grad.float()
        optimizer.step()
        plain.step()
        held = [rounded.data, plain.state[rounded]["exp_avg"], plain.state[rounded]["exp_avg_sq"]]
        for tensor in held:
            tensor.copy_(tensor.to(dtype))
    one_place = 2.0 ** (-7 if dtype == torch.bfloat16 else -10)  # a last bit, where fp32 sums round the other way
    torch.testing.assert_close(own.weight.detach().float(), rounded.detach(), rtol=one_place, atol=1e-3)


@pytest.mark.parametrize("size", [7, 64, 1000], ids=["tail", "vectors", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN_BITS], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_a_step_that_is_refused_leaves_weights_and_state(name: str, dtype: torch.dtype, size: int) -> None:
    """By the flag that a gradient scaler and a step guard leave for the kernel (engines/refusal.py)."""
    own = nn.Module()
    own.weight = nn.Parameter(torch.linspace(-1, 1, size).to(dtype))
    optimizer: Any = optimizer_factory(config(name=name, eps=1e-6))(own)
    own.weight.grad = torch.ones_like(own.weight)
    optimizer.step()
    before = [t.detach().clone() for t in (own.weight, *optimizer.state[own.weight].values())]
    own.weight.grad.fill_(float("inf"))
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    after = [own.weight.detach(), *optimizer.state[own.weight].values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    own.weight.grad.fill_(1.0)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert not torch.equal(own.weight.detach(), before[0])


def test_torchs_fused_sgd_still_fails_16_bit_parameters_on_a_cpu() -> None:
    """When this fails, torch has mended it: let `_fuses` take every dtype for it too."""
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
    "a function": ({"name": "math:sqrt"}, "optimizer.name", "sqrt fails: TypeError"),
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
