"""Live progress on a terminal; plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from drivetrain.tracking.events import (
    CheckpointSaved,
    CheckpointUploaded,
    Evaluated,
    EvaluationProgress,
    Event,
    Generated,
    MixtureEvaluated,
    RolledOut,
    RunFinished,
    RunStarted,
    StepDone,
    Tracker,
    Troubled,
    Warned,
)
from drivetrain.tracking.quantities import rate_text, set_text, size_text

PLAIN_LINE_SECONDS = 5.0  # off a terminal: at most one line of the curve in this time


SHOWN = 160  # characters of a text


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text.replace("\n", "↵"))


def _cut(line: str, from_end: bool = False) -> str:
    if len(line) <= SHOWN:
        return line
    return f"...{line[-SHOWN:]}" if from_end else f"{line[:SHOWN]}..."


def _fact(value: str | int | float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _telling(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts of a start that fit into its line, without those that others say already."""
    shown = {key: value for key, value in facts.items() if isinstance(value, str | int | float)}
    whole = shown.get("global_parameters")
    same = {key for key in ("local_parameters", "trained_parameters") if shown.get(key) == whole}
    same |= {"world_size"} if shown.get("world_size") == 1 else set()
    same |= {key for key in ("evaluation_samples", "rows_dropped") if shown.get(key) == 0}
    names = {"global_parameters": "parameters", "world_size": "ranks"}
    return {names.get(key, key): value for key, value in shown.items() if key not in same}


def _of_answers(metrics: Mapping[str, float]) -> str:
    """Returns the mean reward of a batch of answers, and the share of its groups from which nothing is learned."""
    names = {"reward": ("reward", ".4f"), "groups_without_signal": ("no signal", ".0%")}
    return "".join(f"{text} {metrics[name]:{form}}  " for name, (text, form) in names.items() if name in metrics)


def plain_console() -> Console:
    """Lines of text on sys.stderr, also where that is a notebook's: rich would show each as HTML of its own."""
    return Console(file=sys.stderr, force_jupyter=False, force_terminal=False, highlight=False)


class ProgressTracker(Tracker):
    """Writes to stderr, so that stdout holds results only. quiet: warnings and failures only."""

    def __init__(self, quiet: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._total = 0
        self._last_line = 0.0
        self._last_answers, self._is_silent = 0.0, True
        self._answers = ""  # the newest batch of answers, as step lines have it

    def handle(self, event: Event) -> None:
        match event:
            case Warned():
                self._print(f"[yellow]note[/] {escape(event.message)}")
            case Troubled() if event.action != "stopped":  # else it is the run's error
                self._print(f"[yellow]{event.trouble.replace('_', ' ')}[/] {escape(event.message)}")
            case RunStarted() if not self._quiet:
                self._start(event)
            case StepDone() if not self._quiet:
                self._step(event)
            case EvaluationProgress() if not self._quiet:
                self._doing(f"evaluating {event.done:,} of {event.total:,} samples", event.step)
            case Evaluated() | MixtureEvaluated() | Generated() | RolledOut() if not self._quiet:
                self._results(event)
            case CheckpointSaved() if not self._quiet and not self._console.is_terminal:
                self._print(f"step {event.step:>6}  saved {escape(event.path)} ({size_text(event.bytes)})")
            case CheckpointUploaded() if not self._quiet and not self._console.is_terminal:
                self._print(f"step {event.step:>6}  uploaded {escape(event.path)} ({size_text(event.bytes)})")
            case RunFinished() if event.status != "failed" and not self._quiet:
                self._finish(event)

    def _results(self, event: Event) -> None:
        match event:
            case RolledOut():
                self._rolled_out(event)
            case Evaluated():
                values = "  ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
                best = "  [green]best[/]" if event.best else ""
                self._print(f"step {event.step:>6}  evaluation  {values}  ({event.seconds:.1f} s){best}")
                if self._bar is not None:
                    self._bar.update(self._task, description="evaluated")
            case MixtureEvaluated():
                for each in event.sets:
                    self._print(f"step {event.step:>6}  {escape(set_text(each))}")
            case Generated():
                for sample in event.samples:
                    self._sample(event.step, sample)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, line: str) -> None:
        (self._bar.console if self._bar else self._console).print(line, soft_wrap=True)

    def _start(self, event: RunStarted) -> None:
        self._total = event.total_steps
        facts = ", ".join(f"{key.replace('_', ' ')} {_fact(value)}" for key, value in _telling(event.facts).items())
        self._print(f"[bold]{escape(event.name)}[/] → {escape(event.output)}")
        self._print(f"[dim]{escape(facts)}[/]")
        if event.first_step:
            self._print(f"resumed after step {event.first_step} of {event.total_steps}")
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=30),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                TextColumn("eta"),
                TimeRemainingColumn(elapsed_when_finished=False),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("starting", total=event.total_steps, completed=event.first_step)
            self._bar.start()

    def _step(self, event: StepDone) -> None:
        scale = "" if event.scale is None else f"  scale {event.scale:g}  skipped {event.skipped_steps}"
        terms = "".join(f"  {name} {value:.4f}" for name, value in event.terms.items() if name != "loss")
        text = f"{self._answers}loss {event.loss:.4f}{terms}  norm {event.grad_norm:.3g}  lr {event.lr:.2e}{scale}"
        rate = f"{rate_text(event.samples_per_second)} samples/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=event.step, description=f"{text}  {rate}")
        elif time.perf_counter() - self._last_line >= PLAIN_LINE_SECONDS or event.step == self._total:
            self._last_line = self._last_answers = time.perf_counter()
            self._is_silent = False
            done = event.step / self._total
            self._print(f"step {event.step:>6}/{self._total} ({done:.0%})  epoch {event.epoch:.2f}  {text}  {rate}")

    def _rolled_out(self, event: RolledOut) -> None:
        """Shows a batch of answers where no step was shown since the last one: off a terminal long steps say nothing
        else until the next point of the curve."""
        self._answers = _of_answers(event.metrics)
        text = f"learning from new answers  {self._answers.rstrip()}"
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        elif self._is_silent and time.perf_counter() - self._last_answers >= 2 * PLAIN_LINE_SECONDS:
            self._last_answers = time.perf_counter()
            self._print(f"step {event.step + 1:>6}  {text}")
        self._is_silent = True

    def _doing(self, text: str, step: int) -> None:
        """Shows what goes on between two steps."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        elif time.perf_counter() - self._last_line >= PLAIN_LINE_SECONDS:
            self._last_line = time.perf_counter()
            self._print(f"step {step:>6}  {text}")

    def _sample(self, step: int, sample: dict[str, Any]) -> None:
        """Prints the end of the prompt, the beginnings of answers, a line each."""
        prompt, answer = _line(sample["prompt"]), _line(sample["answer"])
        self._print(f"step {step:>6}  prompt     [dim]{escape(_cut(prompt, from_end=True))}[/]")
        self._print(f"{'':>11}  answer     {escape(_cut(answer))}")
        if "reference_model" in sample:
            self._print(f"{'':>11}  ref. model {escape(_cut(_line(sample['reference_model'])))}")
        if sample["reference"] is not None:
            self._print(f"{'':>11}  reference  [dim]{escape(_cut(_line(sample['reference'])))}[/]")

    def _finish(self, event: RunFinished) -> None:
        self.close()
        self._print(escape(event.message))
