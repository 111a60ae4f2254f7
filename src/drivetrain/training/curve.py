"""The curve of a run: numbers of steps stay on the device until the next point of the curve, which reads all of them in
one exchange and one transfer, checks each and reports the newest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from drivetrain.config.run import RunConfig
from drivetrain.engines.base import Engine
from drivetrain.errors import RunError
from drivetrain.tracking.events import MOST_SHARES, StepDone
from drivetrain.training.hooks import LoopHooks
from drivetrain.training.progress import Progress
from drivetrain.training.step_guard import PendingNumbers, Watch

SMALLEST_SCALE = 2.0**-24  # below it the loss scale says that gradients are not finite for another reason


class Curve:
    """Steps whose numbers are not read yet; a flush checks all of them and reports the newest."""

    def __init__(
        self,
        run: RunConfig,
        engine: Engine,
        progress: Progress,
        steps_per_epoch: float,
        around: LoopHooks,
        watch: Watch,
    ) -> None:
        self._run, self._engine, self._progress, self._watch = run, engine, progress, watch
        self._steps_per_epoch, self._around = steps_per_epoch, around
        self._pending: list[PendingNumbers] = []
        self._unsettled: PendingNumbers | None = None  # the newest step, until it is known whether it was skipped
        self._newest: PendingNumbers
        self._factor = 0.0
        self._tokens: int | None = 0  # on this rank, since the last point

    def add(self, pending: PendingNumbers, factor: float, tokens: int | None) -> None:
        """tokens: of the step on this rank; None if samples have none."""
        self._pending.append(pending)
        self._unsettled, self._factor = pending, factor
        self._tokens = None if tokens is None or self._tokens is None else self._tokens + tokens

    def settled(self) -> Progress:
        """Returns the progress, in which the newest step counts as an update unless it was skipped. Waits for the
        device, if the loss is scaled."""
        pending, self._unsettled = self._unsettled, None
        if pending is None:
            return self._progress
        scale = pending.result.scale
        if scale is not None and scale < SMALLEST_SCALE:
            raise RunError(
                f"step {pending.step}: the loss scale fell to {scale:.1e} and the gradients still overflow. They are "
                "not finite for another reason than fp16's range: try precision=fp32, or a lower learning rate"
            )
        self._progress.updates += not pending.result.skipped
        return self._progress

    def read(self, beside: Sequence[float] = ()) -> tuple[float, float, list[float]] | None:
        """Reads all pending numbers in one exchange and one transfer; returns loss and norm of the newest, and the sums
        of `beside`, further numbers of each rank.

        Raises RunError that names the first step whose loss or gradient is not finite, unless it was skipped.
        """
        self.settled()
        if not self._pending:
            return None
        pending, self._pending = self._pending, []
        shares = torch.stack([p.loss.double() for p in pending])  # in which whole numbers beside them are exact
        summed = self._engine.summed(torch.cat([shares, shares.new_tensor(beside)])).tolist()
        losses, others = summed[: len(pending)], summed[len(pending) :]
        norms = torch.stack([p.result.grad_norm.float() for p in pending]).tolist()
        for each, loss, norm in zip(pending, losses, norms, strict=True):
            trouble = self._watch.read(each, loss, norm)
            if trouble is not None:
                self._around.troubled(trouble)
        self._newest = pending[-1]
        return losses[-1], norms[-1], others

    def flush(self, elapsed: Callable[[], float], samples: int = 0) -> None:
        """Reads the pending numbers, notes the time, and reports the newest step unless the training left it out.

        elapsed: returns the seconds of the run. It is asked once the numbers are there, which waits for the device.
        samples: those of the step under way; 0 between steps.
        """
        numbers = self.read([float(self._tokens or 0), *self._own_share()])
        self._progress.elapsed_seconds = elapsed()
        if numbers is None:
            return
        tokens, *shares = numbers[2]
        self._progress.tokens += round(tokens)
        self._tokens = None if self._tokens is None else 0
        if self._watch.refused(self._newest.step):
            return
        newest, progress, around = self._newest, self._progress, self._around
        if newest.terms is not None:
            means = self._engine.summed(newest.terms.clone()).tolist()
            progress.terms = dict(zip(self._engine.term_names, means, strict=True))
        around.send(
            StepDone(
                step=newest.step,
                epoch=newest.step / self._steps_per_epoch,
                loss=numbers[0],
                grad_norm=numbers[1],
                lr=self._run.optimizer.lr * self._factor,
                scale=newest.result.scale,
                skipped_steps=progress.skipped,
                samples=progress.samples,
                tokens=None if self._tokens is None else progress.tokens,
                samples_per_second=around.meters.recent_rate(samples),
                elapsed_seconds=progress.elapsed_seconds,
                terms=progress.terms,
                utilisation=shares[0] if shares and math.isfinite(shares[0]) else None,
                utilisation_by_rank=shares if len(shares) > 1 else [],
                **around.meters.recent(),
            )
        )

    def _own_share(self) -> list[float]:
        """Returns a number for each of the first ranks: at this one's place the share of its device in use since the
        last point, NaN where it is not known. The ranks' lists add up to that of all."""
        share = self._around.meters.recent_utilisation()
        found = [0.0] * min(self._around.world, MOST_SHARES)
        if self._around.rank < len(found):
            found[self._around.rank] = math.nan if share is None else share
        return found
