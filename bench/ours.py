"""drivetrain's side of a bench: `python bench/ours.py RUN.yaml RESULT.json` does what `drivetrain train RUN.yaml` does.

The same call as the command's, with its trackers and cadences, timed from reading the run file on; importing libraries
comes before, as on the other sides.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers
from memory import Resident

from drivetrain.config import rules
from drivetrain.config.load import load
from drivetrain.config.notices import notices
from drivetrain.config.resolve import resolved
from drivetrain.config.run import RunConfig
from drivetrain.errors import UserError
from drivetrain.runtime.hardware import detect
from drivetrain.tracking.jsonl import read_events
from drivetrain.training import loop
from drivetrain.training import run as training


def main(run_file: Path, result_file: Path) -> None:
    warm_imports()
    resident = Resident()
    start = time.perf_counter()
    busy = processor_seconds_of_the_loop()
    config = checked(run_file)
    machine = detect(config.device)
    report, code = training.run(config, machine, notices(config, machine), overwrite=True)
    wall = time.perf_counter() - start
    assert code == 0, "the run was interrupted"
    evaluation = report.seconds_by_part.get("evaluation", 0.0)
    points = [event for event in read_events(config.folder / "events.jsonl") if event["event"] == "step"]
    result = {
        "rate": report.samples / (wall - evaluation),
        "loop_seconds": report.seconds - evaluation,
        "loop_processor_seconds": busy["loop"] - busy["save"],
        "samples": report.samples,
        "memory": resident.added(),
        "losses": {point["step"]: point["loss"] for point in points},
        "metrics": report.metrics,
        "parts": report.seconds_by_part,
        "emulated": report.emulated,
    }
    result_file.write_text(json.dumps(result))


def processor_seconds_of_the_loop() -> dict[str, float]:
    """Returns what gets the processor seconds of this process, once they are spent: of the training loop, and of the
    saves within it."""
    found = {"loop": 0.0, "save": 0.0}

    def timed(work: Any, part: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            before = time.process_time()
            try:
                return work(*args, **kwargs)
            finally:
                found[part] += time.process_time() - before

        return run

    training.train = timed(training.train, "loop")
    loop._save = timed(loop._save, "save")  # type: ignore[attr-defined]
    return found


def warm_imports() -> None:
    """Transformers and drivetrain import lazily: what a run uses, before the clock starts."""
    classes = ("ResNetForImageClassification", "BertForSequenceClassification", "BertTokenizerFast", "LlamaForCausalLM")
    for name in classes:
        getattr(transformers, name)
    for name in ("image_classification", "text_classification", "language_model"):
        import_module(f"drivetrain.workloads.{name}")
    for name in ("peft", "bitsandbytes"):
        if find_spec(name) is not None:
            import_module(name)


def checked(run_file: Path) -> RunConfig:
    config, problems = load(run_file)
    if config is None or problems:
        raise UserError(problems)
    machine = detect(config.device)
    problems = rules.check(config, machine)
    if problems:
        raise UserError(problems)
    return resolved(config, machine)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
