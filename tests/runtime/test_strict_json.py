"""NaN and infinity in JSON: null for any reader, themselves for ours."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.runtime.strict_json import dumps, plain, restored

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4).filter(lambda key: key != "not_finite"), VALUES, max_size=4))
def test_what_is_written_strictly_is_what_is_read(values: dict[str, Any]) -> None:
    found = restored(json.loads(dumps(values), parse_constant=lambda name: pytest.fail(f"{name} is no JSON")))
    assert repr(found) == repr(values)


def test_finite_numbers_are_written_as_they_are() -> None:
    values = {"loss": 1.5, "not": ["nan", None]}
    assert plain(values) is values
    assert dumps(values) == '{"loss": 1.5, "not": ["nan", null]}'


def test_the_way_to_a_number_within_is_kept() -> None:
    assert plain({"seeds": [1.0, -math.inf]}) == {"seeds": [1.0, None], "not_finite": {"seeds": {"1": "-inf"}}}


@pytest.mark.parametrize("other", [3, {"loss": "much"}, {"gone": "nan"}, {"loss": {"0": "nan"}}, ["nan"]])
def test_a_line_of_another_hand_is_left_as_it_is(other: Any) -> None:
    assert restored({"loss": 2.0, "not_finite": other})["loss"] == 2.0
