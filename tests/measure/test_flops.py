"""FLOPs, against closed forms."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain.measure.flops import FlopCount
from drivetrain.measure.memory import TensorPeak


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
