"""A workload from a Python file of the user's: what a tutorial's script defines, nothing more.

    build_model()      -> nn.Module                    or  model = nn.Linear(10, 1)
    train_data()       -> (input, target) pairs        or  train_data = TensorDataset(x, y)
    loss(output, target) -> mean                       or  loss = nn.MSELoss()

and, if wanted, evaluation_data, collate(samples), metrics, predict(output). In place of `loss`, two functions may be
given: loss_sum(model, batch) and count(batch). Functions are called with those of the run file's options they accept.
"""

from __future__ import annotations

import copy
import difflib
import importlib.util
import inspect
import shutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from torchmetrics import Metric
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError

from drivetrain.config.workload import UserModule
from drivetrain.errors import Problem, UserError, problem
from drivetrain.rng import seed_everything
from drivetrain.workloads.base import Batch, BestMetric, NamedSamples, Outputs, Workload
from drivetrain.workloads.classification import classification_metrics

FIELD = "workload.path"
KNOWN = (
    "build_model", "model", "train_data", "evaluation_data", "loss", "loss_sum", "count", "collate", "metrics",
    "predict", "splits_batches",
)  # fmt: skip
TAKE_OPTIONS = ("build_model", "train_data", "evaluation_data")


class PairSamples:
    """The user's data set; what it gives for an index does not depend on the epoch unless it says so itself."""

    def __init__(self, data: Any, name: str) -> None:
        self._data, self._name = data, name

    def __len__(self) -> int:
        return len(self._data)

    @property
    def names(self) -> Sequence[str]:
        return [f"{self._name} {i}" for i in range(len(self))]

    def load(self, index: int, epoch: int) -> Any:
        del epoch
        return self._data[index]


class UserModuleWorkload(Workload):
    def __init__(self, config: UserModule, seed: int) -> None:
        self._path, self._options = config.path, config.options
        seed_everything(seed)  # what the file draws while it is read is part of the run
        self._module = _imported(config.path)
        _check_names(self._module, config.path)
        self._check_options()
        self.train = self._samples("train_data", "sample")
        has_evaluation = hasattr(self._module, "evaluation_data")
        self.evaluation = self._samples("evaluation_data", "evaluation sample") if has_evaluation else None
        self._given_loss = getattr(self._module, "loss", None)
        self._mean_loss = None if self._given_loss is None else _SummedLoss(self._given_loss)
        self._num_classes = self._classes()

    def _check_options(self) -> None:
        functions = [getattr(self._module, name, None) for name in TAKE_OPTIONS]
        accepted = {key for function in functions if callable(function) for key in _parameters(function)}
        unknown = [key for key in self._options if key not in accepted]
        if unknown:
            fix = f"they take: {', '.join(sorted(accepted)) or 'no options'}"
            why = f"no function of {self._path.name} accepts it"
            raise UserError([Problem(f"workload.options.{key}", why, fix) for key in unknown])

    def _made(self, name: str) -> Any:
        """The object called `name`, or what the function of that name returns."""
        given = getattr(self._module, name)
        if not inspect.isroutine(given):
            return given
        options = {key: value for key, value in self._options.items() if key in _parameters(given)}
        try:
            return given(**options)
        except Exception as error:
            raise _from_the_file(self._path, f"{name}() failed", error) from error

    def _samples(self, name: str, called: str) -> PairSamples:
        data = self._made(name)
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            why = f"{name} is a {type(data).__name__}, which has no length or no items"
            raise problem(FIELD, why, "give a Dataset or a list of (input, target)")
        if not len(data):
            raise problem(FIELD, f"{name} is empty", "give at least one sample")
        return PairSamples(data, called)

    def build_model(self) -> nn.Module:
        built = self._made("build_model") if hasattr(self._module, "build_model") else copy.deepcopy(self._module.model)
        if not isinstance(built, nn.Module):
            raise problem(FIELD, f"the model is a {type(built).__name__}, no nn.Module", "return an nn.Module")
        return built.float()

    def collate(self, samples: Sequence[Any]) -> Batch:
        """As the file's collate says; else {"input", "target"} from pairs, or a dict from dicts."""
        own = getattr(self._module, "collate", None)
        if own is not None:
            batch: Batch = own(samples)
            return batch
        merged = default_collate(list(samples))
        if isinstance(merged, dict):
            return merged
        if isinstance(merged, list | tuple) and len(merged) == 2:
            return {"input": merged[0], "target": merged[1]}
        raise problem(FIELD, "samples are neither (input, target) pairs nor dicts", "define collate(samples) -> dict")

    def count(self, batch: Batch) -> int:
        if self._mean_loss is not None:
            return self._mean_loss.count(batch["target"])
        return int(self._module.count(batch))

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        if self._mean_loss is None:
            summed: Tensor = self._module.loss_sum(model, batch)
            return summed
        return self._mean_loss(_output(model, batch), batch["target"])

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        if self._mean_loss is None:
            summed = self._module.loss_sum(model, batch)
            nothing = torch.zeros(0, device=summed.device)
            return Outputs(summed, self.count(batch), nothing, nothing)
        output, target = _output(model, batch), batch["target"]
        predictions = output.argmax(-1) if self._num_classes else output.float()
        return Outputs(self._mean_loss(output, target), self.count(batch), predictions, target)

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        output = _output(model, batch)
        own = getattr(self._module, "predict", None)
        if own is not None:
            return [row if isinstance(row, dict) else {"prediction": row} for row in own(output)]
        if self._num_classes:
            return [{"prediction": number} for number in output.argmax(-1).tolist()]
        return [{"prediction": value} for value in output.float().squeeze(-1).tolist()]

    def metrics(self) -> Mapping[str, Metric]:
        if hasattr(self._module, "metrics"):
            given = self._module.metrics
            made: Mapping[str, Metric] = given() if inspect.isroutine(given) else copy.deepcopy(given)
            return made
        if self._mean_loss is None:
            return {}
        if self._num_classes:
            return classification_metrics(self._num_classes)
        return {"mean_absolute_error": MeanAbsoluteError(), "mean_squared_error": MeanSquaredError()}

    @property
    def best_metric(self) -> BestMetric:
        return BestMetric("loss", higher_is_better=False)

    @property
    def splits_batches(self) -> bool:
        return bool(getattr(self._module, "splits_batches", True))

    @property
    def lengths(self) -> Sequence[int] | None:
        return None

    @property
    def facts(self) -> dict[str, Any]:
        held_out = 0 if self.evaluation is None else len(self.evaluation)
        return {"file": self._path.name, "train_samples": len(self.train), "evaluation_samples": held_out}

    @property
    def warnings(self) -> Sequence[str]:
        public = {name for name in vars(self._module) if not name.startswith("_")}
        functions = [n for n in public if inspect.isfunction(vars(self._module)[n]) and n not in KNOWN]
        near = [(name, difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.8)) for name in sorted(functions)]
        return [f"{self._path.name}: {name} is not read; did you mean {match[0]}?" for name, match in near if match]

    def prediction_samples(self, path: str | None) -> NamedSamples:
        if path is not None:
            raise problem("--data", f"{path} was given, but this file's data are its own", "leave --data out")
        if self.evaluation is None:
            raise problem("--data", f"{self._path.name} has no evaluation_data", "define it")
        assert isinstance(self.evaluation, PairSamples)
        return self.evaluation

    def save_assets(self, model: nn.Module, folder: Path) -> None:
        del model
        shutil.copyfile(self._path, folder / "workload.py")

    def _classes(self) -> int:
        """Number of classes if targets are class numbers, else 0."""
        if self._mean_loss is None or not isinstance(self._given_loss, nn.CrossEntropyLoss | nn.NLLLoss):
            return 0
        batch = self.collate([self.train.load(0, 0)])
        if batch["target"].is_floating_point():
            return 0
        with torch.random.fork_rng(), torch.no_grad():
            return int(_output(self.build_model().eval(), batch).shape[-1])


class _SummedLoss:
    """A loss that gives a mean, as a sum and the number of terms it is the mean of."""

    def __init__(self, loss: Any) -> None:
        reduction = getattr(loss, "reduction", "mean")
        if reduction != "mean":
            raise problem(FIELD, f"loss has reduction={reduction!r}", "use reduction='mean', PyTorch's default")
        self._loss = loss
        # PyTorch's own losses average over every element of the target, those over classes over every label
        self._built_in = isinstance(loss, nn.modules.loss._Loss) and type(loss).__module__.startswith("torch.nn")
        self._ignored = getattr(loss, "ignore_index", None)
        if getattr(loss, "weight", None) is not None and self._ignored is not None:
            raise problem(FIELD, "class weights make the loss a weighted mean", "define loss_sum and count instead")

    def count(self, target: Tensor) -> int:
        if not self._built_in:
            return len(target)
        if self._ignored is None:
            return target.numel()
        if target.is_floating_point():  # class probabilities
            return target.numel() // target.shape[1]
        return int((target != self._ignored).sum())

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        # the mean of no terms is NaN; their sum is 0
        count = self.count(target)
        mean: Tensor = self._loss(output.float() if output.is_floating_point() else output, _like(target, output))
        return mean * count if count else output.sum() * 0.0


def _like(target: Tensor, output: Tensor) -> Tensor:
    return target.float() if target.is_floating_point() and output.is_floating_point() else target


def _output(model: nn.Module, batch: Batch) -> Tensor:
    inputs = {name: tensor for name, tensor in batch.items() if name != "target"}
    output = model(inputs["input"]) if set(inputs) == {"input"} else model(**inputs)
    return output if isinstance(output, Tensor) else output.logits


def _parameters(function: Any) -> set[str]:
    if not inspect.isroutine(function):
        return set()
    return set(inspect.signature(function).parameters)


def _imported(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"drivetrain_user_{path.stem}", path)
    if specification is None or specification.loader is None:
        raise problem(FIELD, f"{path} is no Python file", "give a file that ends in .py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # loader workers find its classes by name
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        specification.loader.exec_module(module)
    except Exception as error:
        raise _from_the_file(path, "it failed while it was read", error) from error
    finally:
        sys.path.pop(0)
    return module


def _from_the_file(path: Path, what: str, error: Exception) -> UserError:
    """The error with the last line of the user's own file in it."""
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == path.name
    ]
    line = error.lineno if isinstance(error, SyntaxError) else (lines[-1] if lines else None)
    where = f" at line {line}" if line else ""
    return problem(FIELD, f"{path}: {what}{where}: {type(error).__name__}: {error}", "correct the file")


def _check_names(module: ModuleType, path: Path) -> None:
    def has(name: str) -> bool:
        return hasattr(module, name)

    lacking = []
    if not (has("build_model") or has("model")):
        lacking.append("build_model or model")
    if not has("train_data"):
        lacking.append("train_data")
    if not (has("loss") or (has("loss_sum") and has("count"))):
        lacking.append("loss (or loss_sum and count)")
    if lacking:
        found = sorted(name for name in vars(module) if not name.startswith("_"))
        fix = f"define them; found: {', '.join(found) or 'nothing'}"
        raise UserError([Problem(FIELD, f"{path} defines no {name}", fix) for name in lacking])
