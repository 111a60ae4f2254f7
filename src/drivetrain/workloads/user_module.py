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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from drivetrain.config.workload import UserModule
from drivetrain.data.streams.endless import known_length
from drivetrain.distributed.rng import seed_everything
from drivetrain.errors import problem
from drivetrain.workloads.base import Batch, BestMetric, Layout, NamedSamples, Outputs
from drivetrain.workloads.exporting import Exportable
from drivetrain.workloads.loss_contract import LOSS, NO_CONTEXT, Auxiliary, LossContext, Partial
from drivetrain.workloads.metrics import Metric
from drivetrain.workloads.user_file import FIELD, UserFile
from drivetrain.workloads.user_loss import SummedLoss
from drivetrain.workloads.user_metrics import metrics_of
from drivetrain.workloads.user_samples import UserSamples, training_samples, user_samples
from drivetrain.workloads.user_stream import UserStream
from drivetrain.workloads.user_terms import UserTerms
from drivetrain.workloads.user_trial import Trial, output_of

NEW_DATA = (
    "leave --data out, make evaluation_data a function, def evaluation_data(path=...), and give "
    "workload.options.path=FILE after the run; in Python, drivetrain.predict(RUN, inputs) takes inputs as they are"
)


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
        self._task = Trial(self, self._file, self._loss, self._terms).passed()

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
            return self._loss(output_of(model, batch), batch["target"])
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
            output, target = output_of(model, batch), batch["target"]
            compared = (output, target) if own else self._task.compared(output, target)
            return Outputs(self._loss(output, target), self.count(batch), *compared)  # type: ignore[misc]
        count = len(next(iter(batch.values())))
        sums = self.loss_sums(model, batch, self._terms.of_one_batch(model, batch, context, count))
        counts = self.counts(batch)
        found = {name: (value, counts[name]) for name, value in sums.items()}
        nothing = torch.zeros(0, device=next(iter(sums.values())).device)
        compared = (output_of(model, batch), batch["target"]) if own else (nothing, nothing)
        if not self._terms.has_terms:
            return Outputs(*found[LOSS], *compared)
        return Outputs(nothing.sum(), 0, *compared, terms=found)

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        output = output_of(model, batch)
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
            raise problem("--data", f"{path} was given, but {self._file.path.name} makes its data itself", NEW_DATA)
        if self.evaluation is None:
            raise problem("--data", f"{self._file.path.name} has no evaluation_data", "define it")
        return self.evaluation

    def save_assets(self, model: nn.Module, folder: Path) -> None:
        del model  # its weights say nothing of its class: the file does
        (folder / "workload.py").write_bytes(self._file.text)


def _json_able(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_able(part) for key, part in value.items()}
    return value.tolist() if isinstance(value, Tensor | np.ndarray | np.generic) else value
