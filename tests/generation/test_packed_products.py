"""Products by packed copies of weights are those of the weights, by either library, for any number of rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.generation import packed_products
from drivetrain.generation.packed_products import packed

MAKERS = {"onednn": packed_products._by_onednn, "mkl": packed_products._by_mkl}
HAS = {"onednn": torch.backends.mkldnn.is_available(), "mkl": torch.backends.mkl.is_available()}
LIBRARIES = [
    pytest.param(name, marks=pytest.mark.skipif(not has, reason=f"PyTorch was built without {name}"))
    for name, has in HAS.items()
]


@pytest.mark.parametrize("library", LIBRARIES)
@settings(deadline=None, max_examples=25)
@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=3),
    sizes=st.tuples(st.integers(1, 200), st.integers(1, 200)),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_shape_and_number_of_rows_gives_the_product(
    library: str, shape: list[int], sizes: tuple[int, int], has_bias: bool, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(sizes, generator=draw)
    inputs = torch.randn(*shape, sizes[1], generator=draw)
    bias = torch.randn(sizes[0], generator=draw) if has_bias else None
    expected = torch.nn.functional.linear(inputs.double(), weight.double(), None if bias is None else bias.double())
    found = MAKERS[library](weight)(inputs, bias)
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("library", LIBRARIES)
def test_one_copy_serves_a_step_and_a_prompt_and_strided_inputs(library: str) -> None:
    torch.manual_seed(0)
    weight, many = torch.randn(96, 64), torch.randn(300, 2, 64)
    multiply = MAKERS[library](weight)
    for inputs in (many[:1], many[:8], many, many[:, 0], many.transpose(0, 1), many[:0]):
        torch.testing.assert_close(multiply(inputs, None), inputs @ weight.t(), rtol=0, atol=1e-4)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Returns a list that gets the library of each copy."""
    found: list[str] = []
    for library in MAKERS:
        monkeypatch.setattr(packed_products, f"_by_{library}", lambda _, library=library: found.append(library))
    packed_products._prefers_mkl.cache_clear()
    yield found
    packed_products._prefers_mkl.cache_clear()


@pytest.mark.parametrize(
    ("processor", "has_mkl", "dtype", "library"),
    [
        ("Intel(R) Xeon(R) Processor @ 2.50GHz", True, torch.float32, "mkl"),
        ("Intel(R) Xeon(R) Processor @ 2.50GHz", True, torch.bfloat16, "onednn"),
        ("Intel(R) Xeon(R) Processor @ 2.50GHz", False, torch.float32, "onednn"),
        ("AMD EPYC 9B14", True, torch.float32, "onednn"),
    ],
)
def test_mkl_multiplies_fp32_on_intels_processors(
    processor: str,
    has_mkl: bool,
    dtype: torch.dtype,
    library: str,
    chosen: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_products, "cpu_name", lambda: processor)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: has_mkl)
    packed(torch.zeros(8, 8, dtype=dtype))
    assert chosen == [library]
