"""Against the published table of NF4, plain linear layers of the weights that the codes stand for, and PEFT's LoRA."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from drivetrain.config.quantised import QuantisedBase, quantised_base_problems
from drivetrain.engines.fsdp import TORCH, shard
from drivetrain.errors import UserError
from drivetrain.memory.recompute import apply_recompute
from drivetrain.models.quantised_base import QuantisedLinear, quantise
from tests.ranks import RankPool

pytest.importorskip("bitsandbytes")
pytest.importorskip("torchao")

# Dettmers et al. 2023, appendix E
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
SINGLE, DOUBLE = QuantisedBase(format="nf4", double=False), QuantisedBase(format="nf4")
INT8 = QuantisedBase(format="int8")
INT4, TORCHAO = QuantisedBase(format="int4", group_size=32), QuantisedBase(format="int8-torchao")
FORMATS = {"nf4": SINGLE, "nf4 double": DOUBLE, "int8": INT8, "int4": INT4, "int8-torchao": TORCHAO}
Pools = Callable[[int], RankPool]
each_format = pytest.mark.parametrize("config", FORMATS.values(), ids=FORMATS)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Network(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, 20, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.pooled(ids))
        return logits

    def pooled(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x


def network() -> Network:
    torch.manual_seed(0)
    return Network()


def linear(inputs: int = 96, outputs: int = 80, bias: bool = True) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(inputs, outputs, bias)


def quantised(plain: nn.Linear, config: QuantisedBase) -> QuantisedLinear:
    model = nn.Sequential(copy.deepcopy(plain))
    quantise(model, config)
    (layer,) = model
    assert isinstance(layer, QuantisedLinear)
    return layer


def with_its_weights(layer: QuantisedLinear) -> nn.Linear:
    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    plain.weight.data = layer.dequantize()
    if layer.bias is not None:
        plain.bias.data = layer.bias.detach().clone()
    return plain


def bytes_of(layer: QuantisedLinear) -> int:
    return layer.weight.nbytes + layer.scales.nbytes


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(96, 80), (64, 3), (50, 7)])
def test_nf4_weights_are_the_nearest_of_the_published_table_times_the_largest_of_their_block(
    shape: tuple[int, int],
) -> None:
    plain = linear(*shape)
    flat = plain.weight.detach().flatten()
    blocks = F.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    table = torch.tensor(NF4)
    nearest = table[((blocks / largest)[..., None] - table).abs().argmin(-1)]
    expected = (nearest * largest).flatten()[: len(flat)].view_as(plain.weight)
    torch.testing.assert_close(quantised(plain, SINGLE).dequantize(), expected, rtol=1e-6, atol=0)


def test_double_quantisation_changes_scales_by_less_than_a_fiftieth_of_their_spread() -> None:
    plain = linear(640, 512)
    single, double = (quantised(plain, config).dequantize() for config in (SINGLE, DOUBLE))
    largest = plain.weight.detach().view(-1, 64).abs().amax(1)
    off = (double - single).view(-1, 64).abs().amax(1)  # in each block some weight is its scale, or minus that
    assert 0 < off.max() < (largest - largest.mean()).abs().max() / 50


def test_int8_weights_are_whole_steps_of_a_127th_of_the_largest_of_their_row() -> None:
    plain = linear()
    half = plain.weight.detach().half().float()
    step = half.abs().amax(1, keepdim=True) / 127
    found = quantised(plain, INT8).dequantize()
    torch.testing.assert_close(found / step, (found / step).round(), rtol=0, atol=1e-4)
    assert (found - half).abs().max() <= 0.51 * step.max()


@pytest.mark.parametrize("config", [SINGLE, DOUBLE], ids=["nf4", "nf4 double"])
def test_nf4_codes_and_weights_are_those_of_bitsandbytes_own_layer(config: QuantisedBase) -> None:
    import bitsandbytes as bnb

    plain = linear(128)  # rows of another length, bitsandbytes itself gets wrong on some CPUs
    layer = quantised(plain, config)
    theirs = bnb.nn.Params4bit(plain.weight.detach(), compress_statistics=config.double, quant_type="nf4").to("cpu")
    assert torch.equal(layer.weight, theirs.data)
    assert torch.equal(layer.dequantize(), bnb.functional.dequantize_4bit(theirs.data, theirs.quant_state))


def test_int8_codes_are_those_of_bitsandbytes_own_layer() -> None:
    import bitsandbytes as bnb

    theirs = bnb.nn.Int8Params(linear().weight.detach(), requires_grad=False).to("cpu")
    assert torch.equal(quantised(linear(), INT8).weight, theirs.data)


def test_bytes_are_those_of_the_closed_forms() -> None:
    weights = 1024 * 768
    per_weight = {"nf4": 1 / 2 + 4 / 64, "nf4 double": 1 / 2 + 1 / 64 + 4 / (64 * 256), "int8": 1 + 4 / 768}
    per_weight |= {"int4": 1 / 2 + 5 / 32, "int8-torchao": 1 + 4 / 768}
    for name, expected in per_weight.items():
        assert bytes_of(quantised(linear(768, 1024), FORMATS[name])) == pytest.approx(expected * weights, rel=1e-4)


def gradients(found: Sequence[tuple[Any, Tensor]]) -> list[Any]:
    return [given.grad for _, given in found]


# --- a layer ---------------------------------------------------------------------------------------------------------


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_and_gradients_are_those_of_a_plain_layer_of_the_same_weights(
    config: QuantisedBase, dtype: torch.dtype
) -> None:
    layer = quantised(linear(), config).to(dtype)
    plain = with_its_weights(layer).to(dtype)
    x = torch.randn(2, 5, 96, dtype=dtype)
    found = [(one, x.clone().requires_grad_()) for one in (layer, plain)]
    outputs = [one(given) for one, given in found]
    for output in outputs:
        output.backward(torch.ones_like(output) / 7)
    assert torch.equal(*outputs)
    assert outputs[0].dtype is dtype
    assert torch.equal(*gradients(found))
    torch.testing.assert_close(layer.bias.grad, plain.bias.grad)
    assert layer.weight.grad is None
    assert layer.scales.grad is None


@each_format
def test_autocast_computes_in_its_dtype_as_a_plain_layer_does(
    config: QuantisedBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = quantised(linear(), config)
    plain = with_its_weights(layer)
    found = [(one, torch.ones(3, 96).cumsum(1).div(96).requires_grad_()) for one in (layer, plain)]
    made: list[torch.dtype] = []
    unpacked = type(layer).unpacked

    def noted(self: Any, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        made.append(dtype)
        return unpacked(self, codes, scales, dtype)

    monkeypatch.setattr(type(layer), "unpacked", noted)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = [one(given) for one, given in found]
    assert outputs[0].dtype is torch.bfloat16
    assert torch.equal(*outputs)
    for output in outputs:
        output.sum().backward()
    assert torch.equal(*gradients(found))
    assert made == [torch.bfloat16] * 2  # no fp32 copy on the way


@each_format
def test_no_change_of_dtype_touches_what_is_packed(config: QuantisedBase) -> None:
    layer = quantised(linear(), config)
    before = layer.dequantize()
    layer.to(torch.bfloat16).half().to("cpu", torch.float64)
    assert torch.equal(layer.dequantize(), before)
    assert layer.bias.dtype is torch.float64
    assert not layer.weight.is_floating_point()
    assert not layer.scales.is_floating_point()


@each_format
def test_evaluation_computes_what_training_does(config: QuantisedBase) -> None:
    layer, x = quantised(linear(128, 128), config), torch.randn(4, 128)
    trained = layer(x.requires_grad_()).detach()
    layer.eval()
    with torch.no_grad():
        assert torch.equal(layer(x), trained)
    assert torch.equal(layer.train()(x), trained)


@each_format
def test_no_whole_weight_is_kept_for_the_backward_pass(config: QuantisedBase) -> None:
    kept: list[Tensor] = []
    layer = quantised(linear(), config)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.randn(3, 96, requires_grad=True))
    assert sum(t.nbytes for t in kept) == bytes_of(layer)


@each_format
def test_weights_saved_by_one_layer_are_loaded_by_another(config: QuantisedBase) -> None:
    layer, other = quantised(linear(), config), quantised(nn.Linear(96, 80), config)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.dequantize(), layer.dequantize())
    assert torch.equal(copy.deepcopy(other).dequantize(), layer.dequantize())


@each_format
def test_a_layer_without_numbers_is_laid_out_as_one_with_them(
    config: QuantisedBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bitsandbytes.functional

    for inputs in (96, 64 if config.format == "int4" else 51):
        layer = quantised(linear(inputs, 33), config)
        with torch.device("meta"), monkeypatch.context() as patched:
            for name in ("quantize_4bit", "int8_vectorwise_quant"):  # whose tables would be made without numbers
                patched.delattr(bitsandbytes.functional, name)
            empty = quantised(nn.Linear(inputs, 33), config)
        held = {name: (p.shape, p.dtype) for name, p in layer.named_parameters()}
        assert {name: (p.shape, p.dtype) for name, p in empty.named_parameters()} == held
        assert all(p.is_meta for p in empty.parameters())


# 2026-11, torch 2.13: its compiler, of any autograd.Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
# aot_eager runs the graphs, forward and backward, that inductor makes C++ of: that is half a minute of a compiler's
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@each_format
def test_compile_leaves_outputs_and_gradients(config: QuantisedBase, backend: str) -> None:
    torch.compiler.reset()  # what tests before compiled counts towards the limit
    layer = quantised(linear(), config)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    found = [(one, torch.ones(3, 96).cumsum(1).requires_grad_()) for one in (layer, compiled)]
    outputs = [one(x) for one, x in found]
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*gradients(found))


# --- a model ---------------------------------------------------------------------------------------------------------


def test_all_linear_layers_are_replaced_but_those_to_skip_and_within_them() -> None:
    model = network()
    names = quantise(model, DOUBLE, ["head", "blocks.1"])
    assert names == ["blocks.0.up", "blocks.0.down"]
    found = [name for name, module in model.named_modules() if isinstance(module, QuantisedLinear)]
    assert found == names
    assert isinstance(model.embedding.weight, nn.Parameter)
    assert {p.dtype for p in model.blocks[1].parameters()} == {torch.float32}


def test_a_name_skips_no_other_that_begins_alike() -> None:
    model = nn.Sequential()
    model.add_module("up", nn.Linear(4, 4))
    model.add_module("up2", nn.Linear(4, 4))
    assert quantise(model, INT8, ["up"]) == ["up2"]


def test_tied_weights_and_the_layers_of_attention_stay_as_they_are() -> None:
    model = network()
    model.head.weight = model.embedding.weight
    attention = nn.MultiheadAttention(96, 4)
    model.add_module("attention", attention)
    assert "head" not in quantise(model, DOUBLE)
    assert model.head.weight is model.embedding.weight
    attention(*[torch.randn(2, 96)] * 3)


def test_a_layer_in_two_places_stays_one() -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert quantise(model, INT8) == ["0", "2"]
    assert model[0] is model[2]


def test_whole_weights_are_given_up_one_layer_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    weights = [weakref.ref(m.weight) for m in model.blocks.modules() if isinstance(m, nn.Linear)]
    whole: list[int] = []
    given: Any = QuantisedLinear.__init__

    def counted(self: QuantisedLinear, *args: Any) -> None:
        given(self, *args)
        gc.collect()
        whole.append(sum(weight() is not None for weight in weights))

    monkeypatch.setattr(QuantisedLinear, "__init__", counted)
    quantise(model, DOUBLE, ["head"])
    assert whole == [4, 3, 2, 1]


def test_a_model_without_linear_layers_and_weights_that_are_not_finite_are_refused() -> None:
    with pytest.raises(UserError, match=r"quantised_base: Sequential has no linear layers to quantise"):
        quantise(nn.Sequential(nn.Embedding(3, 4)), DOUBLE)
    broken = network()
    broken.get_parameter("blocks.0.up.weight").data[0, 0] = math.nan
    with pytest.raises(UserError, match=r"quantised_base: blocks.0.up has weights that are not finite"):
        quantise(broken, DOUBLE, ["head"])


def test_no_adapters_and_a_key_of_the_other_format_are_reported_at_once() -> None:
    base = QuantisedBase.model_validate({"format": "int8", "double": False})
    problems = list(quantised_base_problems(base, has_adapter=False))
    assert [problem.field for problem in problems] == ["quantised_base", "quantised_base.double"]
    assert problems[0].why.endswith("without an adapter nothing would be trained")
    assert not list(quantised_base_problems(DOUBLE, has_adapter=True))


# --- under PEFT's adapters and over ranks ----------------------------------------------------------------------------


def adapted(config: QuantisedBase, **options: Any) -> nn.Module:
    from peft import LoraConfig, inject_adapter_in_model

    model = network()
    quantise(model, config, ["head"])
    return with_adapters(model, inject_adapter_in_model, LoraConfig(r=4, target_modules=["up", "down"], **options))


def with_adapters(model: nn.Module, inject: Any, config: Any) -> nn.Module:
    model.requires_grad_(False)
    inject(config, model)
    draw = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_A" in name or "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=draw) / 10
    return model


def weights_of(layer: Any) -> Tensor:
    assert isinstance(layer, QuantisedLinear)
    return layer.dequantize()


def unquantised(model: nn.Module, **options: Any) -> nn.Module:
    """Plain layers of the weights that the codes stand for, under the same adapters."""
    from peft import LoraConfig, inject_adapter_in_model

    plain = network()
    modules = dict(model.named_modules())
    for name, module in plain.blocks.named_modules():
        if isinstance(module, nn.Linear):
            module.weight.data = weights_of(modules[f"blocks.{name}.base_layer"])
    return with_adapters(plain, inject_adapter_in_model, LoraConfig(r=4, target_modules=["up", "down"], **options))


IDS = torch.arange(64).view(4, 16) * 7 % 20


def trained(model: nn.Module, forward: nn.Module, ids: Tensor, world: int = 1) -> tuple[list[float], list[Tensor]]:
    """Losses of four steps of SGD, over all ranks, and the gradients of the first."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses, first = [], []
    for step in range(4):
        loss = F.cross_entropy(forward(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        if not step:
            first = [whole(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        if world > 1:
            dist.all_reduce(mean)
        losses.append(float(mean))
    return losses, first


def alone(model: nn.Module) -> tuple[list[float], list[Tensor]]:
    return trained(model, model, IDS)


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@each_format
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_over_codes_train_as_over_plain_layers_of_the_same_weights(config: QuantisedBase, dora: bool) -> None:
    model = adapted(config, use_dora=dora)
    plain = unquantised(model, use_dora=dora)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses, first = alone(model)
    expected = alone(plain)
    assert losses == pytest.approx(expected[0], rel=1e-6)
    torch.testing.assert_close(first, expected[1])
    assert losses[-1] < losses[0]
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "lora_" in name}


@each_format
@pytest.mark.parametrize("selective", [False, True], ids=["full", "selective"])
def test_recompute_leaves_losses_and_gradients(config: QuantisedBase, selective: bool) -> None:
    model, recomputing = adapted(config), adapted(config)
    apply_recompute(recomputing, selective)
    expected, found = alone(model), alone(recomputing)
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)


@each_format
def test_adapters_go_on_over_a_base_that_is_quantised_anew_to_the_same_bits(config: QuantisedBase) -> None:
    model = adapted(config)
    alone(model)
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items() if "lora_" in name}
    again = adapted(config)
    again.load_state_dict(saved, strict=False)
    (losses, first), (expected, expected_first) = alone(again), alone(model)
    assert losses == expected
    assert all(map(torch.equal, first, expected_first))


def test_ranks_train_as_one_process_does_and_share_the_base(ranks: Pools) -> None:
    expected = {name: alone(adapted(config)) for name, config in FORMATS.items()}
    for found in ranks(2).run(on_a_rank):
        for name, engine, losses, first, held in found:
            assert losses == pytest.approx(expected[name][0], rel=1e-5), (name, engine)
            torch.testing.assert_close(first, expected[name][1], rtol=1e-5, atol=1e-7)
            assert held == pytest.approx(0.5 if engine == "fsdp" else 1.0, rel=0.02), (name, engine)


def on_a_rank() -> list[tuple[str, str, list[float], list[Tensor], float]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for name, config in FORMATS.items():
        for engine in ("ddp", "fsdp"):
            model = adapted(config)
            bases = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
            total = sum(map(bytes_of, bases))
            forward = DistributedDataParallel(model) if engine == "ddp" else sharded(model, MixedPrecisionPolicy())
            losses, first = trained(model, forward, IDS.chunk(world)[rank], world)
            held = sum(p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for p in packed(bases))
            found.append((name, engine, losses, first, held / total))
    return found


def sharded(model: nn.Module, policy: MixedPrecisionPolicy) -> nn.Module:
    settings = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), "mp_policy": policy}
    for block in model.get_submodule("blocks").children():
        shard(block, settings)
    shard(model, settings)
    return model


def packed(bases: list[QuantisedLinear]) -> Iterator[Any]:
    for base in bases:
        yield base.weight
        yield base.scales


@pytest.mark.skipif(TORCH < (2, 13), reason="torch before 2.13 casts codes, and the engine refuses it")
def test_copies_of_parameters_in_16_bits_leave_the_codes(ranks: Pools) -> None:
    for found in ranks(2).run(in_16_bits):
        for name, (losses, expected) in found.items():
            assert losses == pytest.approx(expected, rel=3e-4), name  # one weight may round to the other neighbour


def in_16_bits() -> dict[str, tuple[list[float], list[float]]]:
    """Losses of two ranks, and of plain PyTorch in the same process, as kernels and so rounding depend on it."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, config in FORMATS.items():
        model = sharded(adapted(config), policy)
        found[name] = trained(model, model, IDS.chunk(world)[rank], world)[0], InHalves(adapted(config)).losses()
    return found


class InHalves(nn.Module):
    """Plain PyTorch for FSDP's 16 bits: each rank's samples by themselves, by bf16 copies of fp32 parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def losses(self) -> list[float]:
        return trained(self, self, IDS)[0]

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([self._with_copies(half) for half in ids.chunk(2)])

    def _with_copies(self, ids: Tensor) -> Tensor:
        copies = {name: p.bfloat16() if p.is_floating_point() else p for name, p in self.model.named_parameters()}
        return torch.func.functional_call(self.model, copies, ids).float()
