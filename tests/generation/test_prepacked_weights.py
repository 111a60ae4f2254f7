"""Layers that multiply by prepacked copies of their weights give what they gave before, and notice a new weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.pytorch_utils import Conv1D

from drivetrain.generation import packed_products, prepacked_weights
from drivetrain.generation.prepacked_weights import Joined, Product, prepack, prepacked
from drivetrain.models.language_head import TargetHead

LLAMA = LlamaConfig(
    vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True, attention_bias=True,
)  # fmt: skip
GPT2 = GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4)


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacked_weights, "LEAST", 1)


def layers(model: nn.Module) -> list[nn.Module]:
    """Returns the layers that have a prepacked copy."""
    return [layer for layer in model.modules() if "forward" in vars(layer)]


def seeded(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(*modules).requires_grad_(False)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_those_without(config: LlamaConfig | GPT2Config, dtype: torch.dtype) -> None:
    """oneDNN packs no bf16 for processors without AVX-512: there the weights are used as they lie."""
    packs = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    torch.manual_seed(0)
    kind = LlamaForCausalLM if isinstance(config, LlamaConfig) else GPT2LMHeadModel
    model = kind(config).to(dtype).eval()
    ids = torch.arange(12).reshape(3, 4)
    with torch.inference_mode():
        expected = model(ids).logits
    with prepacked(model), torch.inference_mode():
        linear = [each for each in model.modules() if isinstance(each, nn.Linear | Conv1D)]
        assert len(layers(model)) == (len(linear) if packs else 0)
        found = model(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_inputs_of_any_shape_and_order_are_taken() -> None:
    torch.manual_seed(0)
    model = seeded(nn.Linear(40, 50), nn.Linear(50, 30, bias=False))
    given = torch.randn(2, 3, 5, 40)
    for each in (given, given[0, 0], given[0, 0, 0], given.transpose(0, 2), given[:0]):
        with prepacked(model):
            found = model(each)
        torch.testing.assert_close(found, model(each), rtol=0, atol=1e-5)


def test_under_autocast_products_are_in_its_dtype() -> None:
    torch.manual_seed(0)
    model, given = seeded(nn.Linear(64, 64)), torch.randn(3, 64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(given)
        with prepacked(model):
            found = model(given)
    assert (found.dtype, expected.dtype) == (torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-2)
    with prepacked(model), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model(given).dtype == torch.bfloat16, "prepacked in fp32, and used under autocast"


@pytest.mark.parametrize("change", ["in place", "of its data", "of the bias"])
def test_a_layer_whose_weight_has_changed_uses_the_new_one(change: str) -> None:
    model, given = seeded(nn.Linear(8, 8)), torch.randn(3, 8)
    with prepacked(model), torch.no_grad():
        if change == "in place":
            model[0].weight.mul_(2)
        elif change == "of its data":
            model[0].weight.data = torch.ones(8, 8)
        else:
            model[0].bias.data = torch.ones(8)
        found = model(given)
    assert torch.equal(found, nn.functional.linear(given, model[0].weight, model[0].bias))


def test_where_gradients_are_wanted_they_are_those_of_the_layer() -> None:
    model, given = nn.Sequential(nn.Linear(8, 8)), torch.randn(3, 8)
    with prepacked(model):
        model(given).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, given.sum(0).expand(8, 8))


def test_nothing_is_left_behind() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    before = [*model.state_dict()]
    with prepacked(model):
        assert len(layers(model)) == 1
        undo = prepack(model)
        undo()
        assert len(layers(model)) == 1, "an inner use, which found the layer taken, does not end the outer one"
    assert not layers(model)
    assert [*model.state_dict()] == before


def test_copies_take_no_more_than_their_share_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(*(nn.Linear(16, 16) for _ in range(8)))
    one = 16 * 16 * 4
    monkeypatch.setattr(prepacked_weights, "attainable_memory", lambda: 3.5 * one / prepacked_weights.SHARE)
    with prepacked(model):
        assert len(layers(model)) == 3


def test_a_weight_of_two_layers_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = nn.Linear(16, 16), nn.Linear(16, 16)
    two.weight = one.weight
    monkeypatch.setattr(prepacked_weights, "attainable_memory", lambda: 1.5 * 16 * 16 * 4 / prepacked_weights.SHARE)
    given = torch.randn(2, 16)
    with torch.no_grad(), prepacked(seeded(one, two)):
        assert ["forward" in vars(each) for each in (one, two)] == [True, True]
        torch.testing.assert_close(two(given) - two.bias, one(given) - one.bias)


def test_a_build_of_pytorch_without_these_kernels_goes_on_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(weight: Tensor, rows: int) -> Tensor:
        del weight, rows
        raise RuntimeError("not built")

    model = seeded(nn.Linear(16, 16))
    monkeypatch.setattr(packed_products, "_prefers_mkl", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", missing, raising=False)
    with prepacked(model):
        assert not layers(model)


def attention(bias: bool = True) -> LlamaAttention:
    torch.manual_seed(0)
    config = LlamaConfig(**{**LLAMA.to_dict(), "attention_bias": bias})
    return LlamaAttention(config, 0).requires_grad_(False)


def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets the number of rows of each product by a copy."""
    found: list[int] = []
    plain = Product.times

    def counted(self: Product, given: Tensor) -> Tensor:
        found.append(len(given))
        return plain(self, given)

    monkeypatch.setattr(Product, "times", counted)
    return found


@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_one_input_multiply_at_once(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    block, given = attention(bias), torch.randn(5, 64)
    layers = block.q_proj, block.k_proj, block.v_proj
    expected = [layer(given) for layer in layers]
    counted = products(monkeypatch)
    with prepacked(block), torch.no_grad():
        found = [layer(given) for layer in layers]
        torch.testing.assert_close(Joined(layers)(given), torch.cat(expected, -1), rtol=0, atol=1e-5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert counted == [5, 5], "one product for the three layers, and one for them joined"


def test_layers_that_get_other_inputs_after_all_give_their_own_products() -> None:
    block = attention()
    one, other = torch.randn(5, 64), torch.randn(2, 64)
    layers = block.q_proj, block.k_proj, block.v_proj, block.q_proj, block.q_proj, block.v_proj
    inputs = one, other, one, one, other, other
    with torch.no_grad():
        expected = [layer(given) for layer, given in zip(layers, inputs, strict=True)]
        with prepacked(block):
            found = [layer(given) for layer, given in zip(layers, inputs, strict=True)]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_layers_of_one_input_notice_a_new_weight_of_any(name: str) -> None:
    block, given = attention(), torch.randn(5, 64)
    layers = block.q_proj, block.k_proj, block.v_proj
    with prepacked(block), torch.no_grad():
        getattr(block, name).weight.mul_(2)
        found, joined = [layer(given) for layer in layers], Joined(layers)(given)
    expected = [nn.functional.linear(given, layer.weight, layer.bias) for layer in layers]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(joined, torch.cat(expected, -1))


def test_what_one_layer_got_is_not_given_to_the_next_once_it_has_changed() -> None:
    block, given = attention(), torch.randn(5, 64)
    with prepacked(block), torch.no_grad():
        first = block.q_proj(given)
        first.zero_()
        torch.testing.assert_close(block.q_proj(given), plain(block.q_proj, given), rtol=0, atol=1e-5)
        given.mul_(2)
        for layer in (block.q_proj, block.k_proj):
            torch.testing.assert_close(layer(given), plain(layer, given), rtol=0, atol=1e-5)
        given.mul_(2)
        torch.testing.assert_close(block.v_proj(given), plain(block.v_proj, given), rtol=0, atol=1e-5)
        block.q_proj(given)
        block.k_proj.weight.mul_(2)
        torch.testing.assert_close(block.k_proj(given), plain(block.k_proj, given), rtol=0, atol=1e-5)
        block.q_proj(given)
    with prepacked(block):
        with torch.no_grad():
            block.q_proj(given)
        block.k_proj.weight.requires_grad_()
        assert block.k_proj(given).requires_grad


def plain(layer: Any, given: Tensor) -> Tensor:
    return nn.functional.linear(given, layer.weight, layer.bias)


def test_a_layer_that_another_has_taken_the_place_of_is_not_joined_with_the_rest() -> None:
    block, given = attention(), torch.randn(5, 64)
    with prepacked(block), torch.no_grad():
        layers = [block.q_proj, nn.Linear(64, 32), block.v_proj]
        expected = torch.cat([plain(layer, given) for layer in layers], -1)
        torch.testing.assert_close(Joined(layers)(given), expected, rtol=0, atol=1e-5)
    block.k_proj = block.v_proj
    with prepacked(block), torch.no_grad():
        torch.testing.assert_close(block.k_proj(given), plain(block.v_proj, given), rtol=0, atol=1e-5)


def test_a_weight_that_is_no_parameter_or_is_taken_away_is_read_as_it_is() -> None:
    layer, given = nn.Linear(16, 16), torch.randn(3, 16)
    weight = layer.weight.detach()
    del layer.weight
    layer.register_buffer("weight", weight)
    with prepacked(seeded(layer)), torch.no_grad():
        torch.testing.assert_close(layer(given), plain(layer, given), rtol=0, atol=1e-5)
    with prepacked(model := nn.Sequential(nn.Linear(16, 16))), torch.no_grad():
        nn.utils.parametrize.register_parametrization(model[0], "weight", Doubled())
        torch.testing.assert_close(model(given), plain(model[0], given), rtol=0, atol=1e-5)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_two_layers_of_which_one_has_the_first_rows_of_the_others_weight_keep_their_sizes() -> None:
    one, two, given = nn.Linear(16, 24, bias=False), nn.Linear(16, 8, bias=False), torch.randn(3, 16)
    two.weight = nn.Parameter(one.weight.detach()[:8])
    with prepacked(seeded(one, two)), torch.no_grad():
        assert (one(given).shape, two(given).shape) == ((3, 24), (3, 8))


def test_a_hook_of_a_layer_runs_where_layers_are_joined() -> None:
    block, given = attention(), torch.randn(5, 64)
    layers = block.q_proj, block.k_proj, block.v_proj
    block.k_proj.register_forward_pre_hook(lambda _, given: given[0] * 0)
    block.k_proj.bias.zero_()
    with prepacked(block), torch.no_grad():
        joined = Joined(layers)(given)
    assert joined[:, 64:96].abs().max() == 0 < joined[:, :64].abs().max()


@pytest.mark.parametrize("fused", [True, False])
def test_a_model_that_a_loss_is_computed_with_has_copies_of_all_layers(
    monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    """The head computes losses itself then, and hooks of it and of the last block wait for the places of a loss."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LLAMA).eval()
    head, targets = TargetHead(model, fused), torch.tensor([[-100, -100, 7, 8]])
    ids, counted = torch.arange(4)[None], products(monkeypatch)
    joined = [Joined([model.lm_head]), Joined([model.model.layers[-1].self_attn.o_proj])]
    with torch.no_grad():
        expected, loss = model(ids).logits, head.loss_sum(model, {"input_ids": ids}, targets)
        assert not counted
        with prepacked(model):
            torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-5)
            assert len(counted) == 2 * 4 + 1, "layers of one input are one product"
            assert not any(each.has_hooks for each in joined)
            torch.testing.assert_close(head.loss_sum(model, {"input_ids": ids}, targets), loss)
        model.lm_head.register_forward_hook(lambda *given: given[2])
    assert [each.has_hooks for each in joined] == [True, False]


def test_only_transformers_own_blocks_are_known_to_share_an_input() -> None:
    block = nn.Module()
    for name in ("q_proj", "k_proj", "v_proj"):
        block.register_module(name, nn.Linear(8, 8))
    with prepacked(block), torch.no_grad():
        found = block.q_proj(given := torch.randn(3, 8))
        block.q_proj(given).add_(1)  # a block of one's own may change what it got
    assert found.is_contiguous()
    assert not isinstance(vars(block.q_proj).get("forward"), prepacked_weights._Sibling)


class Unlike(nn.Linear):
    """A layer whose forward pass is its own, as that of a quantised one."""


def test_a_layer_of_the_users_that_bears_the_name_of_another_is_left_alone() -> None:
    class Conv1D(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    model, given = seeded(Conv1D(8, 8)), torch.randn(3, 8)
    expected = model(given)
    with prepacked(model), torch.no_grad():
        assert torch.equal(model(given), expected)


def test_layers_that_are_no_plain_ones_are_left_alone() -> None:
    meta = nn.Linear(16, 16, device="meta")
    half = nn.Linear(16, 16, dtype=torch.float16)
    with prepacked(model := nn.Sequential(Unlike(16, 16), nn.Embedding(16, 16), meta, half)):
        assert not layers(model)
