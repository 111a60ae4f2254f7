"""The model card: where an export comes from, what it was trained on, how it was verified, and how it is used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

from drivetrain.export.formats import IMAGES, LANGUAGE, STEPS, TEXTS
from drivetrain.export.source import Source
from drivetrain.export.verification import Verdict
from drivetrain.export.verification_rows import rows
from drivetrain.export.written import Written
from drivetrain.models.preprocessing import FILE as PREPROCESSING

CARD, SCRIPT = "README.md", "use.py"
TASKS = {
    LANGUAGE: "text-generation",
    TEXTS: "text-classification",
    STEPS: "token-classification",
    IMAGES: "image-classification",
}
UNKNOWN = "unknown"  # the hub's value where no licence is stated


def write_card(source: Source, verdict: Verdict, report: dict[str, Any], written: Written, folder: Path) -> None:
    """Writes README.md with the hub's metadata, and use.py where the format comes with a script."""
    parts = [*_metadata(source), "", f"# {source.run.name}", "", *_origin(source, report)]
    parts += [*_verification(source, verdict), *_preparation(folder), *_use(source, written)]
    (folder / CARD).write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
    if written.script:
        (folder / SCRIPT).write_text(written.script, encoding="utf-8")


def _metadata(source: Source) -> Iterator[str]:
    base = source.run.workload.base
    is_local = base is None or Path(base).expanduser().exists()
    yield "---"
    yield f"license: {source.request.license or _license_of(base)}"
    if source.kind in TASKS:
        yield f"pipeline_tag: {TASKS[source.kind]}"
    if source.request.of.library is not None:
        yield f"library_name: {source.request.of.library}"
    if base is not None:
        yield f"base_model: {json.dumps(Path(base).name if is_local else base, ensure_ascii=False)}"
    yield "tags: [drivetrain]"
    metrics = {name: value for name, value in source.report.get("metrics", {}).items() if isfinite(value)}
    if metrics:
        yield "model-index:"
        yield f"- name: {json.dumps(source.run.name, ensure_ascii=False)}"
        yield "  results:"
        yield f"  - task: {{type: {TASKS.get(source.kind, 'other')}}}"
        yield "    dataset: {name: evaluation data of the run, type: own}"
        yield "    metrics:"
        for name, value in metrics.items():
            yield f"    - {{type: {json.dumps(name)}, value: {value:.6g}}}"
    yield "---"


def _license_of(base: str | None) -> str:
    """Returns the licence that a local base's own card states; unknown else."""
    card = Path(base or "").expanduser() / CARD
    if base is None or not card.is_file():
        return UNKNOWN
    head = card.read_text(encoding="utf-8", errors="replace").split("---")
    lines = head[1].splitlines() if len(head) > 2 else []
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("license:")), "")
    return found or UNKNOWN


def _origin(source: Source, report: dict[str, Any]) -> Iterator[str]:
    run = source.run
    article = "An" if source.kind[0] in "aeiou" else "A"
    yield f"{article} {source.kind}, trained with Drivetrain and exported to {source.request.of.name}."
    yield ""
    yield "| | |"
    yield "|---|---|"
    yield f"| checkpoint | {report['checkpoint']} (step {report['step']:,}) |"
    yield f"| numbers | {report['numbers']} |"
    if run.workload.base is not None:
        yield f"| started from | {_shown(run.workload.base)} |"
    if run.adapter is not None:
        kept = "apart" if source.request.of.needs_adapter else "merged into the weights"
        yield f"| adapters | {', '.join(each.method for each in run.adapter)}, {kept} |"
    for path, field in run.workload.sources:
        yield f"| {field.removeprefix('workload.data.')} data | {_shown(path)} |"
    for name, value in source.report.get("data", {}).items():
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            yield f"| {name.replace('_', ' ')} | {value} |"
    yield f"| training | precision {run.precision}, seed {run.seed}, global batch {run.batch_size} |"
    for name, value in source.report.get("metrics", {}).items():
        yield f"| {name} (last evaluation of the run) | {value:.6g} |"
    yield f"| versions | {', '.join(f'{name} {value}' for name, value in report['versions'].items())} |"
    yield f"| licence of the base | {_license_of(run.workload.base)} |"
    yield "| licence of the data | see their source |"
    yield ""
    for note in source.notes:
        yield f"Note: {note}."
        yield ""


def _shown(path: str) -> str:
    """Returns a hub id as it is, and of a path here only its name: folders of a machine mean nothing elsewhere."""
    return Path(path).name if Path(path).expanduser().exists() or Path(path).is_absolute() else path


def _verification(source: Source, verdict: Verdict) -> Iterator[str]:
    yield "## Verified"
    yield ""
    runtime = " ".join(f"{name} {version}" for name, version in verdict.software.items())
    yield (
        f"Loaded back by {source.request.of.loaded_by} ({runtime}) in a process of its own and compared with the run's "
        f"model in fp32 on {verdict.samples} evaluation samples:"
    )
    yield ""
    yield "| | run | export |"
    yield "|---|---|---|"
    yield from (f"| {name} | {before} | {after} |" for name, before, after in rows(verdict))
    yield ""
    if not verdict.holds:
        yield "**Accepted although it is over its bound:** " + "; ".join(verdict.failures) + "."
        yield ""


def _preparation(folder: Path) -> Iterator[str]:
    file = folder / PREPROCESSING
    if not file.is_file():
        return
    known = json.loads(file.read_text(encoding="utf-8"))
    crop = known["crop_size"]
    yield "## Pictures"
    yield ""
    resized = f"shorter side to {crop['height']}, middle cut out" if known["do_center_crop"] else "whole picture"
    yield (
        f"Resized to {crop['height']} x {crop['width']} ({resized}, bilinear), "
        f"{'RGB' if known['do_convert_rgb'] else 'grey'}, divided by 255, less the mean {known['image_mean']}, divided "
        f"by the deviation {known['image_std']}, channels first."
    )
    yield ""


def _use(source: Source, written: Written) -> Iterator[str]:
    script = written.script or _plain_use(source)
    if script:
        yield "## Use"
        yield ""
        yield from ("```python", script.rstrip(), "```")


def _plain_use(source: Source) -> str:
    if source.request.of.needs_adapter:
        base = json.dumps(_shown(source.run.workload.base or ""), ensure_ascii=False)
        load = f"base = {source.auto_class}.from_pretrained({base})\nmodel = PeftModel.from_pretrained(base, '.')"
        return f"from peft import PeftModel\nfrom transformers import {source.auto_class}\n\n{load}"
    if source.auto_class:
        return f"from transformers import {source.auto_class}\n\nmodel = {source.auto_class}.from_pretrained('.')"
    return ""
