"""Finds anomalies: steps whose loss or gradient is not finite, or far above the usual.

An engine calls the judge once a step, with the gradient norm and before the update: a refused update is not made. On a
CPU the answer is known at once. On a GPU the host does not wait for it: it is a tensor, which stays true from the first
bad step on and turns every further update into nothing, until the numbers are read at the next point of the curve. If
the run file skips such steps, the answer decides what the schedule does next, and is read in every step, on any device.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from drivetrain.config.numerics import Numerics
from drivetrain.data.loader import Window
from drivetrain.engines.base import StepGuard, StepResult
from drivetrain.errors import RunError
from drivetrain.memory.transfers import works_behind

RECENT = 100  # steps whose losses and norms say what is usual
LEAST = 30  # of them, before anything is unusual
SHOWN = 16
Kind = Literal["not_finite", "spike"]
Action = Literal["told", "skipped", "stopped"]


@dataclass
class Recent:
    """Values of the last steps; checkpoints keep them, so that a resumed run decides alike."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skips: list[int] = field(default_factory=list)  # numbers of steps that were skipped


class Usual:
    """The median of the last values, updated in a microsecond a value."""

    def __init__(self, values: list[float]) -> None:
        """values: the oldest first; updated in place."""
        self._values, self._sorted = values, sorted(values)

    def add(self, value: float) -> None:
        """Adds a value, unless it is not finite."""
        if not math.isfinite(value):
            return
        self._values.append(value)
        insort(self._sorted, value)
        if len(self._values) > RECENT:
            del self._sorted[bisect_left(self._sorted, self._values.pop(0))]

    @property
    def median(self) -> float | None:
        """The median; None until there are enough values, and where some are negative: a loss that crosses 0, as those
        of rewards do, has no usual size."""
        middle, odd = divmod(len(self._sorted), 2)
        if len(self._sorted) < LEAST or self._sorted[0] < 0:
            return None
        return self._sorted[middle] if odd else (self._sorted[middle - 1] + self._sorted[middle]) / 2


@dataclass(frozen=True)
class Batch:
    """The samples of a step by their numbers, without their tensors: fields of Window and MicroBatch."""

    indices: np.ndarray
    positions: list[np.ndarray | None]
    made_at: int | None = None

    @classmethod
    def of(cls, window: Window) -> Batch:
        return cls(window.indices, [each.positions for each in window.micro_batches], window.made_at)

    @property
    def pieces(self) -> list[list[int]]:
        """The numbers of the samples in each micro-batch of this rank; none where one only keeps it in step."""
        return [[] if places is None else self.indices[places].tolist() for places in self.positions]

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.indices[:SHOWN].tolist()))
        more = f" and {len(self.indices) - SHOWN} more" if len(self.indices) > SHOWN else ""
        if self.made_at is None:
            return f"The batch holds training samples {shown}{more}"
        made = f"those that the model made after step {self.made_at}"
        return f"The batch holds samples {shown}{more} (from 0) of {made}"


@dataclass(frozen=True)
class PendingNumbers:
    """A step whose numbers have not been read yet."""

    step: int
    batch: Batch
    loss: Tensor  # this rank's share
    result: StepResult
    mark: Any = None  # torch's generators before the step
    before: Any = None  # progress before it
    terms: Tensor | None = None  # this rank's share of each term, of a loss of several


@dataclass(frozen=True)
class Numbers:
    """The numbers of one step, read."""

    step: int
    loss: float
    norm: float
    usual_loss: float | None  # medians of the steps before, where there were enough
    usual_norm: float | None


@dataclass(frozen=True)
class Anomaly:
    """A step with a bad loss or gradient."""

    numbers: Numbers
    kind: Kind
    action: Action
    what: str  # in words
    batch: Batch
    update_made: bool
    mark: Any = None
    before: Any = None

    @property
    def step(self) -> int:
        return self.numbers.step

    def __str__(self) -> str:
        done = {"told": "", "skipped": "; its update was left out", "stopped": ""}[self.action]
        return f"step {self.step}: {self.what}{done}. {self.batch}"


def ended(trouble: Anomaly, further: str = "") -> RunError:
    """Returns why a step ends the run. further: findings and what was kept."""
    advice = (
        "Try a lower learning rate, a longer warm-up, loop.max_grad_norm=1, precision=fp32 or bf16-mixed, and look at "
        "these samples; --resume numerics.skip=true goes on and leaves such steps out"
    )
    return RunError(f"{trouble}. {further}Nothing was saved after the last good checkpoint. {advice}")


def end_if_stopped(trouble: Anomaly) -> None:
    """Ends the run at an anomaly if no listener handles it."""
    if trouble.action == "stopped":
        raise ended(trouble)


class Watch:
    def __init__(self, config: Numerics, scaled: bool, recent: Recent, summed: Callable[[Tensor], Tensor]) -> None:
        """scaled: the loss is scaled, so that a gradient that is not finite is an overflow, which the scaler skips.
        summed: a function that sums over the ranks, in place."""
        self._config, self._scaled, self._summed = config, scaled, summed
        self._losses, self._norms, self._skipped = Usual(recent.losses), Usual(recent.norms), recent.skips
        self._bad: Tensor | None = None
        self._judged: dict[int, Numbers] = {}  # by steps that are not read yet, where each is judged
        self._refused: set[int] = set()

    # --- before the update -------------------------------------------------------------------------------------------

    def judge(self, step: int, share: Tensor) -> StepGuard:
        """Returns a function of the gradient norm: whether the step's update is refused, the same answer on all ranks.

        share: this rank's, of the loss.
        """
        if self._config.skip:
            return lambda norm: self._skips(step, share, norm)
        return lambda norm: self._is_bad(step, norm)

    def refused(self, step: int) -> bool:
        return step in self._refused

    def _is_bad(self, step: int, norm: Tensor) -> bool | Tensor:
        """Decides by the norm alone, which all ranks have: a loss that is not finite makes it so too, except in odd
        models."""
        if self._scaled:
            return False
        if works_behind(norm.device):
            bad = ~norm.isfinite()
            self._bad = bad if self._bad is None else self._bad | bad
            return self._bad
        if math.isfinite(norm.item()):
            return False
        self._refused.add(step)
        return True

    def _skips(self, step: int, share: Tensor, norm: Tensor) -> bool:
        """Exchanges the loss, and whether a rank refuses, in case their norms differ in a last bit."""
        usual_loss, usual_norm = self._losses.median, self._norms.median
        most_loss, most_norm = self._limit(usual_loss), self._limit(usual_norm)
        bad = norm > most_norm
        if not self._scaled:
            bad = bad | ~norm.isfinite()
        summed = self._summed(torch.stack([share.float(), bad.to(share.device).float()]))
        loss, votes, own_norm = torch.cat([summed, norm.to(summed)[None]]).tolist()  # one wait for all three
        numbers = Numbers(step, loss, own_norm, usual_loss, usual_norm)
        self._judged[step] = numbers
        self._remember(numbers)
        if votes or not math.isfinite(loss) or loss > most_loss:
            self._refused.add(step)
            self._skipped.append(step)
            return True
        return False

    def _remember(self, numbers: Numbers) -> None:
        self._losses.add(numbers.loss)
        self._norms.add(numbers.norm)

    def _limit(self, value: float | None) -> float:
        """Returns the norm above which a step is skipped."""
        return math.inf if not self._config.skips_spikes else limit(value, self._config.spike_factor)

    # --- when the numbers are read -----------------------------------------------------------------------------------

    def read(self, pending: PendingNumbers, loss: float, norm: float) -> Anomaly | None:
        """Returns the anomaly of a step, if any. Steps come in their order, once each."""
        numbers = self._judged.pop(pending.step, None)
        if numbers is None:
            numbers = Numbers(pending.step, loss, norm, self._losses.median, self._norms.median)
            self._remember(numbers)
        result, refused = pending.result, pending.step in self._refused
        overflowed = self._scaled and result.skipped and not refused
        what = not_finite(numbers, overflowed)
        if what is not None:
            return self._trouble(pending, numbers, "not_finite", what, skips=bool(self._config.skip) and result.skipped)
        what = None if overflowed else spike(numbers, self._config.spike_factor)
        return None if what is None else self._trouble(pending, numbers, "spike", what, skips=refused)

    def _trouble(self, pending: PendingNumbers, numbers: Numbers, kind: Kind, what: str, skips: bool) -> Anomaly:
        action: Action = "skipped" if skips else "stopped" if kind == "not_finite" else "told"
        if skips and self._skips_of_a_hundred(pending.step) > self._config.most_skips:
            action = "stopped"
            what += f", and more than numerics.most_skips={self._config.most_skips} of the last {RECENT} steps are bad"
        made = not (pending.result.skipped or pending.result.held)
        return Anomaly(numbers, kind, action, what, pending.batch, made, pending.mark, pending.before)

    def _skips_of_a_hundred(self, step: int) -> int:
        self._skipped[:] = [each for each in self._skipped if each > step - RECENT]
        return len(self._skipped)


def limit(value: float | None, factor: float | None) -> float:
    """Returns the value above which a number spikes; infinity where nothing is known of its usual size."""
    return math.inf if factor is None or value is None or value <= 0 else factor * value


def not_finite(numbers: Numbers, overflowed: bool) -> str | None:
    if not math.isfinite(numbers.loss):
        return f"the loss is {numbers.loss}"
    if not math.isfinite(numbers.norm) and not overflowed:
        return f"the gradient norm is {numbers.norm} though the loss ({numbers.loss:.4g}) is finite"
    return None


def spike(numbers: Numbers, factor: float | None) -> str | None:
    named = (
        ("loss", numbers.loss, numbers.usual_loss),
        ("gradient norm", numbers.norm, numbers.usual_norm),
    )
    spikes = [
        f"the {name} is {value:.4g}, {value / median:.0f} times its recent median ({median:.4g})"
        for name, value, median in named
        if median is not None and value > limit(median, factor)
    ]
    return " and ".join(spikes) or None
