"""`drivetrain.train`: a run from a run file, from objects, or from both."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain.api.errors import as_a_caller_reads_them
from drivetrain.api.notebook import in_notebook, shown_here
from drivetrain.api.objects import sorted_out, trackers
from drivetrain.api.settings import RunFile, on_this_machine, open_fields, read_run
from drivetrain.checkpoint.directory import read
from drivetrain.config.files import parsed_yaml
from drivetrain.config.load import OPEN
from drivetrain.distributed.rng import restore_rng_state, rng_state
from drivetrain.errors import PeerError, Problem, RankError, RunError, UserError, problem
from drivetrain.launch.auto_choice import Decision, decided_of
from drivetrain.launch.external_launcher import OuterLauncher
from drivetrain.launch.job import Job, Node, Result
from drivetrain.launch.prepare import Checked, judged_here
from drivetrain.launch.start import start_at_terminal
from drivetrain.objects import held
from drivetrain.runtime import scratch
from drivetrain.runtime.atomic_file import writing
from drivetrain.runtime.run_folder import RunFolder, refuse_code_of_folders
from drivetrain.training.report import RunReport

CODES = {130: signal.SIGINT, 143: signal.SIGTERM}


def train(
    run_file: RunFile | None = None,
    *,
    model: nn.Module | Callable[[], nn.Module] | Mapping[str, Any] | None = None,
    train_data: Any = None,
    loss: Any = None,
    evaluation_data: Any = None,
    metrics: Any = None,
    collate: Callable[..., Any] | None = None,
    predict: Callable[..., Any] | None = None,
    loss_sum: Callable[..., Any] | None = None,
    count: Callable[..., int] | None = None,
    splits_batches: bool | None = None,
    tensor_parallel: Mapping[str, str] | None = None,
    optimizer: Any = None,
    schedule: Any = None,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    trust: bool = False,
    set: Mapping[str, Any] | None = None,
    **settings: Any,
) -> RunReport:
    """Trains, and returns the report of the run.

    run_file: the path of a run file, its address in a store (or of a run that was mirrored there), or a mapping of its
    keys. With objects it may be left out.

    model, train_data, loss, evaluation_data, metrics, collate, predict, loss_sum, count, splits_batches,
    tensor_parallel: objects, with the meaning they have in a file of your own (docs/how-to/own-code.md). A model has
    the trained weights afterwards, those of the last step, whatever engine and number of processes trained it.

    optimizer: a name, a mapping (its block of the run file), a class, or a function of parameters. schedule: a name, a
    mapping, or a function of (updates, total_updates) that gives the factor of the peak learning rate.

    resume: go on from the newest good checkpoint. overwrite: replace the run that is in the folder. quiet: print
    warnings only. trust: run Python that the run.yaml of a run's folder names (docs/reference/security.md).

    settings: keys of the run file, as on the command line: the end of a key where it is unique (lr=3e-4, epochs=2), or
    a block as a mapping, which changes the keys that it names (loop={"max_grad_norm": 1.0}). set: keys with dots
    ({"optimizer.lr": 3e-4}).

    Raises UserError if something cannot work, before any work and with every problem; RunError where the run failed.
    Ctrl-C saves and raises KeyboardInterrupt; resume=True then goes on. SIGTERM saves and raises SystemExit(143).
    """
    arguments = {
        "model": model,
        "train_data": train_data,
        "loss": loss,
        "evaluation_data": evaluation_data,
        "metrics": metrics,
        "collate": collate,
        "predict": predict,
        "loss_sum": loss_sum,
        "count": count,
        "splits_batches": splits_batches,
        "tensor_parallel": tensor_parallel,
        "optimizer": optimizer,
        "schedule": schedule,
    }
    with as_a_caller_reads_them(has_objects=model is not None and not isinstance(model, Mapping)):
        if resume and overwrite:
            raise _both()
        ready, objects = prepared(run_file, arguments, settings, set, trust, anew=not resume)
        if ready.is_first and ready.run.nodes == 1 and not (resume or overwrite):
            RunFolder(ready.run.folder).refuse_if_busy()
        result = started(ready, objects, verb="train", resume=resume, overwrite=overwrite, quiet=quiet)
    report = RunReport.model_validate(result.value).within(ready.run.folder.absolute())
    if isinstance(model, nn.Module):
        _take_weights(model, report, ready)
    _pass_on(result.code, report)
    return report


def prepared(
    run_file: RunFile | None,
    arguments: Mapping[str, Any],
    settings: Mapping[str, Any],
    dotted: Mapping[str, Any] | None = None,
    trust: bool = False,
    anew: bool = False,
    **asked: Any,
) -> tuple[Checked, dict[str, Any]]:
    """Returns a run that can start here, and the objects it is made from. Raises UserError with all problems.

    trust: whether Python runs that a run's own run.yaml names. anew: whether the run begins, so that a plan decides
    what is `auto`, and not the run in the folder. asked: checkpoint, data, output, as `judged_here` takes them.
    """
    run_file = None if run_file is None else on_this_machine(run_file)
    try:
        keys, objects = sorted_out(arguments)
    except UserError as error:
        raise UserError([*error.problems, *_of_the_settings(run_file, arguments, settings, dotted)]) from None
    given = {**keys, **settings}
    if "trackers" in given:
        given["trackers"], classes = trackers(given["trackers"])
        objects |= classes
    source, given = _with_length(run_file, given, dotted, "model" in objects), {**given, **(dotted or {})}
    with held.holding(objects):
        choice = _decided(source, given, trust, anew)
        values = {key: parsed_yaml(text) for key, _, text in (each.partition("=") for each in choice.overrides)}
        run, problems, file = read_run(source, {**given, **values})
        if run is not None and file is not None:
            refuse_code_of_folders(run, file, trust)
        ready = judged_here(run, problems, **asked)
    return replace(ready, notices=[*choice.notices, *ready.notices], planned=choice.planned), objects


def _of_the_settings(
    run_file: RunFile | None,
    arguments: Mapping[str, Any],
    settings: Mapping[str, Any],
    dotted: Mapping[str, Any] | None,
) -> list[Problem]:
    """Returns what is wrong with keys of the run file, beside objects that are wrong or missing."""
    keys, problems = {**settings, **(dotted or {})}, []
    if arguments.get("model") is not None and not isinstance(arguments["model"], Mapping):
        if keys.pop("data", None) is not None:
            problems = [Problem("data", "is no argument beside model=", "did you mean train_data?")]
        keys = {"workload": {"type": "objects"}, **keys}
    return [*problems, *read_run(_with_length(run_file, keys, None, "workload" in keys), keys)[1]]


def _decided(source: RunFile | None, given: Mapping[str, Any], trust: bool, anew: bool) -> Decision:
    """Returns what a plan decides of the run's engine and precision."""
    asked = open_fields(source, given)
    if not asked:
        return Decision([])
    base, problems, file = read_run(source, {**given, **{name: OPEN[name] for name in asked}})
    if base is None or problems:
        raise UserError(problems)
    if file is not None:
        refuse_code_of_folders(base, file, trust)
    return decided_of(base, asked, anew)


def _with_length(
    run_file: RunFile | None, given: Mapping[str, Any], dotted: Mapping[str, Any] | None, has_objects: bool
) -> RunFile | None:
    """Sets one epoch where objects are trained and no length is stated, as in a loop of a script."""
    ends = {key.rsplit(".")[-1] for key in (*given, *(dotted or {}))}
    says = ends & {"epochs", "steps"} or ("loop" in given and {"epochs", "steps"} & set(given["loop"]))
    return {"loop": {"epochs": 1}} if run_file is None and has_objects and not says else run_file


def started(ready: Checked, objects: Mapping[str, Any], **job: Any) -> Result:
    """Does a verb's work, in as many processes as the run asks for."""
    task = Job(run=ready.run, notices=ready.notices, planned=ready.planned, **job)
    with held.holding(objects), _sent(objects, task) as sent:
        if _starts_processes(task):
            if task.verb != "train" or not in_notebook():
                return start_at_terminal(sent, Node())
            with shown_here(task.run.folder, task.quiet):
                return start_at_terminal(sent.model_copy(update={"quiet": True}), Node())
        with leaving_no_trace(), _failing_as_a_run():
            return start_at_terminal(sent, Node())


def _starts_processes(task: Job) -> bool:
    outer = OuterLauncher.here()
    return outer is None and (task.run.world_size > 1 or task.max_restarts > 0)


@contextmanager
def _sent(objects: Mapping[str, Any], task: Job) -> Iterator[Job]:
    """While the block runs, keeps the objects where the processes of ranks find them, if any are started."""
    if not objects or not (_starts_processes(task) or task.run.micro_batch_size == "auto"):
        yield task
        return
    from drivetrain.objects import carry

    with writing("the temporary folder", then="start again"):
        own = scratch.make()
    with own as folder:
        with writing(folder):
            carry.write(objects, folder)
        yield task.model_copy(update={"objects": folder})


@contextmanager
def leaving_no_trace() -> Iterator[None]:
    """Restores the caller's random generators and PyTorch's choice of kernels afterwards."""
    state, deterministic = rng_state(), torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        restore_rng_state(state)
        torch.use_deterministic_algorithms(deterministic)


@contextmanager
def _failing_as_a_run() -> Iterator[None]:
    """Turns any error of the user's code in the middle of a run into a RunError, as with a rank's process."""
    try:
        yield
    except (UserError, RunError, RankError, PeerError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError | ValueError | TypeError | LookupError | ArithmeticError | OSError):
            raise RunError(f"{type(error).__name__}: {error}") from error
        raise


def _take_weights(model: nn.Module, report: RunReport, ready: Checked) -> None:
    """Puts the weights of the run's last step into the caller's model, which keeps its devices and dtypes."""
    if report.checkpoint is None:
        return
    saved = read(Path(report.checkpoint))["model"]
    own = model.state_dict()
    if own.keys() != saved.keys() or any(own[name].shape != saved[name].shape for name in own):
        beside = "adapter" if ready.run.adapter is not None else "other layers"
        note = f"the model keeps the weights it had: the run trained it with {beside}"
        warnings.warn(f"{note}; drivetrain.load({str(report.folder)!r}, model=...) gives both", stacklevel=3)
        return
    model.load_state_dict({name: saved[name] for name in own})


def _pass_on(code: int, report: RunReport) -> None:
    if code == 130:
        raise KeyboardInterrupt(f"saved at step {report.steps} in {report.checkpoint}; go on with resume=True")
    if code == 143:
        raise SystemExit(code)


def _both() -> UserError:
    return problem("resume", "resume keeps the run, overwrite replaces it", "give one of them")
