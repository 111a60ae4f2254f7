"""A workload from a Python file of the user's, which defines no more than a tutorial's script.

    model = nn.Linear(10, 1)                       or  def build_model(): ...
    train_data = TensorDataset(inputs, targets)    or  def train_data(): ...      a Dataset or list of pairs or dicts
    loss = nn.MSELoss()                            or  def loss(output, target): ...        giving a mean

and, if wanted:

    evaluation_data                 as train_data
    collate(samples)                → a dict of tensors; the model gets all but "target"
    metrics                         a dict of metrics over (output, target): functions that give a number, or objects
                                    of torchmetrics' kind; or one function, or a function that makes such a dict
    predict(output)                 → one row a sample
    loss_sum(model, batch), count(batch)    in place of loss: the sum over the batch's targets, and their number
    loss_terms(model, batch), counts(batch)     in place of those: dicts of a sum and a count for each of several terms
    term_weights                    weights of the terms, 1 each
    statistics(model, batch)        what the loss must know of the whole global batch first: {"sum": ..., "gather": ...}
    auxiliary                       models beside the trained one, by name: frozen, moved or trained
                                    (docs/how-to/own-code.md)
    splits_batches = False          if the loss does not decompose over samples (contrastive losses)
    tensor_parallel                 how engine=mesh splits layers: {"layers.*.first": "colwise", "layers.*.second":
                                    "rowwise"}; * stands for one part of a name

The functions above that make something are called with those of the run file's options they accept.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from drivetrain.config.workload import UserModule
from drivetrain.data.streams.endless import draws, known_length
from drivetrain.distributed.rng import restore_rng_state, rng_state, seed_everything
from drivetrain.errors import problem
from drivetrain.memory.shortage import give_back, is_shortage
from drivetrain.workloads.base import Batch, BestMetric, Layout, NamedSamples, Outputs
from drivetrain.workloads.exporting import Exportable
from drivetrain.workloads.loss_contract import LOSS, NO_CONTEXT, Auxiliary, LossContext, Partial
from drivetrain.workloads.loss_cuts import FEWEST, MOST, OF_A_LOSS, OF_A_MODEL, check_adds_up, off_zero, varied_samples
from drivetrain.workloads.metrics import Metric
from drivetrain.workloads.user_file import FIELD, UserFile
from drivetrain.workloads.user_loss import SummedLoss
from drivetrain.workloads.user_metrics import OfAllSamples, metrics_of
from drivetrain.workloads.user_samples import UserSamples, training_samples, user_samples
from drivetrain.workloads.user_stream import UserStream
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


class UserModuleWorkload(Exportable):
    train: UserSamples | UserStream
    evaluation: UserSamples | None

    def __init__(self, config: UserModule, seed: int) -> None:
        seed_everything(seed)  # what the file draws while it is read is part of the run
        self._use(UserFile(config.path, config.options), seed)

    def _use(self, file: UserFile, seed: int) -> None:
        """Takes data, loss and layout from the file. Raises UserError for definitions that cannot work."""
        self._file = file
        self.train = training_samples(self._file, seed)
        self.evaluation = None
        if self._file.has("evaluation_data"):
            self.evaluation = user_samples(self._file, "evaluation_data", "evaluation sample", seed)
        self._loss = SummedLoss(self._file.get("loss")) if self._file.has("loss") else None
        self._layout = self._declared()
        self._terms = None if self._loss is not None else UserTerms(self._file)
        self._task = self._try_out()

    def build_model(self) -> nn.Module:
        name = "build_model" if self._file.has("build_model") else "model"
        made = self._file.made(name)
        if not isinstance(made, nn.Module):
            raise problem(FIELD, f"{name} gives a {type(made).__name__}, no nn.Module", "give an nn.Module")
        # a model that was made while the file was read stays as it is, for the next one who asks
        return self._adapted((copy.deepcopy(made) if made is self._file.get(name) else made).float())

    def collate(self, samples: Sequence[Any]) -> Batch:
        """Calls the file's collate; without one makes {"input", "target"} from pairs, or a dict from dicts, float64 as
        float32."""
        own = self._file.get("collate")
        merged = own(samples) if own is not None else default_collate(list(samples))
        if isinstance(merged, list | tuple) and len(merged) == 2:
            merged = {"input": merged[0], "target": merged[1]}
        if not isinstance(merged, dict):
            raise problem(
                FIELD, "samples are neither (input, target) pairs nor dicts", "define collate(samples) -> dict"
            )
        for name, value in merged.items():
            if not isinstance(value, Tensor):
                why = f"{name!r} of a batch is a {type(value).__name__}, no tensor"
                raise problem(FIELD, why, "leave it out, or define collate(samples) that makes it one")
        if own is not None:
            return merged
        return {name: value.float() if value.dtype == torch.float64 else value for name, value in merged.items()}

    def count(self, batch: Batch) -> int:
        if self._loss is not None:
            return self._loss.count(batch["target"])
        return super().count(batch)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        if self._loss is not None:
            return self._loss(_output(model, batch), batch["target"])
        [summed] = self.loss_sums(model, batch, NO_CONTEXT).values()
        return summed

    @property
    def terms(self) -> Mapping[str, float]:
        return super().terms if self._terms is None else self._terms.terms

    def counts(self, batch: Batch) -> Mapping[str, int]:
        return super().counts(batch) if self._terms is None else self._terms.counts(batch)

    def loss_sums(self, model: nn.Module, batch: Batch, context: LossContext) -> Mapping[str, Tensor]:
        terms = self._terms
        return super().loss_sums(model, batch, context) if terms is None else terms.sums(model, batch, context)

    @property
    def has_statistics(self) -> bool:
        return self._terms is not None and self._terms.has_statistics

    def statistics(self, model: nn.Module, batch: Batch, context: LossContext) -> Partial:
        assert self._terms is not None
        return self._terms.statistics(model, batch, context)

    @property
    def auxiliary(self) -> Mapping[str, Auxiliary]:
        return {} if self._terms is None else self._terms.auxiliary

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        return self.outputs_in(model, batch, NO_CONTEXT)

    def outputs_in(self, model: nn.Module, batch: Batch, context: LossContext) -> Outputs:
        """Returns the outputs. Statistics are those of the evaluation batch."""
        own = self._file.has("metrics")
        if self._terms is None:
            output, target = _output(model, batch), batch["target"]
            compared = (output, target) if own else self._task.compared(output, target)
            return Outputs(self._loss(output, target), self.count(batch), *compared)  # type: ignore[misc]
        count = len(next(iter(batch.values())))
        sums = self.loss_sums(model, batch, self._terms.of_one_batch(model, batch, context, count))
        counts = self.counts(batch)
        found = {name: (value, counts[name]) for name, value in sums.items()}
        nothing = torch.zeros(0, device=next(iter(sums.values())).device)
        compared = (_output(model, batch), batch["target"]) if own else (nothing, nothing)
        if not self._terms.has_terms:
            return Outputs(*found[LOSS], *compared)
        return Outputs(nothing.sum(), 0, *compared, terms=found)

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        output = _output(model, batch)
        own = self._file.get("predict")
        rows = self._task.predictions(output) if own is None else own(output)
        return [_json_able(row) if isinstance(row, dict) else {"prediction": _json_able(row)} for row in rows]

    def metrics(self) -> Mapping[str, Metric]:
        given = self._file.get("metrics")
        if given is None and self._loss is None:
            return {}  # loss_sum may be of anything
        if given is None:
            enough = len(self.evaluation or ()) > 1  # r2 of one sample does not exist
            return {name: metric for name, metric in self._task.metrics().items() if name != "r2" or enough}
        return metrics_of(copy.deepcopy(given) if isinstance(given, Mapping) else given)

    @property
    def best_metric(self) -> BestMetric:
        return BestMetric("loss", higher_is_better=False)

    @property
    def splits_batches(self) -> bool:
        return bool(self._file.get("splits_batches", True))

    @property
    def lengths(self) -> Sequence[int] | None:
        return None

    @property
    def layout(self) -> Layout:
        return self._layout

    def _declared(self) -> Layout:
        given = self._file.get("tensor_parallel")
        styles = given.values() if isinstance(given, Mapping) else ()
        if given is not None and not (styles and all(isinstance(style, str) for style in styles)):
            fix = 'give module names and styles: {"layers.*.first": "colwise", "layers.*.second": "rowwise"}'
            raise problem(FIELD, f"tensor_parallel is {given!r}", fix)
        return Layout(tensor_parallel=given)

    @property
    def facts(self) -> dict[str, Any]:
        held_out = 0 if self.evaluation is None else len(self.evaluation)
        return {"file": self._file.path.name, "train_samples": known_length(self.train), "evaluation_samples": held_out}

    @property
    def warnings(self) -> Sequence[str]:
        return self._file.misnamed()

    def prediction_samples(self, path: str | None) -> NamedSamples:
        if path is not None:
            raise problem("--data", f"{path} was given, but this file's data are its own", "leave --data out")
        if self.evaluation is None:
            raise problem("--data", f"{self._file.path.name} has no evaluation_data", "define it")
        return self.evaluation

    def save_assets(self, model: nn.Module, folder: Path) -> None:
        del model  # its weights say nothing of its class: the file does
        (folder / "workload.py").write_bytes(self._file.text)

    def _try_out(self) -> Task:
        """Runs two samples through everything, and some in parts, so that faults are reported before work starts."""
        state = rng_state()
        try:
            with self._file.telling("two samples could not be tried"):
                samples = [self.train.load(index, 0) for index in draws(self.train, 2)]
                model = self.build_model().eval()
                task = self._tried(model, self.collate(samples))
            if self.splits_batches and len(draws(self.train, 2)) > 1:
                with self._file.telling("some samples at once and in parts could not be tried"), off_zero(model):
                    self._check_with_what_fits(model)
            return task
        finally:
            restore_rng_state(state)

    def _tried(self, model: nn.Module, batch: Batch) -> Task:
        if self._loss is None:
            assert self._terms is not None
            self._terms.tried(model, batch, len(draws(self.train, 2)))
            return self._task_without_loss(model, batch)
        if "target" not in batch:
            has = ", ".join(map(repr, batch))
            raise problem(FIELD, f"a batch has no 'target', but {has}", "name it so, or define loss_sum and count")
        output, target = _output(model, batch), batch["target"]
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
            output = _output(model, batch)
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
        for metric in self.metrics().values() if self._file.has("metrics") else ():
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
        samples = varied_samples(self.train, self.collate, model, most)
        name, count, batch = self._file.path.name, len(samples), self.collate(samples)
        if self._loss is not None:
            loss, output, target = self._loss, _output(model, batch).detach(), batch["target"]
            if len(output) == len(target) == count:  # else samples lie end to end, or behind another dimension
                called = f"{name}: the loss of"
                check_adds_up(called, count, lambda part: loss(output[part], target[part]).item(), OF_A_LOSS, FIX_LOSS)
                return

        def cut(part: slice) -> Batch:
            if all(tensor.dim() and len(tensor) == count for tensor in batch.values()):
                return {name: tensor[part] for name, tensor in batch.items()}  # padded alike
            return self.collate(samples[part])

        context = NO_CONTEXT if self._terms is None else self._terms.tried(model, batch, count)

        def loss_of(part: slice, term: str) -> float:
            own = torch.arange(count)[part] if self.has_statistics else None
            within = replace(context, statistics=replace(context.statistics, own=own))
            return self.loss_sums(model, cut(part), within)[term].item()

        for term in self.terms:
            several = self._terms is not None and self._terms.has_terms
            counted = f"counts gives as {term}" if several else "count gives"
            of_term = functools.partial(lambda term, part: self.counts(cut(part))[term], term)
            check_adds_up(f"{name}: what {counted} for", count, of_term, 0.0, FIX_COUNT)
            called, fix = ("loss_sum gives", FIX_SUM) if self._loss is None else ("the loss gives", FIX_LOSS)
            called = f"loss_terms gives as {term}" if several else called
            of_loss = functools.partial(lambda term, part: loss_of(part, term), term)
            check_adds_up(f"{name}: what {called} for", count, of_loss, OF_A_MODEL, fix)


def _output(model: nn.Module, batch: Batch) -> Tensor:
    inputs = {name: tensor for name, tensor in batch.items() if name != "target"}
    output = model(inputs["input"]) if set(inputs) == {"input"} else model(**inputs)
    output = getattr(output, "logits", output)
    if not isinstance(output, Tensor):
        raise problem(FIELD, f"the model gives {_described(output)}, no tensor", "define loss_sum and count")
    return output


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _json_able(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_able(part) for key, part in value.items()}
    return value.tolist() if isinstance(value, Tensor | np.ndarray | np.generic) else value
