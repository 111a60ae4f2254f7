"""Tests what the compiler gets: blocks that are alike, or the whole model."""

from __future__ import annotations

import pytest
from torch import nn

from drivetrain.engines.compiled import alike, compile_model
from drivetrain.memory.recompute import repeated_blocks
from tests.tiny_workload import TinyWorkload, perceptron, tiny_engine


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    found: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: found.append(module))
    return found


def block(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4))


def stacked(*widths: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ModuleList(map(block, widths)), nn.Linear(4, 2))


def test_alike_blocks_are_compiled_and_nothing_else(given: list[nn.Module]) -> None:
    model = stacked(8, 8, 8)
    assert compile_model(model, repeated_blocks(model), True) == "3 blocks"
    assert given == list(model[1])  # type: ignore[index]


def test_an_encoder_and_a_decoder_are_two_kinds(given: list[nn.Module]) -> None:
    model = stacked(8, 8, 6, 6)
    assert compile_model(model, repeated_blocks(model), "blocks") == "4 blocks"
    assert len(given) == 4


def test_blocks_of_ever_other_shapes_are_compiled_with_the_model(given: list[nn.Module]) -> None:
    """As a convolutional network's: each would be compiled for itself, and the compiler gives up at the eighth."""
    model = stacked(5, 6, 7, 8)
    assert alike(repeated_blocks(model)) == []
    assert compile_model(model, repeated_blocks(model), True) == "the model"
    assert given == [model]


def test_left_to_the_machine_only_blocks_are_compiled(given: list[nn.Module]) -> None:
    model = stacked(5, 6)
    assert compile_model(model, repeated_blocks(model), "blocks") is False
    assert compile_model(model, repeated_blocks(model), False, by_block=True) is False
    assert not given


def test_sharded_blocks_are_compiled_alike_or_not(given: list[nn.Module]) -> None:
    model = stacked(5, 6)
    assert compile_model(model, repeated_blocks(model), True, by_block=True) == "2 blocks"
    assert given == list(model[1])  # type: ignore[index]


def test_the_report_says_what_was_compiled(given: list[nn.Module]) -> None:
    assert tiny_engine(TinyWorkload(perceptron)).engaged().compiled is False
    assert tiny_engine(TinyWorkload(perceptron), compile=True).engaged().compiled == "the model"
    assert len(given) == 1
