"""Recompute: same gradients, dropout included, from fewer kept activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import varlen
from torch.utils.checkpoint import CheckpointPolicy
from transformers import AutoConfig, AutoModelForSequenceClassification, ResNetConfig, ResNetForImageClassification

from drivetrain.errors import UserError
from drivetrain.measure.flops import FlopCount
from drivetrain.memory.recompute import _policy, apply_recompute, beside_selective, repeated_blocks


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 16))


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Sequential(*(block() for _ in range(6))), nn.Linear(16, 2))


def gradients_and_kept(model: nn.Module) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients by name, and the bytes that the forward pass keeps for the backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(1)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(torch.randn(32, 4, generator=torch.Generator().manual_seed(2))).square().sum()
    size = sum(kept.values())
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, size


def test_gradients_are_the_same_and_less_is_kept() -> None:
    plain, kept = gradients_and_kept(deep())
    model = deep()
    assert apply_recompute(model) == 6
    recomputed, kept_less = gradients_and_kept(model)
    assert plain.keys() == recomputed.keys()
    for name, gradient in plain.items():
        assert torch.equal(gradient, recomputed[name]), name
    assert kept_less < 0.5 * kept


def flops(model: nn.Module) -> int:
    with FlopCount() as counted:
        gradients_and_kept(model)
    return counted.total


# 2026-11, torch 2.15: what this test looks at will change with a later version
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
def test_selective_recompute_multiplies_no_matrix_twice_and_keeps_less() -> None:
    plain, kept = gradients_and_kept(deep())
    full, selective = deep(), deep()
    apply_recompute(full)
    apply_recompute(selective, selective=True)
    found, _ = gradients_and_kept(selective)
    for name, gradient in plain.items():
        assert torch.equal(gradient, found[name]), name
    assert flops(selective) == flops(deep())
    assert flops(full) > 1.1 * flops(deep())
    # the checkpoint's own keeping of products is not seen by the hooks; what else there was is not kept
    assert gradients_and_kept(selective)[1] < 0.5 * kept


def test_selective_recompute_keeps_attention_over_packed_rows_and_products_in_8_bits() -> None:
    assert varlen.varlen_attn is not None, "what registers the operator"
    kept = [torch.ops.torch_attn._varlen_attn.default, torch.ops.aten._scaled_mm.default]
    cheap = [torch.ops.aten.mul.Tensor, torch.ops.aten.gelu.default]
    assert [_policy(None, operator) for operator in kept] == [CheckpointPolicy.MUST_SAVE] * 2
    assert [_policy(None, operator) for operator in cheap] == [CheckpointPolicy.PREFER_RECOMPUTE] * 2


def test_blocks_of_transformers_models_are_found() -> None:
    bert = AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model(
            "bert", vocab_size=9, hidden_size=8, num_hidden_layers=3, num_attention_heads=1, intermediate_size=8
        )
    )
    assert [type(found).__name__ for found in repeated_blocks(bert)] == ["BertLayer"] * 3
    resnet = ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[2, 2], layer_type="basic")
    )
    assert len(repeated_blocks(resnet)) >= 2


def test_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="no repeated blocks"):
        apply_recompute(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo asks for it
@pytest.mark.parametrize("selective", [False, True])
def test_blocks_that_recompute_are_compiled_once_and_for_all(selective: bool) -> None:
    """Behind a partial of torch's own checkpoint they would not be, silently."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)) for _ in range(10)))

    graphs: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    model, plain = made(), made()
    apply_recompute(model, selective)
    for part in model.children():
        part.compile(backend=counting)
    found, expected = gradients_and_kept(model)[0], gradients_and_kept(plain)[0]
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)
    assert len(graphs) == 2  # the first block's input asks for no gradient


class Gathered(nn.Module):
    """A block whose weight an engine joins from two parts: once in its first pass, twice in the second."""

    def __init__(self, gather: Any) -> None:
        super().__init__()
        self.parts = nn.Parameter(torch.randn(2, 8, 16))
        self.gather, self.passes = gather, 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        for _ in range(self.passes):
            self.gather(self.parts.detach())
        left, right = (hidden @ torch.cat(tuple(self.parts))).chunk(2, dim=-1)
        return torch.cat((right, left), dim=-1)


def test_selective_recompute_does_not_see_what_an_engine_does_among_a_blocks_operations() -> None:
    def gather(parts: torch.Tensor) -> torch.Tensor:
        return torch.cat(tuple(parts))

    def gradient(do: Any, selective: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(*(Gathered(do) for _ in range(2)))
        if selective:
            apply_recompute(nn.Sequential(model), selective=True, blocks=[*model])
        model(torch.ones(3, 16)).square().sum().backward()
        return torch.cat([p.grad for p in model.parameters() if p.grad is not None])

    with pytest.raises(RuntimeError, match="not found in storage"):
        gradient(gather, selective=True)
    torch.testing.assert_close(gradient(beside_selective(gather), True), gradient(gather, False))
