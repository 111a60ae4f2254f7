"""Finds the quickest way to run that fits, with few traces.

A trace of a large model takes half a minute, and there are hundreds of ways. So a way is looked at only while it could
still be among the best: ways are taken in the order of a bound on their step time (search_bounds.py), and the search
ends where the bound exceeds what was found. One that is looked at is traced at its smallest micro-batch; if that fits,
at others, from which all its micro-batches are derived (derive.py). In the end the best five are traced themselves.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from drivetrain.config.run import RunConfig
from drivetrain.errors import UserError, counted
from drivetrain.plan.derive import Cut, full_count
from drivetrain.plan.estimator import Estimator, NotPlanned
from drivetrain.plan.family_bounds import FamilyBounds
from drivetrain.plan.refusals import distinct_problems, shared_problems
from drivetrain.plan.rows import (
    ALIKE,
    PAYS,
    Plan,
    Row,
    chosen,
    in_order,
    refused,
    room_for_tensors,
    row,
    significant_bits,
)
from drivetrain.plan.search_alone import Looked, OneProcess, alone, least_samples
from drivetrain.plan.search_offers import offers
from drivetrain.plan.search_space import Family, Space, families
from drivetrain.plan.step_costs import StepCosts

BEST = 5  # rows that are traced in the end
MOST_TRACES = 90  # a search ends then, and says what it left out


def search(
    base: RunConfig, space: Space, estimator: Estimator, steps: int | None = None, price: float | None = None
) -> Plan:
    """Returns the plan of a run: the choice among the ways of the space, and every way with its figures or its reason.

    base: the user's run. steps: of the whole run. price: of a device and hour. Raises UserError if rules refuse every
    way.
    """
    start = time.perf_counter()
    found = families(base, space, estimator.host, estimator.nodes, estimator.devices_per_node)
    if not found.possible:
        problems = [each.problems for each in found.refused]
        raise UserError(shared_problems(problems) or distinct_problems(problems))
    looking = Search(base, estimator, space.precisions[0])
    looking.look_at(found.possible)
    looking.trace_the_best()
    rows = [*looking.rows(), *(refused(each.run, base, each.reason) for each in found.refused)]
    ordered = in_order(rows)
    choice, one = chosen(ordered), looking.base_costs()
    return Plan(
        machine=estimator.title,
        devices=estimator.nodes * estimator.devices_per_node,
        rows=tuple(ordered),
        choice=choice,
        base=one,
        room=room_for_tensors(alone(base, space.precisions[0], 1), estimator),
        notes=tuple(looking.notes),
        offers=tuple(offers(base, space.precisions, choice, one, estimator, looking.costs_of)),
        steps=steps,
        price=price,
        traces=looking.traces,
        seconds=time.perf_counter() - start,
    )


class Search:
    """The state of a search."""

    def __init__(self, base: RunConfig, estimator: Estimator, precision: str, most_traces: int = MOST_TRACES) -> None:
        """precision: one of those searched."""
        self._base, self._estimator, self._most = base, estimator, most_traces
        self._looked: dict[str, Looked] = {}
        self._passed: list[Row] = []  # not looked at, with the reason
        self.traces = 0
        self.notes: list[str] = []
        self._least = least_samples(base, precision, self.costs_of)
        self._alone = OneProcess(base, estimator, self._least, self._trace)
        self._bounds = FamilyBounds(estimator, self._alone, self._looked)

    # --- the story --------------------------------------------------------------------------------------------------

    def look_at(self, ways: list[Family]) -> None:
        """Looks at the families that may be the quickest, in the order of their bounds."""
        ways = [each for way in ways if (each := self._computable(way)) is not None]
        queue = [(self._bounds.of(each), each.rank, number) for number, each in enumerate(ways)]
        heapq.heapify(queue)
        while queue:
            bound, rank, number = heapq.heappop(queue)
            family = ways[number]
            tighter = self._bounds.of(family)  # what was looked at since may tell more
            if queue and tighter > max(bound, queue[0][0]):
                heapq.heappush(queue, (tighter, rank, number))
            elif not self._bounds.open_sizes(family):
                self._pass_over(family, "the same without it fits, and is no slower")
            elif tighter == float("inf"):
                self._pass_over(family, self._bounds.too_large(family))
            elif tighter > self._threshold(family.run) or self.traces >= self._most:
                self._pass_over(family, None, tighter)
            else:
                self._expect(family, [ways[each] for _, _, each in heapq.nsmallest(self._estimator.at_once, queue)])
                self._look(family)
        left = [each for each in self._passed if each.at_best is not None and each.at_best <= self._threshold(each.run)]
        if left:
            self.notes.append(
                f"{counted(len(left), 'way')} left out after {self.traces} traces: name engines to see them"
            )

    def trace_the_best(self) -> None:
        """Traces the choice and the best rows themselves, until those that are the best then are."""
        while best := self._untraced_best():
            (looked, size), *others = best
            self._estimator.expect(each.family.traced_as(each.family.own_cut(other)) for each, other in others)
            if self._trace(looked, looked.family.own_cut(size), quick=False):
                self._fill(looked)
            else:
                del looked.rows[size]

    def rows(self) -> Iterator[Row]:
        for looked in self._looked.values():
            yield from looked.rows.values()
        yield from self._passed

    def base_costs(self) -> StepCosts | None:
        """Returns one process's step of one sample at a time, in the first precision."""
        one = self._alone.first
        return None if one is None else one.at(Cut(1, 2, 2))

    def costs_of(self, run: RunConfig, quick: bool = False) -> StepCosts:
        """Traces a run, and counts that."""
        self.traces += 1
        return self._estimator.costs(run, quick)

    def _threshold(self, run: RunConfig) -> float:
        """Returns the step time beyond which a way in the run's precision is of no interest."""
        best = chosen([*self.rows()])
        if best is None or best.seconds is None:
            return float("inf")
        rounds_less = significant_bits(run) > significant_bits(best.run)
        return best.seconds * (1 + (PAYS if rounds_less else ALIKE))

    # --- looking ------------------------------------------------------------------------------------------------------

    def _look(self, family: Family) -> None:
        """Traces a family at its smallest micro-batch and, if that fits, at others, and derives its rows."""
        looked = Looked(family)
        smallest, *others = family.cuts
        if not self._trace(looked, smallest):
            return
        self._looked[family.key] = looked
        if self._fits(looked, family.sizes[0]):
            self._estimator.expect((family.traced_as(cut) for cut in others[1:]), quick=True)
            for cut in others:
                self._trace(looked, cut)
            self._fill(looked)
        else:
            self._fill(looked, only=(family.sizes[0], *self._in_one(looked)))

    def _in_one(self, looked: Looked) -> tuple[int, ...]:
        """Traces all samples as one micro-batch, where that may fit though the smallest does not: with several, the
        first one's gradients are there in the others' forward passes. Returns its size where it was traced."""
        size, capacity = looked.family.sizes[-1], self._estimator.capacity(looked.family.run)
        (_, least), (run, whole) = looked.family.at(looked.family.sizes[0]), looked.family.at(size)
        memory = looked.derivation.at(least).memory
        held = sum(memory.parts.get(part, 0) for part in ("gradients", "engine"))  # DeepSpeed's are the engine's own
        may_fit = memory.reserved - held + self._estimator.unseen(run)[1] <= capacity
        is_other = whole.count == 1 < least.count
        return (size,) if is_other and may_fit and self._trace(looked, whole) else ()

    def _fits(self, looked: Looked, size: int) -> bool:
        run, cut = looked.family.at(size)
        memory = looked.derivation.at(cut).memory
        return memory.reserved + self._estimator.unseen(run)[1] <= self._estimator.capacity(run)

    def _fill(self, looked: Looked, only: Sequence[int] | None = None) -> None:
        derivation = looked.derivation
        for size in looked.family.sizes if only is None else only:
            run, cut = looked.family.at(size)
            costs = derivation.at(cut)
            if self._is_traced(looked, size):
                costs = replace(costs, origin="traced")
            looked.rows[size] = row(run, self._base, costs, self._estimator, looked.family.rank)

    def _is_traced(self, looked: Looked, size: int) -> bool:
        """Returns whether the memory of a micro-batch of this size was traced, on the fullest rank."""
        full = full_count(looked.family.run.engine.stages)
        depth = min(looked.family.at(size)[1].count, full)
        return any(cut.size == size and min(cut.count, full) == depth for cut in looked.sure)

    def _untraced_best(self) -> list[tuple[Looked, int]]:
        """Returns those of the best rows that are not traced yet."""
        fitting = [
            (each, looked, size)
            for looked in self._looked.values()
            for size, each in looked.rows.items()
            if each.fits == "yes"
        ]
        best = sorted(fitting, key=lambda found: (found[0].seconds or 0.0, found[0].rank))
        choice = chosen([each for each, _, _ in best])
        best = [*(found for found in best if found[0] is choice), *best[:BEST]]
        return [(looked, size) for _, looked, size in best if not self._is_traced(looked, size)]

    def _expect(self, family: Family, others: list[Family]) -> None:
        """Has the smallest micro-batch of others traced ahead, which will probably be looked at after the family; where
        there are none, the family's own larger ones."""
        likely = [
            each
            for each in others
            if self._bounds.open_sizes(each) and self._bounds.of(each) <= self._threshold(each.run)
        ]
        ways = [(each, each.cuts[0]) for each in likely] or [(family, cut) for cut in family.cuts[1:]]
        self._estimator.expect((each.traced_as(cut) for each, cut in ways[: self._estimator.at_once - 1]), True)

    def _trace(self, looked: Looked, cut: Cut, quick: bool = True) -> bool:
        """Adds a trace. Returns False where there can be none; the family is passed over with the reason."""
        try:
            looked.traced[cut] = self.costs_of(looked.family.traced_as(cut), quick)
        except UserError as error:
            reason = "; ".join(f"{each.field}: {each.why}" for each in error.problems)
        except NotPlanned as error:
            reason = str(error)
        else:
            if not quick or looked.family.run.world_size == 1:
                looked.sure.add(cut)
            return True
        self._pass_over(looked.family, reason)
        return False

    def _computable(self, family: Family) -> Family | None:
        """Returns the family with the micro-batches that the model takes; passes over one that has none."""
        found = family.from_least(self._least)
        if found is None:
            self._pass_over(family, f"the model takes no fewer than {self._least} samples at once")
        return found

    def _pass_over(self, family: Family, reason: str | None, at_best: float | None = None) -> None:
        passed = refused(family.run, self._base, reason or "", family.rank)
        if reason is None:
            passed = replace(passed, reason=f"not examined: a step takes {at_best:.3g} s at best", at_best=at_best)
        self._passed.append(passed)
