"""An export from beginning to end: ask the run's model, write, ask the format's own runtime, judge, publish."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from drivetrain.config.run import RunConfig
from drivetrain.errors import RunError
from drivetrain.export.card import write_card
from drivetrain.export.formats import OWN
from drivetrain.export.fresh_process import ask
from drivetrain.export.questions import (
    MOST_TOKENS,
    NEW_TOKENS,
    Questions,
    Reference,
    questions_of,
    reference_of,
    scores_of,
)
from drivetrain.export.request import Request, check
from drivetrain.export.runtimes.exchange import Asked
from drivetrain.export.source import Source, opened
from drivetrain.export.verification import Verdict, judged, merge_difference
from drivetrain.export.written import Written
from drivetrain.models.merged_adapters import merged
from drivetrain.runtime.atomic_file import writing
from drivetrain.runtime.environment import versions
from drivetrain.runtime.new_folder import new_folder
from drivetrain.runtime.strict_json import dumps

REPORT = "export.json"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    """report: the contents of export.json. folder: where the export lies."""

    folder: Path
    verdict: Verdict
    report: dict[str, Any]


class RefusedExport(RunError):
    """The export is not what the run's model is; nothing of it was kept. `verdict` has the figures."""

    def __init__(self, message: str, verdict: Verdict) -> None:
        super().__init__(message)
        self.verdict = verdict


def export(run: RunConfig, request: Request, progress: Progress = lambda _: None) -> Exported:
    """Writes the run's model in the request's format, verified. progress: receives a line at each stage.

    Raises UserError for what cannot work, before any work; RefusedExport for an export over its bound, unless the
    request accepts it; RunError for one that cannot be written or loaded. Then nothing is left at the output.
    """
    check(request, run)
    progress("reading the run's data and its model")
    source = opened(run, request)
    model = source.model()
    positions = request.of.normalised_positions or MOST_TOKENS
    questions = questions_of(source.workload, model, request.samples, positions, request.of.spare_places)
    progress(f"asking the run's model: {questions.samples} samples, {len(questions.prompts)} prompts")
    reference = reference_of(model, questions)
    bytes_before = _bytes_of(model)
    model, merge = _merged(model, source, questions, reference)
    if request.of.normalised_positions is not None:
        reference = replace(reference, scores=[each.log_softmax(-1) for each in reference.scores])
    with writing(request.output, then="export again"), new_folder(request.output) as folder:
        progress(f"writing {request.format}")
        written: Written = _function(request.of.writer)(model, source, folder)
        del model
        size = _bytes_in(folder)
        progress(f"asking {request.of.loaded_by} in a process of its own")
        answered = ask(request.of.runtime, _asked(source, questions, written, folder))
        classes = source.kind != OWN
        verdict = judged(request.numbers, questions, reference, answered, written, merge, classes)
        if not verdict.holds and not request.accept:
            why = "\n".join(f"  {failure}" for failure in verdict.failures)
            raise RefusedExport(f"{request.format} is not the run's model, and was not kept:\n{why}", verdict)
        report = _report(source, verdict, bytes_before, size)
        (folder / REPORT).write_text(dumps(report, indent=2) + "\n", encoding="utf-8")
        write_card(source, verdict, report, written, folder)
    return Exported(request.output, verdict, report)


def _merged(model: nn.Module, source: Source, questions: Questions, reference: Reference) -> tuple[nn.Module, Any]:
    """Returns the model as it is written, and how far merging moved it; (model, None) where nothing is merged."""
    if source.run.adapter is None or source.request.of.needs_adapter:
        return model, None
    whole = merged(model)
    return whole, merge_difference(reference.scores, scores_of(whole, questions))


def _asked(source: Source, questions: Questions, written: Written, folder: Path) -> Asked:
    given = {
        "folder": str(folder),
        "inputs": questions.inputs,
        "keep": questions.keep,
        "prompts": questions.prompts,
        "ends": sorted(questions.ends),
        "new_tokens": NEW_TOKENS,
        "dialogues": [{"messages": each.messages, "tools": each.tools} for each in questions.dialogues],
        "texts": questions.texts,
        "auto_class": source.auto_class,
        "trusts": source.trusts,
    }
    return Asked(**{**given, **written.asked})


def _report(source: Source, verdict: Verdict, before: int, after: int) -> dict[str, Any]:
    request, run = source.request, source.run
    return {
        "format": request.format,
        "numbers": request.numbers,
        "kind": source.kind,
        "run": run.name,
        "checkpoint": source.checkpoint.name,
        "step": source.step,
        "accepted_over_bound": not verdict.holds,
        **verdict.as_json(),
        "bytes": {"before": before, "after": after},
        "notes": source.notes,
        "versions": versions(),
    }


def _bytes_of(model: nn.Module) -> int:
    """Returns the bytes of the model's weights as the run computes with them, in fp32 but for codes."""
    tensors: dict[int, Tensor] = {id(each): each for each in (*model.parameters(), *model.buffers())}
    return sum(each.nbytes for each in tensors.values())


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _function(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
