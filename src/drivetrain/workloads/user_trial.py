"""Tries a user's workload on a few of its samples before work starts, so that faults are reported at once: definitions
that do not fit each other, and losses that are not made of the losses of single samples."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.data.streams.endless import draws
from drivetrain.distributed.rng import restore_rng_state, rng_state
from drivetrain.errors import problem
from drivetrain.memory.shortage import give_back, is_shortage
from drivetrain.workloads.base import Batch, Workload
from drivetrain.workloads.loss_contract import NO_CONTEXT
from drivetrain.workloads.loss_cuts import FEWEST, MOST, OF_A_LOSS, OF_A_MODEL, check_adds_up, off_zero, varied_samples
from drivetrain.workloads.user_file import FIELD, UserFile
from drivetrain.workloads.user_loss import SummedLoss
from drivetrain.workloads.user_metrics import OfAllSamples
from drivetrain.workloads.user_task import Classes, Task, Unknown, task_of
from drivetrain.workloads.user_terms import UserTerms

NEEDS_ALL = "set splits_batches = False if it needs its whole batch"
FIX_LOSS = (
    "where targets are ignored, give nn.CrossEntropyLoss(ignore_index=...) itself; for a mean weighted by class, or "
    "over some targets only, define loss_sum(model, batch), with reduction='sum', and count(batch), the number of "
    f"targets, in place of loss; {NEEDS_ALL}"
)
FIX_SUM = f"give a sum over the batch's targets (reduction='sum'), no mean, and let count(batch) divide; {NEEDS_ALL}"
FIX_COUNT = f"count each sample's targets, whatever other samples are beside it; {NEEDS_ALL}"


class Trial:
    """Tries the workload that a user's file defines. loss, terms: the file's, of which one is there."""

    def __init__(self, workload: Workload, file: UserFile, loss: SummedLoss | None, terms: UserTerms | None) -> None:
        self._workload, self._file, self._loss, self._terms = workload, file, loss, terms

    def passed(self) -> Task:
        """Runs two samples through everything, and some in parts. Returns what predictions of the model mean. Raises
        UserError for what cannot be trained."""
        state = rng_state()
        try:
            with self._file.telling("two samples could not be tried"):
                samples = [self._workload.train.load(index, 0) for index in draws(self._workload.train, 2)]
                model = self._workload.build_model().eval()
                task = self._tried(model, self._workload.collate(samples))
            if self._workload.splits_batches and len(draws(self._workload.train, 2)) > 1:
                with self._file.telling("some samples at once and in parts could not be tried"), off_zero(model):
                    self._check_with_what_fits(model)
            return task
        finally:
            restore_rng_state(state)

    def _tried(self, model: nn.Module, batch: Batch) -> Task:
        if self._loss is None:
            assert self._terms is not None
            self._terms.tried(model, batch, len(draws(self._workload.train, 2)))
            return self._task_without_loss(model, batch)
        if "target" not in batch:
            has = ", ".join(map(repr, batch))
            raise problem(FIELD, f"a batch has no 'target', but {has}", "name it so, or define loss_sum and count")
        output, target = output_of(model, batch), batch["target"]
        if self._loss.needs_whole_numbers(output, target):
            raise self._loss.no_classes(f"{self._file.path}: train_data gives", target)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            summed = self._loss(output, target)
        if not isinstance(summed, Tensor) or summed.numel() != 1:
            raise problem(FIELD, f"the loss gives {_described(summed)}, not one number", "give the mean")
        if any("target size" in str(warning.message) for warning in caught):  # MSELoss and its like warn only
            shapes = f"the output is {tuple(output.shape)}, the target {tuple(target.shape)}"
            raise problem(FIELD, f"{shapes}: the loss would compare each with all", "give them one shape")
        self._try_metrics(output, target)
        return task_of(output, target, self._loss)

    def _task_without_loss(self, model: nn.Module, batch: Batch) -> Task:
        """Returns the meaning of predictions beside a loss_sum: class numbers as targets and as many scores are
        classes."""
        target = batch.get("target")
        if target is None:
            return Unknown()
        try:
            output = output_of(model, batch)
        except Exception:  # loss_sum may call the model in another way
            if self._file.has("metrics"):  # which need its output
                raise
            return Unknown()
        self._try_metrics(output, target)
        is_class = target.dim() == 1 and not target.is_floating_point() and output.dim() == 2
        return Classes(output.shape[1], None) if is_class else Unknown()

    def _try_metrics(self, output: Tensor, target: Tensor) -> None:
        """Raises UserError for objects that are no metrics. A function may fail on two samples (a correlation of them,
        say) where it works on all, so a ValueError and a division by zero are left to the evaluation."""
        for metric in self._workload.metrics().values() if self._file.has("metrics") else ():
            if isinstance(metric, OfAllSamples):
                metric.try_out(output.detach(), target)

    def _check_with_what_fits(self, model: nn.Module) -> None:
        """Runs the check below with as many samples as memory has room for; two were run before."""
        most = MOST
        while True:
            try:
                return self._check_that_it_splits(model, most)
            except Exception as error:
                if most <= FEWEST or not is_shortage(error):
                    raise
            most //= 2
            give_back()

    def _check_that_it_splits(self, model: nn.Module, most: int) -> None:
        """Raises UserError if the loss of up to `most` samples is not made of the losses of each, or their count."""
        samples = varied_samples(self._workload.train, self._workload.collate, model, most)
        name, count, batch = self._file.path.name, len(samples), self._workload.collate(samples)
        if self._loss is not None:
            loss, output, target = self._loss, output_of(model, batch).detach(), batch["target"]
            if len(output) == len(target) == count:  # else samples lie end to end, or behind another dimension
                called = f"{name}: the loss of"
                check_adds_up(called, count, lambda part: loss(output[part], target[part]).item(), OF_A_LOSS, FIX_LOSS)
                return

        def cut(part: slice) -> Batch:
            if all(tensor.dim() and len(tensor) == count for tensor in batch.values()):
                return {name: tensor[part] for name, tensor in batch.items()}  # padded alike
            return self._workload.collate(samples[part])

        context = NO_CONTEXT if self._terms is None else self._terms.tried(model, batch, count)

        def loss_of(part: slice, term: str) -> float:
            own = torch.arange(count)[part] if self._workload.has_statistics else None
            within = replace(context, statistics=replace(context.statistics, own=own))
            return self._workload.loss_sums(model, cut(part), within)[term].item()

        for term in self._workload.terms:
            several = self._terms is not None and self._terms.has_terms
            counted = f"counts gives as {term}" if several else "count gives"
            of_term = functools.partial(lambda term, part: self._workload.counts(cut(part))[term], term)
            check_adds_up(f"{name}: what {counted} for", count, of_term, 0.0, FIX_COUNT)
            called, fix = ("loss_sum gives", FIX_SUM) if self._loss is None else ("the loss gives", FIX_LOSS)
            called = f"loss_terms gives as {term}" if several else called
            of_loss = functools.partial(lambda term, part: loss_of(part, term), term)
            check_adds_up(f"{name}: what {called} for", count, of_loss, OF_A_MODEL, fix)


def output_of(model: nn.Module, batch: Batch) -> Tensor:
    inputs = {name: tensor for name, tensor in batch.items() if name != "target"}
    output = model(inputs["input"]) if set(inputs) == {"input"} else model(**inputs)
    output = getattr(output, "logits", output)
    if not isinstance(output, Tensor):
        raise problem(FIELD, f"the model gives {_described(output)}, no tensor", "define loss_sum and count")
    return output


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
