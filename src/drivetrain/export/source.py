"""The run that is exported: its checkpoint, its workload and its model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from drivetrain.checkpoint.directory import read_manifest
from drivetrain.config.run import RunConfig
from drivetrain.data.remote_sources import fetched
from drivetrain.export.formats import kind_of
from drivetrain.export.request import Request
from drivetrain.inference.weights import find_checkpoint
from drivetrain.inference.whole_model import loaded_model
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.training.report import RunReport
from drivetrain.workloads.base import Workload
from drivetrain.workloads.build import build_workload


@dataclass
class Source:
    """notes: what a user of the export should know, for the card and the terminal."""

    run: RunConfig
    workload: Workload
    checkpoint: Path
    request: Request
    notes: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return kind_of(self.run.workload)

    @property
    def auto_class(self) -> str:
        return self.run.workload.auto_class

    @property
    def step(self) -> int:
        return read_manifest(self.checkpoint).step

    @property
    def trusts(self) -> bool:
        """Whether Python code that lies beside the model may run in the runtime, as it may in the run."""
        return bool(getattr(self.run.workload.described_model, "trust_remote_code", False))

    @cached_property
    def report(self) -> dict[str, Any]:
        """The report of the training; empty where the run has none yet."""
        file = RunFolder(self.run.folder).report
        return RunReport.read(file).model_dump() if file.is_file() else {}

    def model(self) -> nn.Module:
        """Returns the run's model as it was trained: adapters apart, over a base in the bits that the run kept."""
        over_whole = self.request.of.needs_adapter
        if self.run.quantised_base is not None:
            self.notes.append(_base_note(self.run.quantised_base.format, over_whole))
        trust = self.request.trust
        return loaded_model(
            self.run, self.checkpoint, adapter="keep", trust=trust, quantised=not over_whole
        ).requires_grad_(False)


def opened(run: RunConfig, request: Request) -> Source:
    """Reads the run's data and finds its checkpoint. Raises UserError."""
    run = fetched(run)
    workload = build_workload(run.workload, run.seed, run.adapter, run.quantised_base, run.quantisation_aware)
    return Source(run, workload, find_checkpoint(run, workload, request.checkpoint), request)


def _base_note(format_: str, over_whole: bool) -> str:
    if over_whole:
        return (
            f"the adapters were trained over a base in {format_}; here they are compared over the whole base, as PEFT "
            "loads it by default"
        )
    return (
        f"the base's weights are those that the run trained over: rounded to {format_} and unpacked again, so that the "
        "export answers as the run does (merged onto the unrounded base it would not quite)"
    )
