"""`drivetrain.predict` and `drivetrain.evaluate`: from a run's folder, a run file, or a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain.api.errors import as_a_caller_reads_them
from drivetrain.api.loading import load
from drivetrain.api.training import leaving_no_trace, prepared, started
from drivetrain.config.engines import SINGLE
from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.errors import problem
from drivetrain.inference import verbs
from drivetrain.inference.remote_places import checkpoint_here, here
from drivetrain.inference.run_sources import Folder, run_of
from drivetrain.numerics.torch_precision import arithmetic
from drivetrain.objects.held import missing
from drivetrain.runtime.hardware import detect
from drivetrain.runtime.run_folder import RunFolder, refuse_code_of_folders
from drivetrain.training.report import RunReport
from drivetrain.workloads.user_file import UserFile
from drivetrain.workloads.user_loss import SummedLoss
from drivetrain.workloads.user_task import Classes, Task, Unknown, task_of

COMPUTED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # dtypes that a model may compute in


def predict(
    model: Folder | nn.Module,
    data: Any = None,
    *,
    checkpoint: str = "best",
    loss: Any = None,
    batch_size: int | None = None,
    trust: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yields one row a sample, in order, as `drivetrain predict` writes them.

    model: a run's folder (or its report), or a model. For a folder, data are the path of a file or folder, texts (a
    list of them, or one in a list), or None for the evaluation data; for a run of your own Python, a data set as well.

    For a model, data are a data set or a list: of (input, target) pairs, of inputs alone, or of dicts. Rows then hold
    "sample" and "prediction": the model's own output, or classes and their probabilities if its targets are class
    numbers, or if `loss` takes scores of classes (nn.CrossEntropyLoss(), also for a model trained with loss_sum).

    It computes in this process, on one device. Raises UserError before the first row.
    """
    if isinstance(model, nn.Module):
        with as_a_caller_reads_them(has_objects=True):
            return _rows_of(model, _samples(data), SummedLoss(loss) if loss is not None else None, batch_size or 64)
    with as_a_caller_reads_them():
        run = run_of(model)
        refuse_code_of_folders(run, RunFolder(run.folder).run_file, trust)
        if run.workload.described_model is None and data is not None and not isinstance(data, str | os.PathLike):
            given = _loss_of(run) if loss is None else loss
            own = None if given is None else SummedLoss(given)  # None: the file has loss_sum and count
            return _rows_of(load(model, checkpoint, trust=trust), _samples(data), own, batch_size or 64)
        return _as_the_verb(run, checkpoint, data, batch_size)


def _as_the_verb(run: RunConfig, checkpoint: str, data: Any, batch_size: int | None) -> Iterator[dict[str, Any]]:
    alone: dict[str, Any] = {"engine": SINGLE, "processes": None, "nodes": 1, "batch_size": run.global_batch}
    run = run.model_copy(update={**alone, "batch_size_per_device": None})
    if batch_size is not None:
        run = run.model_copy(update={"evaluation": run.evaluation.model_copy(update={"batch_size": batch_size})})
    if run.micro_batch_size == "auto":
        run = run.model_copy(update={"micro_batch_size": None})
    texts = [data] if isinstance(data, str) and not Path(data).exists() and " " in data else data
    is_path = isinstance(texts, str | os.PathLike)
    if not (is_path or texts is None or (isinstance(texts, Sequence) and all(isinstance(t, str) for t in texts))):
        why = f"a {type(data).__name__} was given, and this run reads files"
        raise problem("data", why, "give the path of a file or folder, a list of texts, or a model: predict(net, data)")
    path = os.fspath(texts) if isinstance(texts, str | os.PathLike) else None
    machine, listed = detect(run.device), () if is_path or texts is None else list(texts)
    rows = verbs.rows_in_arithmetic(run, machine, checkpoint, path, listed)
    return _begun(rows, run, machine)


def _begun(rows: Iterator[dict[str, Any]], run: RunConfig, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yields the same rows, the first of which is made at once, so that an error is raised by the call, not in the
    loop. Between rows the caller's code runs with its own generators and switches of PyTorch."""
    with leaving_no_trace(), arithmetic(run.precision_spec, machine):  # the run seeds them while it is built
        first = list(zip(range(1), rows, strict=False))

    def going_on() -> Iterator[dict[str, Any]]:
        yield from (row for _, row in first)
        while True:
            with as_a_caller_reads_them(), _deterministic(run.deterministic), arithmetic(run.precision_spec, machine):
                try:
                    row = next(rows)
                except StopIteration:
                    return
            yield row

    return going_on()


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """While the block runs, PyTorch chooses kernels as the run does."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def evaluate(
    run: Folder | Mapping[str, Any] | None = None,
    checkpoint: str = "best",
    *,
    model: nn.Module | None = None,
    evaluation_data: Any = None,
    train_data: Any = None,
    loss: Any = None,
    metrics: Any = None,
    collate: Any = None,
    predict: Callable[..., Any] | None = None,
    loss_sum: Callable[..., Any] | None = None,
    count: Callable[..., int] | None = None,
    splits_batches: bool | None = None,
    tensor_parallel: Mapping[str, str] | None = None,
    trust: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Evaluates a checkpoint of a run; returns {"checkpoint", "metrics", "samples", "seconds"}.

    run: a run's folder, its report, or a run file. model, evaluation_data, loss, metrics, collate, predict, loss_sum,
    count, splits_batches, tensor_parallel: the objects of a run that was trained on objects, as `drivetrain.train` got
    them; evaluation_data may stand for train_data. settings: keys of the run file (engine="ddp", processes=2). Raises
    UserError, RunError.
    """
    checkpoint = checkpoint_here(checkpoint)
    place = run.folder if isinstance(run, RunReport) else run
    if isinstance(place, str | os.PathLike):
        place = here(os.fspath(place), [checkpoint], "run")
    file: Any = place
    if isinstance(place, str | os.PathLike) and Path(place).is_dir():
        file, settings = RunFolder(Path(place)).run_file, {"output": Path(place), **settings}
    data = evaluation_data if train_data is None else train_data
    arguments = {"model": model, "train_data": data, "evaluation_data": evaluation_data, "loss": loss}
    with as_a_caller_reads_them(has_objects=model is not None):
        if isinstance(place, str | os.PathLike) and file is not place:
            run_of(place)  # which says what is wrong with the folder
        arguments |= {"metrics": metrics, "collate": collate, "predict": predict, "loss_sum": loss_sum, "count": count}
        arguments |= {"splits_batches": splits_batches, "tensor_parallel": tensor_parallel}
        ready, objects = prepared(file, arguments, settings, trust=trust, checkpoint=checkpoint)
        found: dict[str, Any] = started(ready, objects, verb="evaluate", checkpoint=checkpoint).value
    return found


# --- of a model -------------------------------------------------------------------------------------------------------


def _samples(data: Any) -> Any:
    """Returns samples by number. Raises UserError for what has none: batches, a text, a mapping of columns."""
    fix = "give a data set or a list: of (input, target) pairs, of inputs, or of dicts"
    if isinstance(data, DataLoader):
        raise problem("data", "a DataLoader was given, which has batches", "give its data set, and batch_size=...")
    if isinstance(data, str | bytes | Mapping):
        raise problem("data", f"a {type(data).__name__} was given, and a model takes samples", fix)
    if isinstance(data, Tensor) or (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        return data
    if isinstance(data, Iterable):
        return list(data)
    raise problem("data", f"a {type(data).__name__} was given", fix)


def _loss_of(run: RunConfig) -> Any:
    code = run.workload.code_file
    if code is None:
        raise missing()
    return UserFile(code.path, code.options).get("loss")


def _rows_of(model: nn.Module, samples: Any, loss: SummedLoss | None, size: int) -> Iterator[dict[str, Any]]:
    """Yields rows of a model in evaluation mode, and restores the mode of each of its modules; it stays on its
    device."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    dtype = next((p.dtype for p in model.parameters() if p.dtype in COMPUTED), torch.float32)
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        for start in range(0, len(samples), size):
            batch = [samples[index] for index in range(start, min(start + size, len(samples)))]
            inputs, target = _collated(batch, device, dtype)
            with torch.no_grad():
                output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
            output = getattr(output, "logits", output)
            found: Task = _task_by_target(output, target) if loss is None else _task(output, target, loss)
            for number, row in enumerate(found.predictions(output)):
                yield {"sample": start + number, **(row if isinstance(row, dict) else {"prediction": row})}
    finally:
        for module, was in modes:  # frozen parts may evaluate while the rest trains
            module.training = was


def _collated(batch: list[Any], device: torch.device, dtype: torch.dtype) -> tuple[Any, Tensor | None]:
    """Returns inputs and targets of samples: pairs, dicts (with a key "target"), or inputs alone. dtype:
    the one that inputs get which are floating-point numbers."""
    from torch.utils.data import default_collate

    merged = default_collate(batch)
    target = None
    if isinstance(merged, list | tuple):
        merged, target = (merged[0], merged[1]) if len(merged) > 1 else (merged[0], None)
    if isinstance(merged, dict):
        target = merged.get("target")
        return {name: _placed(each, device, dtype) for name, each in merged.items() if name != "target"}, target
    return _placed(merged, device, dtype), target


def _placed(given: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(given, Tensor):
        return given
    return given.to(device=device, dtype=dtype if given.is_floating_point() else given.dtype)


def _task_by_target(output: Tensor, target: Tensor | None) -> Task:
    """Returns how outputs are read without a loss: as scores of classes if targets are class numbers."""
    is_class = target is not None and target.dim() == 1 and not target.is_floating_point() and output.dim() == 2
    return Classes(output.shape[1], None) if is_class else Unknown()


def _task(output: Tensor, target: Tensor | None, loss: SummedLoss) -> Task:
    """Returns how outputs are read, chosen by the loss. For inputs alone: scores of classes if the loss takes them."""
    if target is None:
        classes = output.dim() == 2 and loss.ignored is not None
        target = torch.zeros(len(output), dtype=torch.int64) if classes else torch.zeros_like(output)
    return task_of(output, target.to(output.device), loss)
