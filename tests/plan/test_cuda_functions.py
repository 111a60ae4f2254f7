"""Tests that a trace on the CPU has the dtypes of a GPU's autocast, and keeps what a GPU keeps."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from drivetrain.plan.cuda_functions import ANSWERING, CAST, CudaFunctions, on_cuda

HALF, FULL = torch.bfloat16, torch.float32
OPERATORS = {"__pow__", "__rpow__", "__rdiv__", "__rtruediv__"}  # of Python, which call pow and reciprocal


def test_the_names_are_those_of_torchs_header() -> None:
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.exists():
        pytest.skip("torch came without its headers")
    text = header.read_text()

    def listed(macro: str) -> set[str]:
        found = re.search(rf"#define {macro}\(_\)((?:.*\\\n)+.*\n)", text)
        assert found is not None
        return set(re.findall(r"_\((\w+)", found[1]))

    assert listed("AT_FORALL_FP32") == CAST - OPERATORS
    assert listed("AT_FORALL_FP32_SET_OPT_DTYPE") == ANSWERING


HALVES = torch.randn(2, 8, 4, dtype=HALF)
UNLIKE: dict[str, Callable[[Tensor], Tensor]] = {  # a GPU answers in fp32, a CPU in 16 bits
    "group norm": nn.GroupNorm(2, 8),
    "layer norm": nn.LayerNorm(4),
    "softmax": lambda x: x.softmax(-1),
    "log softmax": lambda x: functional.log_softmax(x, -1),
    "a power": lambda x: x**2,
    "a sum": lambda x: x.sum(),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_autocast_answers_as_on_a_gpu(name: str) -> None:
    with torch.autocast("cpu", HALF):
        assert UNLIKE[name](HALVES).dtype == HALF
        with CudaFunctions():
            assert UNLIKE[name](HALVES).dtype == FULL


def test_products_stay_in_16_bits_and_a_dtype_that_is_asked_for_is_given() -> None:
    with torch.autocast("cpu", HALF), CudaFunctions():
        assert nn.Linear(4, 4)(HALVES).dtype == HALF
        assert HALVES.softmax(-1, dtype=torch.float64).dtype == torch.float64
        assert functional.softmax(HALVES, -1, dtype=HALF).dtype == HALF


def test_without_autocast_nothing_is_cast() -> None:
    with CudaFunctions():
        assert HALVES.softmax(-1).dtype == HALF


def kept_bytes(work: Callable[[], Tensor]) -> int:
    """Returns the bytes that a forward pass keeps for the backward one."""
    kept: dict[int, int] = {}

    def seen(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        work()
    return sum(kept.values())


def test_dropout_keeps_a_byte_an_element() -> None:
    x = torch.randn(4, 16, requires_grad=True)
    layer = nn.Dropout(0.25)
    assert kept_bytes(lambda: layer(x)) == 4 * x.numel()
    with CudaFunctions():
        assert kept_bytes(lambda: layer(x)) == x.numel()
        assert layer.eval()(x) is x
        assert functional.dropout(x, 1.0).eq(0).all()


def test_attention_with_dropout_keeps_no_scores() -> None:
    query, key, value = (torch.randn(2, 2, 64, 8, requires_grad=True) for _ in range(3))
    scores = query.shape[0] * query.shape[1] * 64 * 64 * query.element_size()

    def attention() -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, dropout_p=0.25)

    assert kept_bytes(attention) > scores
    with CudaFunctions():
        assert kept_bytes(attention) < scores
        by_position = functional.scaled_dot_product_attention(query, key, value, None, 0.25, True)
    torch.testing.assert_close(by_position, functional.scaled_dot_product_attention(query, key, value, is_causal=True))


@pytest.mark.parametrize("name", ["dropout", "layer norm"])
def test_what_is_recomputed_in_the_backward_pass_is_what_the_forward_pass_kept(name: str) -> None:
    block = nn.Sequential(nn.Linear(4, 4), {"dropout": nn.Dropout(0.5), "layer norm": nn.LayerNorm(4)}[name])
    x = torch.randn(8, 4, requires_grad=True)
    with on_cuda():
        with torch.autocast("cpu", HALF):
            loss = checkpoint(block, x, use_reentrant=False).sum()
        loss.backward()  # torch raises CheckpointError where the two differ
        assert x.grad is not None
        (again,) = torch.autograd.grad(checkpoint(block, x, use_reentrant=False).sum(), x)
        assert again.shape == x.shape
    with torch.autocast("cpu", HALF):
        assert functional.layer_norm(HALVES, (4,)).dtype == HALF, "the block has ended"
    with pytest.raises(RuntimeError, match=r"different metadata|different number"):
        unlike(block, x)


def unlike(block: nn.Module, x: Tensor) -> None:
    """Takes a forward pass as on a GPU, and the backward pass as on a CPU."""
    with CudaFunctions(), torch.autocast("cpu", HALF):
        loss = checkpoint(block, x, use_reentrant=False).sum()
    loss.backward()
