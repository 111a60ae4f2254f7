"""FLOPs, against closed forms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import varlen

from drivetrain.measure import flops
from drivetrain.measure.flops import FlopCount
from drivetrain.measure.memory import TensorPeak
from tests.device import chosen_device

pytestmark = pytest.mark.usefixtures("on_device")


def test_a_linear_layer_takes_two_operations_a_weight_and_sample_forward_and_four_backward() -> None:
    layer, inputs = nn.Linear(32, 64), torch.randn(8, 32, requires_grad=True)
    with FlopCount() as count:
        layer(inputs).sum().backward()
    assert count.total == 3 * 2 * 8 * 32 * 64


def test_a_convolution_is_counted_by_its_output() -> None:
    with FlopCount() as count, torch.no_grad():
        nn.Conv2d(3, 16, 3, padding=1)(torch.randn(2, 3, 10, 10))
    assert count.total == 2 * 2 * 16 * 10 * 10 * 3 * 3 * 3


def test_the_cpus_fused_attention_is_counted() -> None:
    batch, heads, length, width = 2, 4, 16, 8
    query = torch.randn(batch, heads, length, width, requires_grad=True)
    forward = 2 * 2 * batch * heads * length * length * width  # query times key, then weights times value
    with FlopCount() as count:
        attended = nn.functional.scaled_dot_product_attention(query, query, query)
    assert count.total == forward
    with FlopCount() as count:
        attended.sum().backward()
    assert count.total == 5 * forward // 2  # five products, one of them the scores made again


def test_counts_inside_the_memory_meter_are_the_same() -> None:
    layer, inputs = nn.Linear(32, 64), torch.randn(8, 32)
    with FlopCount() as alone:
        layer(inputs)
    with TensorPeak(), FlopCount() as inside:
        layer(inputs)
    assert inside.total == alone.total == pytest.approx(2 * 8 * 32 * 64)


@pytest.mark.parametrize("function", [F.silu, F.gelu, F.mish, F.relu, torch.tanh, F.softplus, F.hardswish])
@pytest.mark.parametrize("inference", [False, True])
def test_counting_changes_no_bit(function: Callable[[torch.Tensor], torch.Tensor], inference: bool) -> None:
    def computed() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(33, 65), nn.LayerNorm(65), nn.RMSNorm(65))
        inputs = torch.randn(7, 33)
        with torch.inference_mode(inference):
            found = F.softmax(function(layers(inputs)) @ torch.randn(65, 5), dim=-1)
        if not inference:
            found.square().sum().backward()
        return [found, *(p.grad for p in layers.parameters() if p.grad is not None)]

    expected = computed()
    with FlopCount() as count:
        found = computed()
    assert count.total > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_grouped_heads_are_computed_once_for_each_of_the_querys() -> None:
    """Whatever torch's own table makes of them: in 2.11 it is an error."""
    dtype = torch.float32 if chosen_device() == "cpu" else torch.bfloat16  # a GPU has a kernel for groups in 16 bits
    query = torch.randn(2, 8, 16, 8, dtype=dtype, requires_grad=True)
    key = torch.randn(2, 2, 16, 8, dtype=dtype, requires_grad=True)
    forward = 2 * 2 * 2 * 8 * 16 * 16 * 8
    with FlopCount() as count:
        attended = F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
        assert count.total == forward
        attended.sum().backward()
    assert count.failure is None
    assert count.total == forward + 5 * forward // 2


def test_sequences_end_to_end_are_counted_one_by_one() -> None:
    """PyTorch's kernel for them runs on a GPU alone; its formula is asked as the counter asks it."""
    lengths, heads, width = [3, 0, 5, 8], 4, 16
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    tensors = [torch.empty(16, count, width) for count in (heads, 2, 2)]
    assert varlen.varlen_attn is not None, "what registers its operators"
    forward = flops.formula_of(torch.ops.torch_attn._varlen_attn.default)
    backward = flops.formula_of(torch.ops.torch_attn._varlen_attn_backward.default)
    assert forward is not None
    assert backward is not None
    once = heads * sum(length**2 for length in lengths) * width
    assert forward(*tensors, starts, starts, 8, 8, True, out_val=None) == 4 * once
    found = backward(tensors[0], *tensors, None, None, starts, starts, 8, 8, True, out_val=None)
    assert found == 10 * once


def test_products_of_groups_are_counted_as_one_product_of_all_their_rows() -> None:
    ends = torch.tensor([4, 4, 16], dtype=torch.int32)  # the second group is empty
    rows, matrices = torch.randn(16, 8, requires_grad=True), torch.randn(3, 8, 32, requires_grad=True)
    with FlopCount() as count:
        torch._grouped_mm(rows, matrices, ends).square().sum().backward()
    assert count.total == 3 * 2 * 16 * 8 * 32
    with FlopCount() as count, torch.no_grad():
        torch._grouped_mm(torch.randn(3, 4, 8), matrices)
    assert count.total == 3 * 2 * 4 * 8 * 32


def test_transformers_own_product_of_groups_is_counted_alike() -> None:
    pytest.importorskip("transformers.integrations.moe")
    ends = torch.tensor([4, 4, 16], dtype=torch.int32)
    rows, matrices = torch.randn(16, 8, requires_grad=True), torch.randn(3, 8, 32, requires_grad=True)
    with FlopCount() as count:
        torch.ops.transformers.grouped_mm_fallback(rows, matrices, ends).square().sum().backward()
    assert count.total == 3 * 2 * 16 * 8 * 32
