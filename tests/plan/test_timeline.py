"""Memory over a step: what it is made of at each moment, and what is kept of it when moments are left out."""

from __future__ import annotations

import json
import re

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from drivetrain.plan.memory import MemoryRecord
from drivetrain.plan.page_bars import memory_over_a_step
from drivetrain.plan.timeline import NOTHING, PARTS, POINTS, Timeline, parts_on_line

SIZES = st.integers(0, 10**12)
MOMENT = st.tuples(st.sampled_from(("forward", "backward", "optimizer")), st.tuples(*[SIZES] * len(PARTS)))


def timeline(moments: list[tuple[str, tuple[int, ...]]]) -> Timeline:
    return Timeline(tuple(phase for phase, _ in moments), np.array([parts for _, parts in moments], dtype=np.int64))


def test_a_step_of_one_layer_holds_what_its_tensors_take_moment_after_moment() -> None:
    """A linear layer of 4 x 8 in fp32: weight, input of 2 x 8 and output of 2 x 4 have 128, 64 and 32 bytes."""
    record = MemoryRecord()
    with FakeTensorMode(), record:
        layer = nn.Linear(8, 4, bias=False)
        record.serves("parameters", layer.parameters())
        record.begin_step()
        with record.part("forward"):
            samples = torch.randn(2, 8)
            output = layer(samples).relu()
        with record.part("backward"):
            output.sum().backward()
            record.serves("gradients", [layer.weight.grad])  # type: ignore[list-item]
            del output, samples
    found = record.timeline()
    assert set(found.phases) == {"forward", "backward"}
    forward = found.at([moment for moment, phase in enumerate(found.phases) if phase == "forward"])
    assert forward.parts_at(-1) == {"parameters": 128, "activations": 64 + 32}  # relu keeps its output alone
    assert found.parts_at(-1) == {"parameters": 128, "gradients": 128}
    assert (found.parts[:, PARTS.index("parameters")] == 128).all()


def test_two_passes_of_a_pipeline_in_a_row_are_stretches_of_their_own() -> None:
    record = MemoryRecord()
    with FakeTensorMode(), record:
        record.begin_step()
        kept = []
        for _ in range(3):
            with record.part("forward"):
                kept.append(torch.randn(4))
    found = record.timeline()
    stretches = [(found.phases[start], int(found.allocated[end - 1])) for start, end in found.stretches()]
    assert stretches == [("forward", 16), ("between", 16), ("forward", 32), ("between", 32), ("forward", 48)]


@given(st.lists(MOMENT, min_size=1, max_size=700))
def test_a_thinned_timeline_keeps_its_peak_and_the_order_of_its_phases(moments: list) -> None:
    whole = timeline(moments)
    thin = whole.thinned()
    assert thin.allocated.max() == whole.allocated.max()
    assert thin.parts_at(thin.peak) == whole.parts_at(whole.peak)
    assert thin.highest_of_stretches() == whole.highest_of_stretches()
    assert thin.highest_of_phases() == whole.highest_of_phases()
    assert len(thin.phases) <= POINTS + len(whole.stretches())


@given(st.tuples(*[SIZES] * len(PARTS)), st.tuples(*[SIZES] * len(PARTS)), st.integers(0, 8))
def test_between_and_beyond_two_moments_no_part_is_negative_and_the_sum_lies_on_the_line(
    below: tuple[int, ...], above: tuple[int, ...], eighths: int
) -> None:
    share = eighths / 8
    found = parts_on_line(np.array(below), np.array(above), share)
    assert (found >= 0).all()
    sums = sum(below), sum(above)
    assert abs(int(found.sum()) - (sums[0] + (sums[1] - sums[0]) * share)) <= len(PARTS)
    assert (parts_on_line(np.array(below), np.array(above), 4.0) >= 0).all()


def test_a_part_that_would_end_at_nothing_takes_no_more_than_it_has() -> None:
    """Temporaries fall from 30 to 10 while activations rise from 0 to 60: at three times the distance the line of all
    is at 150, and 180 of activations would be too many."""
    below, above = (np.zeros(len(PARTS), dtype=np.int64) for _ in range(2))
    activations, temporaries = PARTS.index("activations"), PARTS.index("temporaries")
    below[temporaries], above[temporaries], above[activations] = 30, 10, 60
    found = parts_on_line(below, above, 3.0)
    assert found.sum() == 30 + (70 - 30) * 3
    assert (found[activations], found[temporaries]) == (150, 0)


def test_the_picture_has_an_area_for_each_part_that_is_there_and_names_the_peak() -> None:
    moments = [("forward", 10), ("forward", 40), ("backward", 20)]
    drawn = memory_over_a_step(timeline([(phase, (100, 0, 0, size, 0, 0, 0)) for phase, size in moments]))
    for part, is_there in (("parameters", True), ("activations", True), ("gradients", False)):
        assert (f'<path class="{part}"' in drawn) is is_there
    assert "activations: at most 0.0 MiB" in drawn
    assert ">peak</text>" in drawn
    assert memory_over_a_step(NOTHING) == ""


def test_its_object_holds_each_part_that_is_there_at_every_moment() -> None:
    found = json.loads(json.dumps(timeline([("forward", (1, 0, 0, 2, 0, 0, 0))] * 2).as_object()))
    assert found == {"phases": ["forward"] * 2, "parts": {"parameters": [1, 1], "activations": [2, 2]}}


def test_the_legend_has_the_parts_that_are_to_be_seen_alone() -> None:
    drawn = memory_over_a_step(timeline([(phase, (10_000, 0, 0, 5_000, 3, 0, 0)) for phase in ("forward", "backward")]))
    assert re.findall(r'<rect class="(\w+)"', drawn) == ["parameters", "activations"], "three bytes are not to be seen"
