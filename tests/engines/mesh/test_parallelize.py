"""Tests that faults which keep a model from being spread over a mesh are reported before it is touched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from drivetrain.config.engines.mesh import MeshEngine
from drivetrain.engines.mesh.parallelize import _plan
from drivetrain.errors import UserError
from drivetrain.workloads.base import Layout
from tests.tiny_language import LLAMA


def planned(model: LlamaForCausalLM, compiled: bool) -> dict[str, str]:
    workload: Any = SimpleNamespace(layout=Layout(), by_position=frozenset({"input_ids"}))
    options: Any = SimpleNamespace(compile=compiled)
    return _plan(model, workload, MeshEngine(tp=2), options)


def test_a_plan_that_is_read_off_the_layers_names_cannot_be_compiled() -> None:
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    assert "model.layers.0.self_attn.q_proj" in planned(model, compiled=True), "Transformers has a plan of its own"
    model._tp_plan = {}
    assert planned(model, compiled=False)["model.layers.0.self_attn.q_proj"] == "colwise"
    with pytest.raises(UserError, match="the plan of LlamaForCausalLM is derived from its layers' names"):
        planned(model, compiled=True)
