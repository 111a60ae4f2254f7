"""Tests the arithmetic of intervals against counting points one by one, and the reading of torch.profiler's events."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile, record_function

from drivetrain.profile.spans import PART, common, length, spans_of, union

INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted).map(tuple), max_size=12)


def points(intervals: list[tuple[int, int]]) -> set[int]:
    return {point for start, end in intervals for point in range(start, end)}


@given(INTERVALS, INTERVALS)
def test_unions_and_intersections_hold_the_same_points_as_sets(first: list, second: list) -> None:
    a, b = union(first), union(second)
    assert points(a) == points(first)
    assert length(a) == len(points(first))
    assert all(left[1] < right[0] for left, right in itertools.pairwise(a))
    assert points(common(a, b)) == points(first) & points(second)


def test_operators_know_the_range_that_called_them() -> None:
    layer = torch.nn.Linear(4, 4)
    with profile(activities=[ProfilerActivity.CPU]) as recorded, record_function(PART + "forward"):
        layer(torch.ones(2, 4))
    spans = spans_of(recorded.events() or ())
    products = [span for span in spans if span.name == "aten::addmm"]
    assert [product.is_operator for product in products] == [True]
    assert PART + "forward" in [around.name for around in products[0].within()]
    assert not next(span for span in spans if span.name == PART + "forward").is_operator


def test_a_range_that_the_program_names_is_known_as_one() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as recorded, record_function("my part"):
        torch.ones(2) + 1
    found = {span.name: span.is_annotation for span in spans_of(recorded.events() or ())}
    assert found["my part"]
    assert not found["aten::add"]
