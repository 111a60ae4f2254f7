"""A user's loss by sums: one (loss_sum and count) or several terms (loss_terms and counts), with statistics of the
whole batch and models beside the trained one. The file's functions get those of the names below that they accept:

    auxiliary       name → the model, called as the trained one is
    statistics      .sums, .rows and .own, as loss_contract.Statistics has them
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from drivetrain.errors import problem
from drivetrain.workloads.base import Batch
from drivetrain.workloads.loss_contract import ONE_TERM, Auxiliary, LossContext, Partial, Role, Statistics
from drivetrain.workloads.user_file import FIELD, UserFile

ROLES = ("frozen", "moved", "trained")
SETTINGS = {"model", "role", "source", "every", "mixing"}


class UserTerms:
    def __init__(self, file: UserFile) -> None:
        """Raises UserError for invalid term_weights and auxiliary models."""
        self._file = file
        self.has_terms = file.has("loss_terms")
        self.has_statistics = file.has("statistics")
        self.auxiliary = {name: _auxiliary(file, name, each) for name, each in self._listed("auxiliary").items()}
        self.terms: Mapping[str, float] = ONE_TERM
        self._weights = {name: float(weight) for name, weight in self._listed("term_weights").items()}

    def _listed(self, name: str) -> dict[str, Any]:
        given = self._file.get(name, {})
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise problem(FIELD, f"{name} is a {type(given).__name__}", f"give a dict: {name} = {{'name': ...}}")
        return dict(given)

    # --- what the engine asks -----------------------------------------------------------------------------------------

    def counts(self, batch: Batch) -> dict[str, int]:
        """Returns the counts of loss_terms, or the count of loss_sum under the name of a loss's only term."""
        name = "counts" if self.has_terms else "count"
        given = self._file.get(name)(batch)
        found = given if self.has_terms else dict.fromkeys(ONE_TERM, given)
        for value in found.values():
            if int(value) != value:
                why = f"{name} gives {float(value):g}, no whole number"
                raise problem(FIELD, why, f"{name} is of targets; weights belong into the loss alone")
        return {term: int(value) for term, value in found.items()}

    def sums(self, model: nn.Module, batch: Batch, context: LossContext) -> dict[str, Tensor]:
        name = "loss_terms" if self.has_terms else "loss_sum"
        found = self._called(name, model, batch, context)
        return dict(found) if self.has_terms else dict.fromkeys(ONE_TERM, found)

    def statistics(self, model: nn.Module, batch: Batch, context: LossContext) -> Partial:
        """Calls statistics(model, batch) → {"sum": {...}, "gather": {...}}, either of which may be left out."""
        found = self._called("statistics", model, batch, context)
        if not isinstance(found, Mapping) or not found or found.keys() - {"sum", "gather"}:
            has = ", ".join(map(repr, found)) if isinstance(found, Mapping) else f"a {type(found).__name__}"
            fix = 'give {"sum": {"name": tensor}} to add up, {"gather": {"name": one row a sample}} to collect, or both'
            raise problem(FIELD, f"statistics gives {has}", fix)
        return Partial(sums=found.get("sum", {}), rows=found.get("gather", {}))

    def of_one_batch(self, model: nn.Module, batch: Batch, context: LossContext, count: int) -> LossContext:
        """Returns the context with statistics of this batch alone, as in evaluations. count: its samples."""
        if not self.has_statistics:
            return context
        with torch.no_grad():
            found = self.statistics(model, batch, context)
        own = torch.arange(count, device=next(iter(batch.values())).device)
        return LossContext(context.auxiliary, Statistics(found.sums, found.rows, own))

    def _called(self, name: str, model: nn.Module, batch: Batch, context: LossContext) -> Any:
        function = self._file.get(name)
        accepted = inspect.signature(function).parameters
        more = {"auxiliary": context.auxiliary, "statistics": context.statistics}
        return function(model, batch, **{key: value for key, value in more.items() if key in accepted})

    # --- before work starts -------------------------------------------------------------------------------------------

    def tried(self, model: nn.Module, batch: Batch, count: int) -> LossContext:
        """Runs everything once, on a batch of so many samples; returns the context. Raises UserError for functions that
        return no sums, names that do not agree, and statistics without a row a sample."""
        context = self.of_one_batch(model, batch, LossContext(self._whole(model)), count)
        for name, rows in context.statistics.rows.items():
            if len(rows) != count:
                why = f"the statistic {name} to gather has {len(rows)} rows, of {count} samples"
                raise problem(FIELD, why, "give one row a sample")
        found, counted = self.sums(model, batch, context), self.counts(batch)
        for name, value in found.items():
            if not isinstance(value, Tensor) or value.numel() != 1:
                called = f"loss_terms, as {name}," if self.has_terms else "loss_sum"
                raise problem(FIELD, f"{called} gives {_kind(value)}, not one number", "sum over the batch")
        if self.has_terms:
            self._check_names(list(found), list(counted))
            self.terms = {name: self._weights.get(name, 1.0) for name in found}
        return context

    def _check_names(self, terms: list[str], counted: list[str]) -> None:
        if set(terms) != set(counted):
            why = f"loss_terms has {', '.join(terms)}, and counts has {', '.join(counted)}"
            raise problem(FIELD, why, "give both the same names")
        unknown = [name for name in self._weights if name not in terms]
        if unknown:
            why = f"term_weights has {', '.join(unknown)}, and loss_terms has {', '.join(terms)}"
            raise problem(FIELD, why, "give weights to terms that there are")

    def _whole(self, model: nn.Module) -> dict[str, Callable[..., Any]]:
        return {
            name: copy.deepcopy(model) if each.build is None else each.build().eval()
            for name, each in self.auxiliary.items()
        }


def _auxiliary(file: UserFile, name: str, given: Any) -> Auxiliary:
    """Reads an auxiliary model. A module or a function that makes one is frozen; a dict states more."""
    settings = dict(given) if isinstance(given, Mapping) else {"model": given}
    unknown = sorted(settings.keys() - SETTINGS)
    role, made = settings.get("role", "frozen"), settings.get("model")
    if unknown or role not in ROLES:
        why = f"auxiliary {name} has {', '.join(unknown)}" if unknown else f"auxiliary {name} has the role {role!r}"
        raise problem(FIELD, why, f"its keys are {', '.join(sorted(SETTINGS))}; its role is one of {', '.join(ROLES)}")
    every, mixing = settings.get("every", 1), settings.get("mixing", 1.0)
    if not (isinstance(every, int) and every >= 1 and 0 < mixing <= 1):
        why = f"auxiliary {name} has every={every!r}, mixing={mixing!r}"
        raise problem(FIELD, why, "every is a number of steps from 1, mixing lies above 0 and at most at 1")
    if made is None and role == "trained":
        raise problem(FIELD, f"auxiliary {name} is trained and has no model", "give a module, or what makes one")

    def build() -> nn.Module:
        found = copy.deepcopy(made) if isinstance(made, nn.Module) or not callable(made) else made()
        if not isinstance(found, nn.Module):
            why = f"auxiliary {name} is a {type(found).__name__}"
            raise problem(FIELD, why, "give an nn.Module, or what makes one")
        return found.float()

    source = settings.get("source", f"{file.path.name}:{name}" if made is not None else "the model as it starts")
    return Auxiliary(cast(Role, role), None if made is None else build, str(source), every, float(mixing))


def _kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
