"""Tensors without numbers have the sizes, strides, types and storages that PyTorch gives those with numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

from drivetrain.plan.fake_mode import QuickFakeMode

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
ORDERS = st.permutations(range(4))
TYPES = st.sampled_from((torch.float32, torch.bfloat16, torch.float64))
OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.flatten(2) if x.is_contiguous() else x.transpose(0, 1),
    "slice": lambda x: x[:, : max(1, x.shape[1] // 2)],
    "select and expand": lambda x: x[0].unsqueeze(0).expand(2, *x.shape[1:]),
    "split": lambda x: x.split(1, dim=1),
    "unbind": lambda x: x.unbind(0),
    "chunk": lambda x: x.chunk(2, dim=3),
    "a sum with a number": lambda x: x + 1,
    "a product with its own transpose": lambda x: x @ x.transpose(2, 3),
    "an average": lambda x: x.mean(dim=(1, 3), keepdim=True),
    "a comparison": lambda x: x > 0.5,
    "another type": lambda x: x.to(torch.float16),
    "an index": lambda x: x[:, torch.zeros(3, dtype=torch.int64)],
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[2:]),
    "a copy that is contiguous": lambda x: x.contiguous(),
    "concatenated": lambda x: torch.cat([x, x * 2], dim=1),
    "the largest": lambda x: x.max(dim=1),
    "written to": lambda x: x.mul_(2),
    "a view that is written to": lambda x: x[:, 0].add_(1),
    "several at once": lambda x: torch._foreach_mul([x, x[0]], 2.0),
    "like it": lambda x: torch.zeros_like(x),
    "new": lambda x: x.new_empty(2, 3),
    "squares": lambda x: x.pow(2).sum(),
    "dropout": lambda x: F.dropout(x.float(), 0.5),
    "an activation": lambda x: F.gelu(x, approximate="tanh"),
}


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [each for each in result if isinstance(each, Tensor)]


def described(result: Any, given: Tensor) -> list[tuple[Any, ...]]:
    """Returns what is to be the same with numbers and without."""
    own = given.untyped_storage()._cdata
    found = []
    for each in tensors(result):
        storage = each.untyped_storage()
        is_view = storage._cdata == own
        # the stride of a single element says nothing
        strides = [step for length, step in zip(each.shape, each.stride(), strict=True) if length > 1]
        found.append((each.shape, strides, each.dtype, each.storage_offset(), is_view, storage.nbytes()))
    return found


@given(st.sampled_from(sorted(OPERATORS)), SIZES, ORDERS, TYPES)
def test_results_lie_in_memory_as_pytorch_says_the_first_time_and_the_second(
    name: str, size: tuple[int, ...], order: Sequence[int], dtype: torch.dtype
) -> None:
    real = torch.empty_permuted(size, list(order), dtype=dtype).fill_(1)
    plain, quick = FakeTensorMode(allow_non_fake_inputs=True), QuickFakeMode(allow_non_fake_inputs=True)
    of_pytorch = plain.from_tensor(real)
    with plain:
        expected = described(OPERATORS[name](of_pytorch), of_pytorch)
    for fake in [quick.from_tensor(real) for _ in range(2)]:
        with quick:
            result = OPERATORS[name](fake)
        assert described(result, fake) == expected


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_results_of_contiguous_tensors_lie_in_memory_as_those_with_numbers(name: str) -> None:
    real, mode = torch.ones(2, 4, 3, 4), QuickFakeMode(allow_non_fake_inputs=True)
    fake = mode.from_tensor(real)
    with mode:
        result = OPERATORS[name](fake)
    assert described(result, fake) == described(OPERATORS[name](real), real)


def test_results_have_their_own_storage_each_time() -> None:
    mode = QuickFakeMode()
    with mode:
        given = torch.ones(4, 4)
        one, other = given * 2, given * 2
        storages = {each.untyped_storage()._cdata for each in (given, one, other)}
    assert len(storages) == 3
    assert {type(each) for each in (one, other)} == {FakeTensor}


def test_a_number_of_another_type_gives_another_result() -> None:
    with QuickFakeMode():
        counts = torch.ones(4, dtype=torch.int64)
        assert [(counts * other).dtype for other in (2, 2.0, True)] == [torch.int64, torch.float32, torch.int64]
        assert [(counts * other).dtype for other in (2, 2.0, True)] == [torch.int64, torch.float32, torch.int64]
        torch.set_default_dtype(torch.float64)
        try:
            assert (counts * 2.0).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_view_of_a_storage_that_was_freed_leaves_it_so() -> None:
    """FSDP frees what it gathered by resizing the storage to nothing, and keeps views of it."""
    with QuickFakeMode():
        gathered = torch.empty(64)
        for _ in range(2):
            gathered.untyped_storage().resize_(0)
            assert gathered.view(8, 8).untyped_storage().nbytes() == 0


def test_gradients_have_the_shapes_of_their_parameters() -> None:
    with QuickFakeMode():
        model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        for _ in range(2):
            F.cross_entropy(model(torch.randn(3, 8)), torch.zeros(3, dtype=torch.int64)).backward()
    assert all(each.grad is not None and each.grad.shape == each.shape for each in model.parameters())


def test_a_constant_keeps_its_number() -> None:
    """PyTorch computes with what `torch.tensor` made, until something is written to it."""
    with QuickFakeMode():
        three = torch.tensor(3)
        assert int(three + 1) == 4
        assert int(three + 1) == 4


@pytest.mark.parametrize("size", [(8, 6, 1, 1), (8, 6, 4, 4), (8, 1, 5, 5), (2, 6, 1, 3)])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1)])  # from the slowest to the quickest dimension
def test_what_follows_batch_norm_lies_as_a_cpus_kernel_puts_it(size: tuple[int, ...], order: tuple[int, ...]) -> None:
    given = torch.empty_permuted(size, order).normal_()
    real = F.batch_norm(given, None, None, training=True)
    mode = QuickFakeMode(like_cpu=True, allow_non_fake_inputs=True)
    with mode:
        for _ in range(2):
            fake = F.batch_norm(mode.from_tensor(given), None, None, training=True)
            assert fake.stride() == real.stride()


GROUPS = torch.tensor([4, 4, 16], dtype=torch.int32)  # ends, of which the second group is empty


def grouped(dtype: torch.dtype, first: int, second: int, columns: int = 6) -> list[Tensor]:
    """Returns what a product of groups takes: matrices of two or three dimensions, and the ends of groups."""
    of_first = torch.ones(3, 16, 8, dtype=dtype) if first == 3 else torch.ones(16, 16, dtype=dtype)
    inner = of_first.shape[-1]
    if first == 2 and second == 3:
        of_first, inner = torch.ones(16, 8, dtype=dtype), 8
    columns = 16 if second == 2 else columns
    turned = torch.ones((3, columns, inner)[3 - second :], dtype=dtype)  # whose rows begin at multiples of 16 bytes
    offsets = [] if first == second == 3 else [GROUPS]
    return [of_first, turned.transpose(-2, -1), *offsets]


@pytest.mark.parametrize("dims", [(2, 3), (3, 2), (2, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_product_of_groups_lies_in_memory_as_the_operator_puts_it(dtype: torch.dtype, dims: tuple[int, int]) -> None:
    given = grouped(dtype, *dims)
    real = torch._grouped_mm(*given)
    mode = QuickFakeMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(each) for each in given]
    with mode:
        for _ in range(2):
            assert described(torch._grouped_mm(*fakes), fakes[0]) == described(real, given[0])


def test_a_product_of_groups_is_refused_without_numbers_where_it_is_with_them() -> None:
    rows, matrices, ends = grouped(torch.float32, 2, 3)
    uneven = torch.ones(16, 7), torch.ones(3, 6, 7).transpose(-2, -1)  # rows begin at multiples of 28 bytes
    for case in ((*uneven, ends), (rows.double(), matrices.double(), ends), (rows, matrices)):
        mode = QuickFakeMode(allow_non_fake_inputs=True)
        with pytest.raises(RuntimeError):
            torch._grouped_mm(*case)
        with mode, pytest.raises(RuntimeError):
            torch._grouped_mm(*(mode.from_tensor(each) for each in case))
