"""Writes the graph of a forward pass: ONNX, or PyTorch's own exported program. Neither needs the model's Python.

Graphs take batches and sequences of any length. A language model's ONNX graph has a cache of keys and values
(`cached_graph`); PyTorch's program of one takes all ids and returns the logits of each.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.checkpoint.convert.merging import GENERATION, OF_ADAPTERS
from drivetrain.checkpoint.convert.transformers_folder import copy_assets
from drivetrain.errors import RunError, last_line
from drivetrain.export import cached_graph
from drivetrain.export.classifier_scripts import script_for
from drivetrain.export.formats import LANGUAGE
from drivetrain.export.questions import output_of
from drivetrain.export.source import Source
from drivetrain.export.written import Written
from drivetrain.workloads.exporting import Exportable

ONNX, PROGRAM, EXAMPLE = "model.onnx", "model.pt2", "example.json"
SEQUENCES = ("input_ids", "attention_mask", "token_type_ids")  # (batch, length); other inputs are (batch, ...)
LENGTH = 7  # of the sequences that the graph is traced with

ONNX_SCRIPT = """import json
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
inputs = {name: np.array(value, dtype) for name, (value, dtype) in json.load(open("example.json")).items()}
[scores] = session.run(None, inputs)
print(scores[0].tolist() if scores.ndim == 2 else scores[0, -1].tolist())
"""
PROGRAM_SCRIPT = """import json
import torch

model = torch.export.load("model.pt2").module()
given = json.load(open("example.json")).items()
inputs = {name: torch.tensor(value, dtype=getattr(torch, dtype)) for name, (value, dtype) in given}
scores = model(inputs)
print(scores[0].tolist() if scores.ndim == 2 else scores[0, -1].tolist())
"""


def write_onnx(model: nn.Module, source: Source, into: Path) -> Written:
    """Writes model.onnx, by torch.onnx.export over PyTorch's exported program."""
    if source.kind == LANGUAGE and cached_graph.has_cache(model):
        try:
            with _quiet():
                cached_graph.write(model, into / ONNX)
        except OSError:
            raise
        except Exception as error:  # each architecture's own
            why = f"PyTorch cannot trace this model's cache: {last_line(error)}"
            source.notes.append(f"{why}; the graph takes all ids in each pass")
        else:
            _write_beside(source, _example(source, model), into)
            return Written(script=cached_graph.ONNX_SCRIPT)
    inputs, program = _traced(model, source)
    with _quiet(), _explained("onnx"):
        made = torch.onnx.export(program, dynamo=True, input_names=list(inputs), output_names=["scores"], verbose=False)
        assert made is not None
        made.save(str(into / ONNX))
    _write_beside(source, inputs, into)
    return Written(script=script_for(source) or ONNX_SCRIPT)


def write_program(model: nn.Module, source: Source, into: Path) -> Written:
    """Writes model.pt2, which torch.export.load reads."""
    inputs, program = _traced(model, source)
    with _quiet(), _explained("torch-export"):
        torch.export.save(program, into / PROGRAM)
    _write_beside(source, inputs, into)
    return Written(script=script_for(source) or PROGRAM_SCRIPT)


def _traced(model: nn.Module, source: Source) -> tuple[dict[str, Tensor], Any]:
    """Returns the inputs of an example, and the program that takes such of any batch and length."""
    inputs = _example(source, model)
    dynamic = torch.export.Dim.DYNAMIC
    shapes = {name: {0: dynamic, 1: dynamic} if name in SEQUENCES else {0: dynamic} for name in inputs}
    with _quiet(), _explained(source.request.format):
        wrapped = _Scores(model, source.kind == LANGUAGE).eval()
        return inputs, torch.export.export(wrapped, (inputs,), dynamic_shapes=(shapes,))


class _Scores(nn.Module):
    """Returns the scores alone, of inputs by their names."""

    def __init__(self, model: nn.Module, is_language: bool) -> None:
        super().__init__()
        self.model = model
        self._extra = {"use_cache": False} if is_language else {}

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return output_of(self.model, inputs, **self._extra)


def _example(source: Source, model: nn.Module) -> dict[str, Tensor]:
    """Returns inputs of two samples, since a dimension of 1 would be taken for a fixed one."""
    workload = source.workload
    assert isinstance(workload, Exportable)
    samples = workload.evaluation if workload.evaluation is not None else workload.train
    if source.kind == LANGUAGE:
        ids = workload.plain_batch(model, [samples.load(0, 0)]).inputs["input_ids"][:, :LENGTH]
        return {"input_ids": ids.expand(2, -1).contiguous()}
    batch = workload.plain_batch(model, [samples.load(number % len(samples), 0) for number in range(2)])
    return batch.inputs


def _write_beside(source: Source, inputs: dict[str, Tensor], into: Path) -> None:
    """Writes tokenizer or preparation of pictures, and the first sample of the example for use.py."""
    copy_assets(source.checkpoint, into, lambda name: name in (*OF_ADAPTERS, GENERATION) or name.endswith(".py"))
    first = {name: (each[:1].tolist(), str(each.dtype).removeprefix("torch.")) for name, each in inputs.items()}
    (into / EXAMPLE).write_text(json.dumps(first), encoding="utf-8")


@contextmanager
def _explained(format_: str) -> Iterator[None]:
    """Turns the errors of tracing, each architecture's own, into one that names the format."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        why = f"PyTorch cannot trace this model for {format_}: {last_line(error)}"
        raise RunError(f"{why}; export it to transformers, or report it to PyTorch with the model's class") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporter's warnings about its own parts while the block runs."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
