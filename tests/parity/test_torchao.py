"""Promise 1 for torchao's formats: on every engine the curve of plain torchao, and plain PEFT, on plain PyTorch."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.config.adapter import Adapter
from drivetrain.config.quantisation_aware import QuantisationAware
from drivetrain.config.quantised import QuantisedBase
from drivetrain.config.training import Optimizer
from drivetrain.models.adapters import AdapterSet
from drivetrain.models.fake_quantised import FakeQuantiser
from drivetrain.runtime.library_messages import hush
from tests.parity.cases import SAMPLES, STEPS, Block, Curve, plain, run_case
from tests.parity.cases import Case as Whole
from tests.parity.spawned import curves
from tests.ranks import RankPool
from tests.tiny_workload import Rows, TinyWorkload

for package in ("torchao", "peft", "deepspeed"):
    pytest.importorskip(package)

WIDTH = 64
BASES: dict[str, dict[str, Any]] = {
    "int4-lora": {"format": "int4", "group_size": 32},
    "int8-lora": {"format": "int8-torchao"},
}
FORMATS: dict[str, Any] = {
    "qat-int4": "int4-weight",
    "qat-int8": "int8-weight",
    "qat-dynamic": "int8-dynamic-int4-weight",
    "qat-int4-lora": "int4-weight",
}


class Case(Whole):
    """At a lower rate: at 0.5 a difference of one rounding grows tenfold within twelve steps."""

    @property
    def updates(self) -> Optimizer:
        return Optimizer(name="sgd", lr=0.1, momentum=0.9) if self.optimizer == "sgd" else super().updates


CASES = [
    *(Case("single", 1, model=model) for model in (*BASES, *FORMATS)),
    *(Case("fsdp", 2, model=model) for model in ("int4-lora", "qat-int4", "qat-int4-lora")),
    *(Case("deepspeed", 2, model=model, options={"stage": 3}) for model in ("int4-lora", "qat-int4")),
    Case("dp", 2, model="qat-int4"),
]
REST = [
    *(Case("ddp", 2, model=model) for model in (*BASES, *FORMATS)),
    *(Case("fsdp", 2, model=model) for model in ("int8-lora", "qat-int8", "qat-dynamic")),
    *(Case("deepspeed", 2, model=model, options={"stage": 2}) for model in (*BASES, *FORMATS)),
    *(Case("deepspeed", 2, model=model, options={"stage": 3}) for model in ("int8-lora", "qat-dynamic")),
    Case("fsdp", 2, "bf16-mixed", model="int4-lora"),
    Case("fsdp", 2, "bf16-mixed", model="qat-dynamic"),
    Case("fsdp", 2, model="qat-int4", recompute=True),
    Case("single", 1, model="qat-int4", accumulation=3),
    Case("accelerate", 2, model="qat-int4", options={"driver": "fsdp"}),
]
# Steps that agree to 1e-5: of whole batches in one process, and of batches in parts. torchao's symmetric scale puts the
# largest weight of a group half-way between two codes (7.5 steps are -7 or -8), so that the last bit of a weight may
# decide on a whole step: where gradients are summed in another order, curves of trained weights part after the first
# update. Rounded weights that are frozen stay as they are.
ALIKE = {"qat-int4": (4, 1), "qat-int8": (4, 1), "qat-dynamic": (4, 1)}


class Lifted(Rows):
    """Features as many as two groups of weights."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(num_samples, ignored_share=0.15)
        directions = torch.randn(self.features.shape[1], WIDTH, generator=torch.Generator().manual_seed(6))
        self.features = (self.features @ directions).tanh()


class Fitted(TinyWorkload):
    def build_model(self) -> nn.Module:
        return self._adapted(network())


def network() -> nn.Module:
    torch.manual_seed(5)
    # DeepSpeed takes the first parameter's dtype for the model's, and knows no bytes
    parts = {"norm": nn.LayerNorm(WIDTH), "first": nn.Linear(WIDTH, WIDTH)}
    parts |= {"blocks": nn.Sequential(*(Block(WIDTH) for _ in range(2)))}
    return nn.Sequential(OrderedDict({**parts, "last": nn.Linear(WIDTH, 3)}))


def workload(model: str) -> TinyWorkload:
    made = Fitted(network, Lifted(SAMPLES))
    base = QuantisedBase.model_validate(BASES[model]) if model in BASES else None
    if model.endswith("lora"):
        made.adapters = AdapterSet([Adapter(rank=4, targets="all-linear")], None, base)
    if model in FORMATS:
        made.fake_quantiser = FakeQuantiser(QuantisationAware(format=FORMATS[model]))
    return made


def run_cases(cases: Sequence[Case]) -> list[Curve]:
    found = []
    for case in cases:
        torch.manual_seed(9)  # of adapters' starts
        found.append(run_case(case, workload(case.model)))
    return found


# --- the other side --------------------------------------------------------------------------------------------------


@functools.cache
def reference(model: str, precision: str, optimizer: str) -> Curve:
    case = Case("single", 1, precision, model=model, optimizer=optimizer)
    return plain(case, workload(model), plain_model(model))


def plain_model(name: str) -> nn.Module:
    """By torchao's own quantize_ and PEFT's own wrapper."""
    hush()
    from peft import LoraConfig, inject_adapter_in_model
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    torch.manual_seed(9)
    model = network()
    if name in FORMATS:
        quantize_(model, QATConfig(torchaos(FORMATS[name]), step="prepare"))
    else:
        rounded = network()
        quantize_(rounded, torchaos(name))
        for ours, theirs in zip(model.modules(), rounded.modules(), strict=True):
            if isinstance(ours, nn.Linear):
                ours.weight.data = theirs.weight.dequantize()  # type: ignore[operator, union-attr]
    if name.endswith("lora"):
        model.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules=["first", "linear", "last"]), model)
        model.load_state_dict(starts(name), strict=False)
    return model


def starts(name: str) -> dict[str, torch.Tensor]:
    """Adapters start at random: those of the other side."""
    torch.manual_seed(9)
    return {key: tensor for key, tensor in workload(name).build_model().state_dict().items() if "lora_" in key}


def torchaos(form: str) -> Any:
    from torchao.quantization import (
        Int8DynamicActivationIntxWeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerAxis,
        PerGroup,
    )
    from torchao.quantization.quant_primitives import MappingType

    int4, group = torch.int4, PerGroup(32)  # type: ignore[attr-defined]
    return {
        "int4-weight": IntxWeightOnlyConfig(int4, group),
        "int8-weight": IntxWeightOnlyConfig(torch.int8, PerAxis(0)),
        "int8-dynamic-int4-weight": Int8DynamicActivationIntxWeightConfig(int4, group),
        "int4-lora": IntxWeightOnlyConfig(int4, group, MappingType.ASYMMETRIC),
        "int8-lora": Int8WeightOnlyConfig(set_inductor_config=False),
    }[form]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, ranks: Callable[[int], RankPool]) -> Callable[[Case], Curve]:
    return curves(request, ranks, run_cases, lambda case: case.processes, 20)


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=case.name) for case in CASES),
        *(pytest.param(case, id=case.name, marks=pytest.mark.slow) for case in REST),
    ],
)
def test_a_format_has_the_curve_of_plain_torchao(case: Case, found: Callable[[Case], Curve]) -> None:
    ours, theirs = found(case), reference(case.model, case.precision, case.optimizer)
    in_parts = case.world > 1 or case.accumulation > 1
    near, alike = 1e-5 if case.precision == "fp32" else 2e-2, ALIKE.get(case.model, (STEPS, STEPS))[in_parts]
    for mine, other in ((ours.losses, theirs.losses), (ours.norms, theirs.norms)):
        assert mine[:alike] == pytest.approx(other[:alike], rel=near)
        assert mine[alike:] == pytest.approx(other[alike:], rel=0.2)
    assert sum(ours.losses[-3:]) < 0.95 * sum(ours.losses[:3])
    assert ours.gradients.keys() == theirs.gradients.keys()
    for name, gradient in theirs.gradients.items():
        within = 1e-5 if case.precision == "fp32" else 5e-2
        scale = max(float(gradient.abs().max()), 1e-3)
        assert torch.allclose(ours.gradients[name], gradient, rtol=within, atol=within * scale), name
