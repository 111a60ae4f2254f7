"""Feed-forward parts that compute SiLU again give the bits of Transformers' own, and keep one tensor less."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.engines.replicas import ThreadReplicas
from drivetrain.measure.memory import TensorPeak
from drivetrain.memory import offload
from drivetrain.memory.offload import offload_activations
from drivetrain.memory.recompute import apply_recompute, repeated_blocks
from drivetrain.models.llama_form import FORM
from drivetrain.models.swiglu import RecomputedSiLU, keep_silu, recompute_silu

VOCABULARY, BLOCKS, WIDE = 60, 3, 48
SAMPLES, LENGTH = 2, 11
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": WIDE,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "use_cache": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
HOW = ["fp32", "bf16", "autocast"]
Result = tuple[Tensor, dict[str, Tensor]]


def build(kind: str = "llama", **fields: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**{**SIZES, **fields})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def adapted(model: Any, targets: list[str]) -> Any:
    torch.manual_seed(1)
    found: Any = get_peft_model(model, LoraConfig(r=2, target_modules=targets, lora_dropout=0.0))
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return found


def ids() -> Tensor:
    return torch.randint(1, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(2))


def trained(model: nn.Module, how: str = "fp32") -> Result:
    """Returns the logits and the gradients of a loss that depends on each of them."""
    if how == "bf16":
        model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        logits = model(input_ids=ids()).logits
    logits.float().square().mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_bits(found: Result, expected: Result) -> None:
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys() != set()
    for name, gradient in found[1].items():
        assert torch.equal(gradient, expected[1][name]), name
        assert bool(gradient.any()), name


def kept_bytes(model: nn.Module, how: str = "fp32") -> int:
    """Returns the bytes of what autograd keeps of a forward pass, each storage once."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor.detach()

    with saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", enabled=how == "autocast"):
        loss = model(input_ids=ids()).logits.float().square().mean()
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", FORM)
def test_logits_and_gradients_are_transformers_own_to_the_bit(kind: str, how: str) -> None:
    model = build(kind)
    assert recompute_silu(model) == BLOCKS
    assert_same_bits(trained(model, how), trained(build(kind), how))


@pytest.mark.parametrize("how", HOW)
def test_so_they_are_with_adapters_on_all_three_layers(how: str) -> None:
    targets = ["gate_proj", "up_proj", "down_proj"]
    model = adapted(build(), targets)
    assert recompute_silu(model) == BLOCKS
    found = trained(model, how)
    assert len(found[1]) == 2 * 3 * BLOCKS
    assert_same_bits(found, trained(adapted(build(), targets), how))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("selective", [False, True])
def test_so_they_are_where_blocks_recompute(selective: bool, how: str) -> None:
    model = build()
    assert recompute_silu(model) == BLOCKS
    apply_recompute(model, selective)
    assert_same_bits(trained(model, how), trained(build(), how))


def test_so_they_are_where_activations_wait_in_cpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)
    models = [build(), build()]
    recompute_silu(models[0])
    moved = [offload_activations(each, repeated_blocks(each)) for each in models]
    assert_same_bits(trained(models[0]), trained(models[1]))
    assert moved[1].moved_bytes - moved[0].moved_bytes == BLOCKS * SAMPLES * LENGTH * WIDE * 4


def test_replicas_of_a_model_compute_with_their_own_weights() -> None:
    models = [build(), build()]
    recompute_silu(models[0])
    wrapped = [ThreadReplicas(each, 2) for each in models]
    assert_same_bits(trained(wrapped[0]), trained(wrapped[1]))
    assert kept_bytes(ThreadReplicas(models[0], 1)) < kept_bytes(ThreadReplicas(models[1], 1))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_does_the_same_apart_from_the_original(duplicate: Callable[[Any], Any]) -> None:
    model = build()
    recompute_silu(model)
    made = duplicate(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert_same_bits(trained(made), trained(build()))
    assert kept_bytes(made) < kept_bytes(build())


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "size"), [("fp32", 4), ("bf16", 2), ("autocast", 2)])
@pytest.mark.parametrize("kind", FORM)
def test_each_block_keeps_one_tensor_of_its_inner_width_less(kind: str, how: str, size: int) -> None:
    models = [build(kind), build(kind)]
    recompute_silu(models[0])
    if how == "bf16":
        models = [each.to(torch.bfloat16) for each in models]
    found, expected = (kept_bytes(each, how) for each in models)
    assert expected - found == BLOCKS * SAMPLES * LENGTH * WIDE * size


def test_with_adapters_on_all_three_layers_each_block_keeps_as_much_less() -> None:
    targets = ["gate_proj", "up_proj", "down_proj"]
    models = [adapted(build(), targets) for _ in range(2)]
    recompute_silu(models[0])
    assert kept_bytes(models[1]) - kept_bytes(models[0]) == BLOCKS * SAMPLES * LENGTH * WIDE * 4


def test_at_the_peak_of_a_part_alone_there_is_one_tensor_less() -> None:
    """As in the backward pass of a block that recomputes: the gate's gradient takes the memory of that of silu."""
    peaks = []
    for changes in (recompute_silu, lambda _: 0):
        model = build()
        changes(model)
        hidden = torch.randn(256, SIZES["hidden_size"])
        with TensorPeak() as peak:
            model.model.layers[0].mlp(hidden).sum().backward()
        peaks.append(peak.peak_bytes)
    assert peaks[1] - peaks[0] == 256 * WIDE * 4


def test_names_of_weights_and_classes_of_parts_stay() -> None:
    model, plain = build(), build()
    recompute_silu(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    of_model, of_plain = (dict(each.named_modules()) for each in (model, plain))
    assert of_model.keys() == of_plain.keys()
    others = {name for name, each in of_model.items() if type(each) is not type(of_plain[name])}
    assert others == {f"model.layers.{number}.mlp.act_fn" for number in range(BLOCKS)}


def test_what_is_undone_is_as_before() -> None:
    model = build()
    recompute_silu(model)
    keep_silu(model)
    assert [type(each) for each in model.modules()] == [type(each) for each in build().modules()]
    assert kept_bytes(model) == kept_bytes(build())
    assert_same_bits(trained(model), trained(build()))


# --- the plain way ----------------------------------------------------------------------------------------------------


def _doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    del args
    return 2 * output if isinstance(module, RecomputedSiLU | transformers.activations.SiLUActivation) else None


@pytest.mark.parametrize("of_all", [False, True])
def test_a_hook_on_the_activation_gets_its_output(of_all: bool) -> None:
    model, plain = build(), build()
    recompute_silu(model)
    if of_all:
        handles = [register_module_forward_hook(_doubled)]
    else:
        handles = [each.model.layers[1].mlp.act_fn.register_forward_hook(_doubled) for each in (model, plain)]
    try:
        found, expected = (trained(each) for each in (model, plain))
        less = kept_bytes(plain) - kept_bytes(model)
    finally:
        for handle in handles:
            handle.remove()
    assert_same_bits(found, expected)
    assert not torch.equal(found[0], trained(build())[0])
    assert less == (0 if of_all else BLOCKS - 1) * SAMPLES * LENGTH * WIDE * 4


def test_an_activation_that_was_observed_before_stays() -> None:
    model = build()
    model.model.layers[1].mlp.act_fn.register_forward_hook(_doubled)
    model.model.layers[2].mlp.act_fn.forward = torch.sigmoid
    assert recompute_silu(model) == BLOCKS - 2


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_another_activation_stays(activation: str) -> None:
    assert recompute_silu(build(hidden_act=activation)) == 0


def test_models_of_another_form_stay() -> None:
    config = transformers.Gemma2Config(**SIZES, hidden_activation="silu")
    assert recompute_silu(transformers.Gemma2ForCausalLM(config)) == 0


def test_parts_that_compute_something_else_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a Transformers to come."""
    kind: Any = transformers.models.llama.modeling_llama.LlamaMLP
    plain = kind.forward
    others: list[Callable[[Any, Any], Any]] = [
        lambda self, x: self.down_proj(torch.mul(self.act_fn(self.gate_proj(x)), self.up_proj(x))),
        lambda self, x: self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x)),
        lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * self.config.scale),
    ]
    for other in others:
        monkeypatch.setattr(kind, "forward", other)
        assert recompute_silu(build()) == 0
    monkeypatch.setattr(kind, "forward", plain)
    model = build()
    model.model.layers[0].mlp.forward = lambda x: x
    assert recompute_silu(model) == BLOCKS - 1


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("frozen", ["gate_proj", "up_proj"])
def test_where_one_of_the_two_is_frozen_nothing_is_done_in_another_way(frozen: str) -> None:
    """PyTorch keeps no more than two tensors then. Adapters are on the other alone, in the first block's part."""
    [other] = {"gate_proj", "up_proj"} - {frozen}
    models = [adapted(build(num_hidden_layers=1), [other]) for _ in range(2)]
    recompute_silu(models[0])
    assert kept_bytes(models[0]) == kept_bytes(models[1])
    seen = []
    for model in models:
        with Operators() as operators:
            trained(model)
        seen.append(Counter(operators.seen))
    assert seen[0] == seen[1]


def test_without_gradients_the_activation_is_a_tensor() -> None:
    model = build()
    recompute_silu(model)
    activation, gate = model.model.layers[0].mlp.act_fn, torch.randn(3, WIDE)
    expected = nn.functional.silu(gate)
    assert torch.equal(activation(gate), expected)
    with torch.no_grad():
        assert torch.equal(activation(gate.requires_grad_()), expected)


def test_compiled_code_has_the_plain_one() -> None:
    model = build()
    recompute_silu(model)
    part = model.model.layers[0].mlp
    compiled = torch.compile(part, backend="aot_eager", fullgraph=True)
    hidden = torch.randn(3, SIZES["hidden_size"])
    torch.testing.assert_close(compiled(hidden), part(hidden))
    compiled(hidden).sum().backward()
    found = part.gate_proj.weight.grad.clone()
    part.zero_grad()
    part(hidden).sum().backward()
    torch.testing.assert_close(found, part.gate_proj.weight.grad)
