"""Translates from TrainingArguments how long a run is, and when it evaluates, saves and logs."""

from __future__ import annotations

import math

from drivetrain.config.packages import TRACKERS
from drivetrain.config.translation import Fate
from drivetrain.errors import problem
from drivetrain.importing.key_reader import KeyReader


def length(given: KeyReader) -> None:
    """Translates the length: max_steps, if it is set, wins over num_train_epochs."""
    steps = given.count("max_steps", -1)
    epochs = given.number("num_train_epochs", 3.0)
    if steps > 0:
        given.set("max_steps", "loop.steps", steps)
        given.off("num_train_epochs", why="max_steps says it")
    elif epochs == int(epochs):
        given.off("max_steps", why="num_train_epochs says it")
        given.set("num_train_epochs", "loop.epochs", int(epochs), default=3)
    else:
        given.off("max_steps", why="num_train_epochs says it")
        given.lose("num_train_epochs", f"{epochs} is no whole number of epochs; give loop.steps")


def clipping(given: KeyReader) -> None:
    """Translates clipping: at 0 and below nothing is clipped."""
    norm = given.number("max_grad_norm", 1.0)
    given.set("max_grad_norm", "loop.max_grad_norm", norm if norm > 0 else None, default=1.0)


def evaluation(given: KeyReader) -> None:
    key = "eval_strategy" if given.has("eval_strategy") else "evaluation_strategy"
    given.off("eval_strategy" if key == "evaluation_strategy" else "evaluation_strategy", why=f"{key} says it")
    strategy = given.word(key, "no")
    if strategy == "epoch":
        given.set(key, "evaluation.every_epochs", 1)
    elif strategy == "steps":
        given.note(key, "mapped", "evaluation.every_steps says it")
        _every(given, _steps_key(given), "evaluation.every_steps", 500)
    else:
        given.note(key, "changed", "a run evaluates after each epoch")
    if strategy != "steps":
        given.off("eval_steps", why=f"{key} is {strategy}")
    if given.has("per_device_eval_batch_size"):
        size = given.count("per_device_eval_batch_size", 8)
        given.set("per_device_eval_batch_size", "evaluation.batch_size", size, default=8)
    if given.has("metric_for_best_model"):
        metric = str(given.take("metric_for_best_model")).strip().removeprefix("eval_")
        given.set("metric_for_best_model", "evaluation.metric", metric)


def _every(given: KeyReader, key: str, to: str, default: int, why: str = "") -> None:
    """Translates a cadence in steps; between 0 and 1 it is a share of all steps, which max_steps states."""
    every, steps = given.number(key, default), given.count("max_steps", -1)
    if every >= 1:
        given.set(key, to, given.count(key, default), why)
    elif every <= 0:
        raise problem(given.prefix + key, f"{every:g} was given", "give 1 or more, or a share of all steps")
    elif steps > 0:
        given.set(key, to, math.ceil(steps * every), f"{every:g} of {steps} steps{'; ' if why else ''}{why}")
    else:
        given.note(key, "refused", f"a share of all steps; give {to} as a number of steps")


def saving(given: KeyReader) -> None:
    strategy = given.word("save_strategy", "steps")
    if strategy == "steps":
        given.note("save_strategy", "mapped", "checkpoints.every_steps says it")
        if given.number("save_steps", 500) <= 0:
            at_the_end(given, "save_steps")
        elif given.has("save_steps"):
            _every(given, "save_steps", "checkpoints.every_steps", 500, _unsaved(given))
    else:
        fate: Fate = "mapped" if strategy in ("epoch", "best") else "changed"
        given.note("save_strategy", fate, "a run saves at each evaluation and at the end")
        given.off("save_steps", why=f"save_strategy is {strategy}")
    kept = given.count("save_total_limit", 0)
    if kept > 0:
        given.set("save_total_limit", "checkpoints.keep_last", kept)
    elif given.has("save_total_limit"):
        given.note("save_total_limit", "changed", "checkpoints.keep_last sets how many are kept, at least 1")
    if given.switch("load_best_model_at_end"):
        given.note("load_best_model_at_end", "mapped", "the best is kept, and evaluate and predict take it")
    else:
        given.off("load_best_model_at_end", why="the best is kept, and --checkpoint chooses the one to use")


def at_the_end(given: KeyReader, key: str) -> None:
    """Translates a cadence that never comes: there a run saves at its end only, as here with a cadence of its
    length."""
    steps = given.found.translation.settings.get("loop.steps")
    if steps is None:
        given.note(key, "changed", "a run saves at each evaluation and at the end; there at the end only")
    else:
        given.set(key, "checkpoints.every_steps", steps)


def _unsaved(given: KeyReader) -> str:
    """Returns a note if evaluations come at steps that are not saved, the best of which then cannot be kept."""
    saved = given.number("save_steps", 500)
    strategy = given.word("eval_strategy" if given.has("eval_strategy") else "evaluation_strategy", "no")
    evaluated = given.number(_steps_key(given), 500) if strategy == "steps" else 0.0  # epochs end at any step
    if strategy == "no" or saved < 1 or (evaluated >= 1 and evaluated % saved == 0):
        return ""
    return "the best kept is the best of evaluations that fall on a save; leave it out to save at each evaluation"


def _steps_key(given: KeyReader) -> str:
    """Returns the key that states when a run evaluates that does so by steps."""
    return "eval_steps" if given.has("eval_steps") and given.number("eval_steps", 0) != 0 else "logging_steps"


def logging(given: KeyReader) -> None:
    strategy = given.word("logging_strategy", "steps")
    if strategy != "steps":
        given.note("logging_strategy", "changed", "the curve has a point each tracking.log_every steps")
        given.off("logging_steps", why=f"logging_strategy is {strategy}")
        return
    given.off("logging_strategy", why="tracking.log_every says it")
    if given.has_value("logging_steps"):
        _every(given, "logging_steps", "tracking.log_every", 500)


NOBODY = {"none", "", "[]"}


def trackers(given: KeyReader) -> None:
    value = given.take("report_to", [])
    names = [str(name).lower() for name in (value if isinstance(value, list) else [value])]
    wanted = [name for name in names if name not in NOBODY]
    kept = [name for name in wanted if name in TRACKERS]
    others = [name for name in wanted if name not in TRACKERS]
    why = f"{', '.join(others)}: write a tracker and give its import path in tracking.trackers" if others else ""
    if kept:
        given.set("report_to", "tracking.trackers", ["progress", *kept], why)
    elif others:
        given.note("report_to", "refused", why)
    else:
        given.off("report_to", why="it names no tracker; the screen and the run's events.jsonl have the loss")


def names(given: KeyReader) -> None:
    output, name = given.take("output_dir"), given.take("run_name")
    if output is not None:
        given.set("output_dir", "output", str(output))
    if name is None or name == output or str(name).strip() == "":
        given.off("run_name", why="output says it")
        return
    flat = str(name).replace("/", "-").replace("\\", "-")
    given.set("run_name", "name", flat, "a name holds no slash" if flat != name else "")


RHYTHM = (length, clipping, evaluation, saving, logging, trackers, names)
