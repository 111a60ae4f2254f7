"""Runs a trial step at set-up: the spread model has to give each parameter the gradient that it has in the whole model.

The loss alone shows little: at a random start it is near the logarithm of the number of classes, whatever the model
computes, and a copy of a weight that gets a part of its gradient does not change it. So every gradient is compared, for
a few short samples, without dropout and autocast. No whole gradient is kept, only its norm and FOLDS sums, of every
FOLDS-th number each, which add up over samples and ranks as gradients do.

The whole model runs on the first rank alone, which sends the results to the others: ranks of one machine share its
cores. It runs on that rank's device if it fits, else on the CPU.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from drivetrain.config.engines.mesh import MeshEngine
from drivetrain.config.precision import Precision
from drivetrain.data.loader import MicroBatch
from drivetrain.distributed.communicator import Communicator
from drivetrain.distributed.real_numbers import real_numbers
from drivetrain.distributed.rng import restore_rng_state, rng_state
from drivetrain.engines.auxiliary import Companion
from drivetrain.engines.base import EngineOptions
from drivetrain.engines.mesh.block_discovery import Anatomy, dissect
from drivetrain.engines.mesh.gradient_sketch import NOTHING, sketch
from drivetrain.engines.mesh.topology import MeshPosition
from drivetrain.engines.mesh.trial_samples import trial_samples
from drivetrain.engines.mesh.whole_model import placed
from drivetrain.engines.state import gathered, local_part
from drivetrain.engines.window_loss import combined, joined_partials
from drivetrain.errors import UserError, problem
from drivetrain.memory.transfers import sent
from drivetrain.numerics.torch_precision import autocast, dtype
from drivetrain.workloads.base import Batch, Workload, few
from drivetrain.workloads.loss_contract import NO_CONTEXT, LossContext, Statistics

if TYPE_CHECKING:
    from drivetrain.engines.mesh.parallelize import RankPart
    from drivetrain.engines.mesh.state import Held

# how far a loss and a gradient may be off, of their size: sums in another order, rounded to the parameters' dtype
NEAR = {"float32": (1e-4, 1e-3), "float16": (1e-2, 0.05), "bfloat16": (3e-2, 0.2)}
SMALL, TINY = 0.1, 1e-30  # a loss near 0 is a difference of larger numbers, and as far off as they
LEAST = 1e-3  # of the largest gradient: what is smaller counts as so large (a key's bias has none but rounding)

# of traced models, which a plan builds anew for each trace, by their layers and the precision
_ANATOMIES: WeakKeyDictionary[Workload, dict[tuple[str, Precision], Anatomy]] = WeakKeyDictionary()

Watched = tuple[float, dict[str, Tensor], Statistics]  # loss, sketches of gradients, statistics


def exact(precision: Precision) -> Precision:
    """Returns the options without rounding other than that of the parameters."""
    return replace(precision, compute=precision.parameters, autocast=False, scaled=False, cast=False, tf32=False)


class Trial:
    def __init__(
        self,
        workload: Workload,
        options: EngineOptions,
        config: MeshEngine,
        place: MeshPosition,
        communicator: Communicator,
        beside: LossContext = NO_CONTEXT,
    ) -> None:
        """beside: the auxiliary models as they were built, whole."""
        self._ranks, self._beside, self._found = communicator, beside, Statistics()
        self._workload, self._device, self._config, self._place = workload, options.device, config, place
        self._precision = options.precision
        self._is_traced = options.traced  # there are no numbers to compare
        self._loss = 0.0
        self._expected: dict[str, Tensor] = {}
        self._filled: list[str] = []
        if not self._is_traced:
            self._samples = trial_samples(workload, place, config.shard)

    # --- the whole model ---------------------------------------------------------------------------------------------

    def watch(self, model: nn.Module, trains: bool) -> None:
        """Records the whole model's results on the samples: its loss and, if it is to be trained, gradients.

        Parameters that are all zero would hide the gradients behind them: during the trial they hold small numbers.
        """
        if self._is_traced:
            return
        self._fill(model)
        model.eval()
        self._loss, self._expected, self._found = self._ranks.on_first(lambda: self._watched(model, trains))

    def mean(self, sums: Mapping[str, Tensor]) -> Tensor:
        """Returns these samples' part of the weighted mean over all samples of the trial."""
        counts = self._samples.counts
        return torch.stack([sums[name] / counts[name] * w for name, w in self._workload.terms.items()]).sum()

    def statistics(self, batch: MicroBatch, device: torch.device) -> Statistics:
        """Returns statistics of all samples, from the whole model. device: of the model whose loss gets them."""
        own = None if batch.positions is None else torch.from_numpy(batch.positions).to(device)
        sums, rows = ({k: t.to(device) for k, t in some.items()} for some in (self._found.sums, self._found.rows))
        return Statistics(sums, rows, own)

    def _watched(self, model: nn.Module, trains: bool) -> Watched:
        """Returns its loss, sketches of its gradients, and the statistics of the samples."""
        beside = [each.model for each in self._beside.auxiliary.values() if isinstance(each, Companion)]
        with placed(model, self._device, beside) as device:  # around hooks and buffers, which know the device
            return self._whole(model, trains, device)

    def _whole(self, model: nn.Module, trains: bool, device: torch.device) -> Watched:
        uses: list[set[str]] = []
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._taking(name, uses))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
        if trains and not hooks:
            raise problem(
                "workload", f"no parameter of {type(model).__name__} is trained", "let one require a gradient"
            )
        try:
            with aside(model), torch.set_grad_enabled(trains):
                self._ask_statistics(model, device)
                for piece in self._samples.pieces:
                    uses.append(set())
                    context = replace(self._beside, statistics=self.statistics(piece, device))
                    loss = self.mean(self._workload.loss_sums(model, self._cast(piece.tensors, device), context))
                    self._loss += float(loss.detach())
                    if trains:
                        loss.backward()
        finally:
            for hook in hooks:
                hook.remove()
        if self._samples.are_cut:
            self._check_same(uses)
        return self._loss, self._expected, self._found

    @torch.no_grad()
    def _ask_statistics(self, model: nn.Module, device: torch.device) -> None:
        if not self._workload.has_statistics:
            return
        partials = [
            self._workload.statistics(model, self._cast(p.tensors, device), self._beside) for p in self._samples.pieces
        ]
        own = joined_partials(partials, self._samples.pieces)
        self._found = combined([own], self._samples.pieces[:1], torch.device("cpu"))[0]

    def _check_same(self, uses: list[set[str]]) -> None:
        """Checks that ranks use the same parameters: FSDP sums those that have a gradient, in order, and would mix
        different ones."""
        some = [name for name in self._expected if any(name not in used for used in uses)]
        if some:
            why = f"{', '.join(some[:5])} get a gradient from some samples only, and ranks cannot know from which"
            raise problem("engine.shard", why, "leave shard out")

    def anatomy(self, model: nn.Module) -> Anatomy:
        """Discovers blocks from passes of two samples and of three, computed like the run but without dropout."""

        model.eval()
        if not self._is_traced:
            return self._ranks.on_first(lambda: self._dissected(model))
        known = _ANATOMIES.setdefault(self._workload, {})
        like = repr(model), self._precision
        if like not in known:
            known[like] = self._dissected(model)
        return known[like]

    def _dissected(self, model: nn.Module) -> Anatomy:
        def forward(model: nn.Module, batch: Batch) -> Tensor:
            with autocast(self._precision, next(iter(batch.values())).device):
                return torch.stack(list(self._workload.loss_sums(model, batch, NO_CONTEXT).values())).sum()

        apart = nullcontext() if self._is_traced else aside(model)
        with placed(model, self._device) as device, apart:
            with real_numbers():
                batches = [few(self._workload, count) for count in (2, 3)]
            return dissect(model, [self._cast(batch, device) for batch in batches], forward)

    @torch.no_grad()
    def _fill(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            # most are not zero, which a few numbers show already
            if parameter.is_floating_point() and not parameter.flatten()[:64].any() and not parameter.any():
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))  # the same on all ranks
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
                self._filled.append(name)

    def _taking(self, name: str, uses: list[set[str]]) -> Any:
        def take(parameter: Tensor) -> None:
            assert parameter.grad is not None
            uses[-1].add(name)
            self._expected[name] = self._expected.get(name, 0) + sketch(parameter.grad)
            parameter.grad = None

        return take

    def _cast(self, batch: Batch, device: torch.device) -> Batch:
        kept = dtype(self._precision.parameters)
        return {name: sent(t, device, kept if t.is_floating_point() else None) for name, t in batch.items()}

    # --- the spread model --------------------------------------------------------------------------------------------

    def run(
        self,
        model: nn.Module,
        loss_of: Callable[[MicroBatch], Tensor | None],
        step: Callable[[MicroBatch], None] | None,
    ) -> set[str]:
        """Raises UserError, the same on all ranks, unless the spread model computes the same as the whole one.

        Returns the parameters that tensor ranks hold copies of and of which each computes a part of the gradient, so
        that these have to be summed: a norm or an activation with weights between two split layers that the plan does
        not mention.

        loss_of: this rank's part of the mean loss, on the last stage. step: leaves gradients; None: nothing trains.
        """
        if self._is_traced:
            return set()
        try:
            with aside(model):
                loss = self._loss_of_all(loss_of)
                if step is not None:
                    step(self._samples.own)
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # what the whole model did, this one cannot
            raise self._failed(error) from error
        near = NEAR[self._precision.parameters][0]
        if math.isfinite(self._loss) and not abs(loss - self._loss) <= near * max(abs(self._loss), SMALL):
            why = f"the loss of the model spread over {self._place} is {loss:.6g}, of the whole one {self._loss:.6g}"
            raise self._refusal(why)
        summed = self._check_gradients(model) if step is not None else set[str]()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in self._filled:
                    local_part(parameter).zero_()
        return summed

    def check_pieces(self, part: RankPart, held: Held, copies: Callable[[Tensor], float]) -> None:
        """Raises RunError unless the ranks hold all of each parameter together. copies: ranks that hold the same
        piece."""
        if not self._is_traced:
            part.check_pieces(held, copies, self._ranks, self._device)

    @torch.no_grad()
    def _loss_of_all(self, loss_of: Callable[[MicroBatch], Tensor | None]) -> float:
        loss = loss_of(self._samples.own)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if loss is not None and self._samples.own.counts:
            total += loss.detach()
        return float(self._ranks.all_gather(float(self._place.sum(total, "data")))[-1])  # of the last stage

    def _check_gradients(self, model: nn.Module) -> set[str]:
        sketches: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                gradient = parameter.grad
                sketches[name] = NOTHING if gradient is None else sketch(gathered(gradient))
        names, found = list(sketches), torch.stack([NOTHING, *sketches.values()])[1:]
        together = self._place.sum(found.to(self._device, copy=True), "tp").cpu()
        near = NEAR[self._precision.parameters][1]
        wrong = {name: error for name, error in self._off(names, found).items() if not error <= near}
        right = {name for name, error in self._off(names, together).items() if error <= near}
        everywhere = self._ranks.all_gather((wrong, right & wrong.keys() if self._config.tp > 1 else set[str]()))
        summed = set[str]().union(*(names for _, names in everywhere))
        wrong = {name: error for stage, _ in everywhere for name, error in stage.items() if name not in summed}
        if wrong:
            name, error = next(iter(wrong.items()))
            more = f" (and of {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            why = (
                f"over {self._place}, the gradient of {name}{more} is off the whole model's by {error:.2g} of its norm"
            )
            raise self._refusal(why)
        return summed

    def _off(self, names: list[str], found: Tensor) -> dict[str, float]:
        """Returns how far each gradient is off, relative to its own norm."""
        finite = {name: expected for name, expected in self._expected.items() if expected.isfinite().all()}
        least = LEAST * max((float(expected[-1]) for expected in finite.values()), default=0.0)
        errors: dict[str, float] = {}
        for name, own in zip(names, found, strict=True):
            if name in finite or name not in self._expected:
                expected = finite.get(name, NOTHING)
                errors[name] = float((own - expected)[:-1].norm()) / max(float(expected[-1]), least, TINY)
        return errors

    def _failed(self, error: Exception) -> UserError:
        """Returns the UserError for an error of the trial step, which worked with the whole model."""
        while error.__cause__ is not None and isinstance(error.__cause__, Exception):
            error = error.__cause__
        if isinstance(error, UserError):
            return error
        return self._refusal(f"a trial step over {self._place} fails: {type(error).__name__}: {error}")

    def _refusal(self, why: str) -> UserError:
        axes = [axis for axis in ("pp", "cp", "tp") if self._place.degrees[axis] > 1]
        axes = axes or (["shard"] if self._config.shard else ["dp"])
        fix = f"leave {' or '.join(axes)} out"
        if self._config.sequence_parallel:
            fix = f"leave sequence_parallel out, or {fix}"
        elif "tp" in axes and self._workload.layout.tensor_parallel:
            fix = f"correct tensor_parallel in the workload's file (docs/reference/workloads.md), or {fix}"
        return problem(f"engine.{axes[0]}" if len(axes) == 1 else "engine", why, fix)


@contextmanager
def aside(model: nn.Module) -> Iterator[None]:
    """Runs without dropout; restores generators and buffers afterwards."""
    state = rng_state()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.eval()
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        restore_rng_state(state)
