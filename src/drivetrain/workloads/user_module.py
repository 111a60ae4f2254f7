"""A workload from a Python file of the user's: what a tutorial's script defines, nothing more.

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
    splits_batches = False          if the loss does not decompose over samples (contrastive losses)
    tensor_parallel                 how engine=mesh splits layers: {"layers.*.first": "colwise", "layers.*.second":
                                    "rowwise"}; * stands for one part of a name

The functions above that make something are called with those of the run file's options they accept.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from drivetrain.config.workload import UserModule
from drivetrain.distributed.rng import restore_rng_state, rng_state, seed_everything
from drivetrain.errors import problem
from drivetrain.memory.shortage import give_back, is_shortage
from drivetrain.workloads.base import Batch, BestMetric, Layout, NamedSamples, Outputs, Workload
from drivetrain.workloads.loss_cuts import FEWEST, MOST, OF_A_LOSS, OF_A_MODEL, check_adds_up, off_zero, varied_samples
from drivetrain.workloads.metrics import Metric
from drivetrain.workloads.user_file import FIELD, UserFile
from drivetrain.workloads.user_loss import SummedLoss
from drivetrain.workloads.user_metrics import OfAllSamples, metrics_of
from drivetrain.workloads.user_samples import UserSamples, user_samples
from drivetrain.workloads.user_task import Classes, Task, Unknown, task_of

NEEDS_ALL = "say splits_batches = False if it needs its whole batch"
FIX_LOSS = (
    "where targets are ignored, give nn.CrossEntropyLoss(ignore_index=...) itself; for a mean weighted by class, or "
    "over some targets only, define loss_sum(model, batch), with reduction='sum', and count(batch), the number of "
    f"targets, in place of loss; {NEEDS_ALL}"
)
FIX_SUM = f"give a sum over the batch's targets (reduction='sum'), no mean, and let count(batch) divide; {NEEDS_ALL}"
FIX_COUNT = f"count each sample's targets, whatever other samples are beside it; {NEEDS_ALL}"


class UserModuleWorkload(Workload):
    train: UserSamples
    evaluation: UserSamples | None

    def __init__(self, config: UserModule, seed: int) -> None:
        seed_everything(seed)  # what the file draws while it is read is part of the run
        self._file = UserFile(config.path, config.options)
        self.train = user_samples(self._file, "train_data", "sample", seed)
        self.evaluation = None
        if self._file.has("evaluation_data"):
            self.evaluation = user_samples(self._file, "evaluation_data", "evaluation sample", seed)
        self._loss = SummedLoss(self._file.get("loss")) if self._file.has("loss") else None
        self._layout = self._declared()
        self._task = self._try_out()

    def build_model(self) -> nn.Module:
        name = "build_model" if self._file.has("build_model") else "model"
        made = self._file.made(name)
        if not isinstance(made, nn.Module):
            raise problem(FIELD, f"{name} gives a {type(made).__name__}, no nn.Module", "give an nn.Module")
        # a model that was made while the file was read stays as it is, for the next one who asks
        return self._adapted((copy.deepcopy(made) if made is self._file.get(name) else made).float())

    def collate(self, samples: Sequence[Any]) -> Batch:
        """As the file's collate says; else {"input", "target"} from pairs, or a dict from dicts, float64 as float32."""
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
        given = self._file.get("count")(batch)
        if int(given) != given:
            why = f"count gives {float(given):g}, no whole number"
            raise problem(FIELD, why, "count targets; weights belong into loss_sum alone")
        return int(given)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        if self._loss is not None:
            return self._loss(_output(model, batch), batch["target"])
        summed: Tensor = self._file.get("loss_sum")(model, batch)
        return summed

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        count = self.count(batch)
        if self._loss is None and not self._file.has("metrics"):
            summed = self.loss_sum(model, batch)
            nothing = torch.zeros(0, device=summed.device)
            return Outputs(summed, count, nothing, nothing)
        output, target = _output(model, batch), batch["target"]
        summed = self.loss_sum(model, batch) if self._loss is None else self._loss(output, target)
        own = self._file.has("metrics")
        return Outputs(summed, count, *((output, target) if own else self._task.compared(output, target)))

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
        return {"file": self._file.path.name, "train_samples": len(self.train), "evaluation_samples": held_out}

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
        """Two samples through everything, and some in parts: what cannot work is said before work starts."""
        state = rng_state()
        try:
            with self._file.telling("two samples could not be tried"):
                samples = [self.train.load(index, 0) for index in range(min(2, len(self.train)))]
                model = self.build_model().eval()
                task = self._tried(model, self.collate(samples))
            if self.splits_batches and len(self.train) > 1:
                with self._file.telling("some samples at once and in parts could not be tried"), off_zero(model):
                    self._check_with_what_fits(model)
            return task
        finally:
            restore_rng_state(state)

    def _tried(self, model: nn.Module, batch: Batch) -> Task:
        if self._loss is None:
            summed = self.loss_sum(model, batch)
            if not isinstance(summed, Tensor) or summed.numel() != 1:
                raise problem(FIELD, f"loss_sum gives {_described(summed)}, not one number", "sum over the batch")
            self.count(batch)
            return self._task_without_loss(model, batch)
        if "target" not in batch:
            has = ", ".join(map(repr, batch))
            raise problem(FIELD, f"a batch has no 'target', but {has}", "name it so, or define loss_sum and count")
        output, target = _output(model, batch), batch["target"]
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            summed = self._loss(output, target)
        if not isinstance(summed, Tensor) or summed.numel() != 1:
            raise problem(FIELD, f"the loss gives {_described(summed)}, not one number", "give the mean")
        if any("target size" in str(warning.message) for warning in said):  # MSELoss and its like warn only
            shapes = f"the output is {tuple(output.shape)}, the target {tuple(target.shape)}"
            raise problem(FIELD, f"{shapes}: the loss would compare each with all", "give them one shape")
        self._try_metrics(output, target)
        return task_of(output, target, self._loss)

    def _task_without_loss(self, model: nn.Module, batch: Batch) -> Task:
        """What predictions mean beside a loss_sum: class numbers as targets and as many scores are classes."""
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
        """UserError for metrics that are none. What a function says of two samples (a correlation of them, say) may
        fail where that of all does not, so a ValueError and a division by zero are left to the evaluation."""
        for metric in self.metrics().values() if self._file.has("metrics") else ():
            if isinstance(metric, OfAllSamples):
                metric.try_out(output.detach(), target)

    def _check_with_what_fits(self, model: nn.Module) -> None:
        """The check below with as many samples as memory has room for; two were run before."""
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
        """UserError if the loss of up to `most` samples is not made of the losses of each, or their count."""
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

        def loss_of(part: slice) -> float:
            return self.loss_sum(model, cut(part)).item()

        check_adds_up(f"{name}: what count gives for", count, lambda part: self.count(cut(part)), 0.0, FIX_COUNT)
        called, fix = ("loss_sum gives for", FIX_SUM) if self._loss is None else ("the loss gives for", FIX_LOSS)
        check_adds_up(f"{name}: what {called}", count, loss_of, OF_A_MODEL, fix)


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
