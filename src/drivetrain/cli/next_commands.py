"""The commands that a user may type once a run has ended."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from drivetrain.config.adapter import PROMPTS
from drivetrain.config.run import RunConfig


def next_commands(
    run_file: Path | str, overrides: Sequence[str], run: RunConfig, status: str, evaluated: bool = True
) -> list[tuple[str, str]]:
    """Returns (purpose, command) pairs for a run that was started with this run file and these overrides.

    evaluated: whether it has evaluation data, for which predictions can be made.
    """
    typed = shlex.join([str(run_file), *overrides])
    folder = shlex.quote(str(run.folder))
    if status == "interrupted":
        return [("go on", f"drivetrain train {typed} --resume")]
    length = "loop.steps" if run.loop.steps is not None else "loop.epochs"
    kept = [each for each in overrides if not length.endswith(each.partition("=")[0])]
    resumed = shlex.join([str(run_file), *kept])
    longer = f"{length}={2 * (run.loop.steps or run.loop.epochs or 1)}"
    writes_texts = run.workload.auto_class == "AutoModelForCausalLM"
    output = shlex.quote(f"{run.name}-predictions.{'jsonl' if writes_texts else 'csv'}")
    predict = [("predict", f"drivetrain predict {typed} --output {output}")]
    ask = [("ask it", f"drivetrain chat {folder}"), ("serve it", f"drivetrain serve {folder}")]
    exported = shlex.quote(f"{run.folder}-exported")
    export = f"drivetrain export {folder} --to transformers --output {exported}"
    return [
        *(ask if writes_texts else []),
        *([("merge into the base, verified", export)] if _merges(run) else []),
        *(predict if evaluated else []),  # else there are no evaluation data to predict for
        ("its page", f"drivetrain report {folder} --output {shlex.quote(f'{run.folder}/page.html')}"),
        ("train longer", f"drivetrain train {resumed} {longer} --resume"),
    ]


def _merges(run: RunConfig) -> bool:
    """Returns whether the run has adapters that become a part of a Transformers model's weights."""
    adapters = run.adapter or ()
    return (
        bool(adapters) and run.workload.described_model is not None and not {a.method for a in adapters} & set(PROMPTS)
    )
