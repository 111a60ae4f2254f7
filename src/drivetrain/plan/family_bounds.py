"""The least time that a step of a family takes, from one process's traces and from families that were looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from drivetrain.plan.derive import Cut, Derivation
from drivetrain.plan.estimator import Estimator
from drivetrain.plan.rows import gib
from drivetrain.plan.search_alone import Looked, OneProcess
from drivetrain.plan.search_bounds import best_case, model_parts, state_bytes
from drivetrain.plan.search_space import Family
from drivetrain.plan.step_costs import Messages


class FamilyBounds:
    """Knows the bound of each family; it becomes tighter as families are looked at.

    looked: what was looked at so far, by key, which the search adds to.
    """

    def __init__(self, estimator: Estimator, alone: OneProcess, looked: Mapping[str, Looked]) -> None:
        self._estimator, self._alone, self._looked = estimator, alone, looked

    def of(self, family: Family) -> float:
        """Returns the least seconds of a step; infinite where not even the model's state fits."""
        one = self._alone.at_any_cut(family.run.precision)
        if one is None:
            return 0.0
        run, cut = family.at(family.sizes[-1])
        if sum(state_bytes(run, one.at(cut).memory).values()) > self._estimator.capacity(run):
            return float("inf")
        return min((self._best_seconds(family, size, one) for size in self.open_sizes(family)), default=0.0)

    def open_sizes(self, family: Family) -> list[int]:
        """Returns the micro-batches that may gain by recompute or offload: those that do not fit without."""
        plain = self._plain(family)
        if plain is None:
            return [*family.sizes]
        return [size for size in family.sizes if size not in plain.rows or plain.rows[size].fits != "yes"]

    def _plain(self, family: Family) -> Looked | None:
        """Returns the same family without recompute and offload, if it was looked at."""
        plain = self._looked.get(family.like(recompute=False, offload_activations=False))
        return None if plain is None or plain.family.key == family.key else plain

    def _best_seconds(self, family: Family, size: int, one: Derivation) -> float:
        run, cut = family.at(size)
        extra = self._alone.extra(family.run)
        plain = self._plain(family)
        if plain is not None and plain.tells_rates:
            costs = extra.added_to(plain.derivation.at(cut))
        else:
            costs = best_case(run, cut, one, extra)
            costs = replace(costs, messages=(*costs.messages, *self._messages_of_axes(family, cut)))
        return self._estimator.time(run, costs).seconds

    def _messages_of_axes(self, family: Family, cut: Cut) -> Iterator[Messages]:
        """Yields what families that were looked at sent along the axes of this one, whatever their degrees; less where
        this one's ranks have a smaller part of the model."""
        for axis, ranks in family.run.engine.axes.items():
            like = next((each for each in self._looked.values() if self._shows(each, family, axis)), None)
            if like is None:
                continue
            share = min(1.0, model_parts(like.family.run, axis) / model_parts(family.run, axis))
            for each in like.derivation.at(cut).messages:
                if each.axis == axis:
                    yield replace(each, ranks=ranks, calls=max(1, int(each.calls * share)), bytes=each.bytes * share)

    def _shows(self, looked: Looked, family: Family, axis: str) -> bool:
        same = looked.family.run.precision == family.run.precision
        return same and axis in looked.family.run.engine.axes and looked.tells_rates

    def too_large(self, family: Family) -> str:
        one = self._alone.at_any_cut(family.run.precision)
        assert one is not None, "a family has a bound by memory only where one process was traced"
        state = state_bytes(family.run, one.at(Cut(1, 2, 2)).memory)
        lacks = sum(state.values()) - self._estimator.capacity(family.run)
        parts = ", ".join(f"{gib(size)} of {name}" for name, size in state.items() if size)
        return f"short of at least {gib(lacks)}: a device would hold {parts}"
