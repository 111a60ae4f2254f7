"""Any state comes back from tensors and JSON as it was, to the bit and to the memory layout."""

from __future__ import annotations

import collections
import enum
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drivetrain.checkpoint.state import join, same, split
from tests.properties import examples

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.int64]
KEYS = st.text(max_size=6) | st.sampled_from(["a.b", "a/b", "a", "b", "~", "$tensor", "$dict", "$tuple", "$float", ""])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    tensor = torch.randint(0, 200, shape, generator=generator).to(draw(st.sampled_from(DTYPES)))
    if len(shape) == 4 and draw(st.booleans()):
        return tensor.to(memory_format=torch.channels_last)
    if shape and draw(st.booleans()):
        return tensor.transpose(0, -1)
    if shape and draw(st.booleans()):
        return tensor[::2]
    return tensor


LEAVES = tensors() | st.none() | st.booleans() | st.integers() | st.floats() | st.text()
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.dictionaries(KEYS, inner, max_size=4) | st.lists(inner, max_size=4) | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
)


def round_trip(state: Any) -> Any:
    kept, tree = split(state)
    return join({key: tensor.contiguous().clone() for key, tensor in kept.items()}, json.loads(json.dumps(tree)))


def assert_identical(one: Any, other: Any) -> None:
    """Written apart from `same`, which is itself under test."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tolist() == other.tolist() or one.isnan().any()
    elif isinstance(one, dict):
        assert list(one) == list(other), "the order of keys is kept too"
        for key in one:
            assert_identical(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_identical(mine, theirs)
    elif isinstance(one, float):
        assert one.hex() == other.hex()
    else:
        assert one == other


@settings(deadline=None, max_examples=examples(150))
@given(STATES)
def test_any_state_comes_back_as_it_was(state: Any) -> None:
    back = round_trip(state)
    assert_identical(state, back)
    assert same(state, back)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -0.0, 5e-324, 0.1 + 0.2, 2**200, -(2**63), "\ud800"])
def test_numbers_and_text_that_json_treats_badly_come_back_exactly(value: Any) -> None:
    back = round_trip({"value": value})["value"]
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_keys_that_join_to_the_same_path_stay_apart() -> None:
    state = {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2), "": {"b": torch.tensor(3)}}, "a//b": torch.tensor(4)}
    back = round_trip(state)
    found = [back["a/b"].item(), back["a"]["b"].item(), back["a"][""]["b"].item(), back["a//b"].item()]
    assert found == [1, 2, 3, 4]


def test_a_flat_dict_of_tensors_keeps_its_keys() -> None:
    weights = {"layer.0.weight": torch.ones(2), "layer/odd~name": torch.ones(1)}
    assert set(split(weights)[0]) == set(weights)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(8, 4, 1, 1).to(memory_format=torch.channels_last),  # contiguous in both orders: only strides differ
        torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        torch.randn(3, 5).t(),
    ],
    ids=["channels_last", "channels_last 1x1", "channels_last_3d", "transposed"],
)
def test_the_memory_layout_comes_back(tensor: Tensor) -> None:
    back = round_trip({"x": tensor})["x"]
    assert back.stride() == tensor.stride()
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("view", [torch.randn(6, 4)[::2], torch.randn(4)[1:], torch.randn(1, 3).expand(5, 3)])
def test_views_with_gaps_or_overlaps_come_back_by_value(view: Tensor) -> None:
    back = round_trip([view])[0]
    assert torch.equal(back, view)
    assert back.is_contiguous()


def test_a_tensor_that_occurs_twice_is_kept_once_and_tied_again() -> None:
    weight = torch.randn(3, 2)
    kept, _ = split({"embedding": weight, "nested": {"head": weight}})
    assert list(kept) == ["embedding"]
    back = round_trip({"embedding": weight, "nested": {"head": weight}})
    assert back["embedding"] is back["nested"]["head"]


def test_equal_tensors_that_are_not_tied_stay_two() -> None:
    back = round_trip({"a": torch.ones(2), "b": torch.ones(2)})
    back["a"].zero_()
    assert back["b"].tolist() == [1, 1]


def test_values_derived_from_plain_ones_come_back_plain() -> None:
    colour = enum.IntEnum("colour", {"RED": 3})
    state = {
        "metric": np.float64(0.1),
        "name": np.str_("a"),
        "colour": colour.RED,
        "shape": torch.Size([2, 3]),
        "ordered": collections.OrderedDict(a=1),
    }
    back = round_trip(state)
    assert_identical(back, {"metric": 0.1, "name": "a", "colour": 3, "shape": (2, 3), "ordered": {"a": 1}})
    assert same(state, back)


@pytest.mark.parametrize(
    ("value", "named"),
    [({1}, "a set"), (b"x", "a bytes"), (object(), "a object"), ({1: 2}, "the key 1"), (np.zeros(2), "a ndarray")],
)
def test_what_has_no_safe_form_is_refused_with_its_place(value: Any, named: str) -> None:
    with pytest.raises(TypeError, match=f"outer/0: {named}"):
        split({"outer": [value]})


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match=r"w: a tensor of torch.sparse_coo"):
        split({"w": torch.eye(2).to_sparse()})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.zeros(1, 2)),
        (1, 1.0),
        (1, True),
        ([1], (1,)),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        (0.0, -0.0),
        (None, 0),
        (torch.tensor(1), 1),
    ],
)
def test_same_tells_apart_what_differs(one: Any, other: Any) -> None:
    assert not same(one, other)
    assert not same(other, one)
    assert same(one, one)


def test_same_takes_nan_of_the_same_bits_as_equal() -> None:
    assert same({"x": torch.tensor([math.nan]), "y": math.nan}, {"x": torch.tensor([math.nan]), "y": math.nan})
