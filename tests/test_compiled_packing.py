"""Packed rows of one length: the same curve, and one compiled graph for training, one for evaluation.

The compiler runs without its code generator (aot_eager): graphs, guards and what is compiled again are the same.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from drivetrain.config.load import validate
from drivetrain.data.row_shape import Rows
from drivetrain.engines.compiled import compile_model
from drivetrain.memory.recompute import apply_recompute, repeated_blocks
from drivetrain.models import packed_attention
from drivetrain.training.report import RunReport
from drivetrain.training.run import run
from tests.models.test_packed_attention import build, end_to_end, packed, row, sequences
from tests.tiny_language import LLAMA, talk, write_lines
from tests.tiny_workload import CPU

# torch's own look at gradients of what is between blocks, which it hides where warnings are no errors
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    compiled = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled(module, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()
    counters.clear()


def trained(folder: Path, fixed_rows: Any = "auto", **more: Any) -> tuple[RunReport, list[float]]:
    """Over ragged lengths, a last short batch and two evaluations, answers to prompts included."""
    draw = random.Random(0)
    rows = [talk("say " + "x" * draw.randint(0, 20), "hello " * draw.randint(1, 6)) for _ in range(43)]
    data = {"cache": str(folder / "cache"), "length": 64, "template": "chatml", "fixed_rows": fixed_rows}
    workload = {
        "type": "language_model",
        "stage": "sft",
        "model": {"config": {**LLAMA, "num_hidden_layers": 3}},
        "data": {**data, "train": write_lines(folder / "train.jsonl", rows)},
        "generate": {"samples": 1, "max_new_tokens": 2},
    }
    raw = {"workload": workload, "batch_size": 8, "micro_batch_size": 3, "loop": {"epochs": 1}, "output": str(folder)}
    raw |= {"optimizer": {"name": "sgd", "lr": 0.1}, "evaluation": {"every_steps": 3}}
    raw |= {"tracking": {"log_every": 1, "trackers": []}}
    config, problems = validate({**raw, "output": str(folder / "run"), **more}, [])
    assert config is not None, problems
    report, code = run(config, CPU, overwrite=True, quiet=True)
    assert code == 0
    events = map(json.loads, (folder / "run" / "events.jsonl").read_text().splitlines())
    return report, [event["loss"] for event in events if event["event"] == "step"]


def test_packed_fine_tuning_is_compiled_twice_in_all_and_keeps_its_curve(tmp_path: Path, counted: Any) -> None:
    plain, losses = trained(tmp_path)
    assert not counted["stats"], "left out, nothing is compiled on a CPU"
    assert plain.data["packed"]
    filled, same = trained(tmp_path, fixed_rows=True)
    assert filled.samples == plain.samples
    torch.testing.assert_close(torch.tensor(same), torch.tensor(losses), rtol=1e-6, atol=0)
    assert filled.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-6)
    assert not counted["stats"]
    compiled, also = trained(tmp_path, compile=True)
    assert compiled.engaged["compiled"] == "3 blocks"
    torch.testing.assert_close(torch.tensor(also), torch.tensor(losses), rtol=1e-6, atol=0)
    assert compiled.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=1e-6)
    assert not counted["graph_break"]
    assert counted["stats"]["unique_graphs"] == counted["frames"]["ok"] == 2, "one trains and one evaluates"


def ragged_rows() -> list[dict[str, Tensor]]:
    """Of 24 tokens each, with one to four sequences before the padding."""
    fixed = Rows(24, 4, 9)
    found = []
    for lengths in ((5, 1, 9, 2), (9, 9), (3,), (8, 8, 8), (7, 2, 4)):
        parts = row(sequences(lengths))
        positions = torch.from_numpy(fixed.padding(sum(lengths)))[None]
        parts["position_ids"] = torch.cat([parts["position_ids"], positions], 1)
        parts["input_ids"] = torch.cat([parts["input_ids"], torch.zeros_like(positions)], 1)
        found.append(parts)
    return found


@pytest.mark.parametrize(("mixed", "recompute"), [(False, False), (True, False), (True, True)])
def test_the_kernel_of_a_gpu_is_one_node_of_one_graph(
    mixed: bool, recompute: bool, counted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own operator for sequences end to end, with a stand-in of it for CPUs."""

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, starts: Tensor, _: Tensor, *how: Any, **__: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        asked.append((how[0], len(starts)))
        found = end_to_end(q, k, v, starts, how[3], how[4][0]).contiguous()
        return found, torch.zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64)

    asked: list[tuple[int, int]] = []
    model = build("qwen2", num_hidden_layers=4)
    attention = packed(model)
    model = model if mixed else model.to(torch.bfloat16)
    expected = [model(**each).logits for each in ragged_rows()]
    monkeypatch.setattr(packed_attention, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(packed_attention, "_is_ampere", lambda _: True)
    with torch.library._scoped_library("torch_attn", "IMPL") as library:
        library.impl("_varlen_attn", kernel, "CPU")
        attention.rows = lambda: Rows(24, 4, 9)
        if recompute:
            apply_recompute(model)
        assert compile_model(model, repeated_blocks(model), "blocks") == "4 blocks"
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            given = [model(**each).logits for each in ragged_rows()]
            with torch.no_grad():
                model.eval()(**ragged_rows()[1])
    assert set(asked) == {(9, 8)}, "one shape of boundaries, whatever a row holds"
    assert not counted["graph_break"]
    assert counted["stats"]["unique_graphs"] == 2
    for own, plain in zip(given, expected, strict=True):
        torch.testing.assert_close(own.float(), plain.float(), rtol=0.02, atol=0.02)
