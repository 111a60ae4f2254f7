"""Process-wide switches of a precision: set within, put back after."""

from __future__ import annotations

import contextlib

import pytest
import torch

from drivetrain.config.machine import Machine
from drivetrain.config.precision import PRECISIONS
from drivetrain.numerics.torch_precision import arithmetic, autocast, dtype, is_emulated

PLAIN = Machine("cpu", "a CPU", 1, 2**33, 2, None, frozenset({"float32"}))
NATIVE = Machine("cpu", "a CPU", 1, 2**33, 2, None, frozenset({"float32", "bfloat16", "float16"}))
GPU = Machine("cuda", "a GPU", 1, 2**33, 2, (9, 0), frozenset({"float32", "bfloat16", "float16"}))
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", PRECISIONS)
def test_dtypes_of_the_table_exist_and_products_come_out_in_the_compute_dtype(name: str) -> None:
    precision = PRECISIONS[name]
    held = precision.compute if precision.cast else precision.parameters  # copies are made by an engine
    left = torch.ones(2, 2, dtype=dtype(held))
    with arithmetic(precision, PLAIN), autocast(precision, CPU):
        assert (left @ left).dtype == dtype(precision.compute)
        with torch.autocast("cpu", enabled=False):
            assert (left @ left).dtype == left.dtype  # an island


@pytest.mark.parametrize(("name", "matmul"), [("fp32", "highest"), ("tf32", "high"), ("bf16-mixed", "highest")])
def test_tf32_is_on_where_it_was_asked_for_and_nowhere_else(name: str, matmul: str) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with contextlib.suppress(KeyError), arithmetic(PRECISIONS[name], GPU):
        assert torch.get_float32_matmul_precision() == matmul
        assert torch.backends.cudnn.allow_tf32 == (name == "tf32")
        raise KeyError  # put back also when a run fails
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


def test_only_a_cpu_without_the_instructions_emulates() -> None:
    assert [is_emulated(PRECISIONS["bf16"], machine) for machine in (PLAIN, NATIVE, GPU)] == [True, False, False]
    assert not is_emulated(PRECISIONS["fp32"], PLAIN)
