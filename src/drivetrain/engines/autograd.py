"""The common part of single, dp, ddp and fsdp: one nn.Module, PyTorch's autograd, gradients averaged over the ranks.

Losses are divided by the valid targets of the whole global batch and multiplied by the number of ranks, over which the
wrapped module averages: the same gradient on any number of ranks and in any number of pieces.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from drivetrain.config.precision import PRECISIONS, Precision
from drivetrain.data.loader import MicroBatch
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.auxiliary import AuxiliaryModels, Companion, follow
from drivetrain.engines.base import Engaged, EngineOptions, StepGuard, StepResult
from drivetrain.engines.compiled import compile_model
from drivetrain.engines.guarded_update import update
from drivetrain.engines.inference import InferenceEngine
from drivetrain.engines.inputs import Inputs
from drivetrain.engines.replaced_layers import computing_in, replaced
from drivetrain.engines.state import held_bytes, local_part
from drivetrain.engines.warmup import rehearse
from drivetrain.engines.weight_copies import WeightCopies
from drivetrain.engines.window_loss import (
    Counts,
    WindowLoss,
    few_samples,
    gathered_statistics,
    global_counts,
    own_counts,
)
from drivetrain.memory.offload import Offload, offload_activations
from drivetrain.memory.recompute import apply_recompute, repeated_blocks
from drivetrain.memory.statistics import Statistics
from drivetrain.memory.transfers import Later
from drivetrain.models.planned_device import planned_machine
from drivetrain.models.quantised_base import weights_of_codes
from drivetrain.models.read_places import compute_every_place
from drivetrain.models.swiglu import keep_silu
from drivetrain.numerics.torch_precision import autocast, dtype
from drivetrain.optim.optimizers import OptimizerFactory
from drivetrain.workloads.base import Batch, Workload
from drivetrain.workloads.loss_contract import LossContext


class AutogradEngine(InferenceEngine):
    """An engine over one module. A subclass defines how the model is wrapped, and the little that follows from it."""

    _scaler_type: type[torch.amp.GradScaler] = torch.amp.GradScaler
    _offload: Offload | None = None
    _copies_weights = False  # where the precision asks for 16-bit copies; else what wraps the model makes them
    _compiles_by_block = False  # also where blocks are not alike

    def __init__(self, config: Any, options: EngineOptions, ranks: Communicator) -> None:
        self._config, self._options, self._ranks = config, options, ranks
        self._device, self._inputs = options.device, Inputs(options.device, options.precision)
        self._optimizer: torch.optim.Optimizer | None = None
        scaling = options.scaler.model_dump()
        self._scaler = self._scaler_type(self._device.type, enabled=options.precision.scaled, **scaling)
        self.data_rank, self.data_world, self.random_stream = ranks.rank, ranks.world, ranks.rank

    # --- what each of these engines decides -------------------------------------------------------------------------

    @abstractmethod
    def _wrap(self, model: nn.Module) -> nn.Module:
        """Returns the module that runs forward. The model is on the device, in its dtype, recomputing and compiled."""

    def _check_engaged(self) -> None:
        """Raises RunError if `_wrap` did not do what the engine's name states."""

    def _exchange(self, last: bool) -> AbstractContextManager[Any]:
        """Surrounds forward and backward of a micro-batch; gradients travel with the window's last one."""
        del last
        return nullcontext()

    def _built(self, workload: Workload) -> nn.Module:
        return self._with_auxiliary(workload.build_model()).to(self._device, dtype(self._options.precision.parameters))

    def _blocks(self) -> list[nn.Module]:
        """Returns the repeated blocks, which are recomputed or gathered at once."""
        return repeated_blocks(self._model)

    def _with_auxiliary(self, model: nn.Module) -> nn.Module:
        """Returns the model, as it was built, with the models beside it: trained ones become a part of it."""
        self._auxiliary = AuxiliaryModels(self._workload, model, dtype(self._options.precision.parameters))
        return model

    def _wrap_auxiliary(self, model: nn.Module, precision: Precision) -> Callable[..., Any]:
        """Returns the module that runs a frozen or moved model, which lies where it was built."""
        return model.to(self._device, dtype(precision.compute if precision.cast else precision.parameters))

    def _build_optimizer(self, build: OptimizerFactory) -> torch.optim.Optimizer:
        return build(self._model)

    # --- setting up --------------------------------------------------------------------------------------------------

    def setup(self, workload: Workload, build_optimizer: OptimizerFactory | None) -> None:
        self._workload, self._trains = workload, build_optimizer is not None
        self.term_names = list(workload.terms)
        self._model = computing_in(self._built(workload), self._options.precision)
        if self._options.recompute:
            apply_recompute(self._model, self._options.recompute == "selective", self._blocks())
        if self._options.compile:
            compute_every_place(self._model)
            keep_silu(self._model)
        by_block = self._compiles_by_block or self._options.offload_activations  # compiled code offloads nothing
        self.compiled = compile_model(self._model, self._blocks(), self._options.compile, by_block)
        if self._options.offload_activations:
            machine = planned_machine()
            on_paper = self._options.traced and machine is not None and machine.device == "cuda"
            self._offload = offload_activations(self._model, self._blocks(), on_paper)
        self._weight_copies = WeightCopies(self._model, self._options.precision if self._copies_weights else None)
        self._forward = self._wrap(self._model)
        if build_optimizer is not None:
            self._optimizer = self._build_optimizer(build_optimizer)
            for group in self._optimizer.param_groups:
                group["peak_lr"] = copy.deepcopy(group["lr"])  # torchao's is a tensor
        for companion in self._auxiliary.companions.values():
            own = companion.settings.precision
            precision = self._options.precision if own is None else PRECISIONS[own]
            companion.forward = self._wrap_auxiliary(companion.model, precision)
        self.auxiliary = self._auxiliary.callables
        self._check_engaged()
        self.statistics = Statistics(self._model)
        if self._trains and not self._options.traced:
            self._warm_up()

    def _warm_up(self) -> None:
        """Runs what must have happened once before the first step, so that a resumed run computes the same as this
        one."""

    def _rehearse(self, backward: Callable[[Tensor], None]) -> None:
        """Warms up with a few samples."""
        some = few_samples(self._workload)
        [context], batch = self._contexts([some]), self._to_device(some.tensors)

        def loss() -> Tensor:
            with autocast(self._options.precision, self._device):
                return sum(
                    self._loss_sums(self._forward, batch, context).values(), torch.zeros((), device=self._device)
                )

        with self._weight_copies.in_place(self._weight_copies.made()):
            rehearse(self._model, loss, backward)

    def engaged(self) -> Engaged:
        parameters, stands = list(self._model.parameters()), weights_of_codes(self._model)
        return Engaged(
            wrapper=type(self._forward).__name__,
            world_size=self._ranks.world,
            local_parameters=sum(local_part(p).numel() * stands.get(id(p), 1) for p in parameters),
            global_parameters=sum(p.numel() * stands.get(id(p), 1) for p in parameters),
            trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
            parameter_dtype=", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
            linear_layers=replaced(self._model, self._options.precision, self._workload),
            compiled=self.compiled,
        )

    def measured(self) -> dict[str, Any]:
        held = {} if self._optimizer is None else {"held_bytes": held_bytes(self._model, self._optimizer)}
        return held if self._offload is None else {**held, "offloaded_bytes": self._offload.moved_bytes}

    # --- a step ------------------------------------------------------------------------------------------------------

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        self._ready_to_train()
        # counts travel during the first forward
        loss = WindowLoss(self._workload, self._global_counts(micro_batches), self._device)
        total = torch.zeros((), device=self._device)
        contexts = self._contexts(micro_batches)
        with self._weight_copies.in_place(self._weight_copies.made()):
            for number, batch in enumerate(micro_batches):
                with self._exchange(last=number == len(micro_batches) - 1):
                    total += self._micro_batch(batch, loss, contexts[number], micro_batches[number + 1 :])
        self.term_shares = loss.shares
        return total

    def _micro_batch(
        self, batch: MicroBatch, window: WindowLoss, context: LossContext, following: Sequence[MicroBatch]
    ) -> Tensor:
        """Adds its gradients; returns its part of the window's loss."""
        with self._options.part("forward"), autocast(self._options.precision, self._device):
            own = self._to_device(batch.tensors)
            self.expect(following)
            loss = window.part(self._loss_sums(self._forward, own, context), batch.counts)
        with self._options.part("backward"):
            self._backward(loss * self._averaged_over if self._averaged_over > 1 else loss)
        return loss.detach()

    def _contexts(self, micro_batches: Sequence[MicroBatch]) -> list[LossContext]:
        """Returns what each micro-batch's loss gets beside the model: statistics of the global batch, auxiliary
        models."""
        context = LossContext(self._auxiliary.callables)
        if not self._workload.has_statistics:
            return [context] * len(micro_batches)
        work = self._workload.statistics
        with self._options.part("statistics"):
            partials = self.without_gradient(micro_batches, lambda model, batch: work(model, batch, context))
            found = gathered_statistics(partials, micro_batches, self.counts_samples, self._ranks, self._device)
        return [replace(context, statistics=each) for each in found]

    def _ready_to_train(self) -> None:
        if not self._model.training:  # asked first: telling every module takes a tenth of a millisecond
            self._model.train()

    def summed(self, losses: Tensor) -> Tensor:
        return self._ranks.sum(losses)

    def _loss_sums(self, model: nn.Module, batch: Batch, context: LossContext) -> Mapping[str, Tensor]:
        return self._workload.loss_sums(model, batch, context)

    @property
    def _averaged_over(self) -> int:
        """Returns the number of ranks over which the wrapped module averages gradients."""
        return self.data_world

    def _backward(self, loss: Tensor) -> None:
        self._scaler.scale(loss).backward()

    def _global_counts(self, micro_batches: Sequence[MicroBatch]) -> Counts:
        """Returns the divisor of each term: its count over the whole global batch."""
        own = own_counts(self._workload, micro_batches)
        return global_counts(own, self.data_world, self.counts_samples, self._ranks, self._device)

    def optimizer_step(self, lr_factor: float, judge: StepGuard | None = None) -> StepResult:
        optimizer = self._at_rate(lr_factor)
        self._scaler.unscale_(optimizer)  # before the norm, so that clipping sees true gradients
        grad_norm = self._clip()
        scale = self._scale()
        refused, held = update(self._scaler, optimizer, grad_norm, judge)
        self._scaler.update()
        optimizer.zero_grad(set_to_none=True)
        self._move_auxiliary()
        scales = None if scale is None else Later(torch.stack([scale, cast(Tensor, self._scale())])).numbers
        return StepResult(grad_norm, refused, held, scales)

    def _move_auxiliary(self) -> None:
        """Synchronises the moved models that are due after this step."""
        for companion in self._auxiliary.due():
            self._follow(companion)

    def _follow(self, companion: Companion) -> None:
        follow(companion, self._model)

    def _scale(self) -> Tensor | None:
        """Returns the loss scale of the next step, on the device; None if the loss is not scaled."""
        return self._scaler.scale(torch.ones((), device=self._device)) if self._scaler.is_enabled() else None

    def _at_rate(self, lr_factor: float) -> torch.optim.Optimizer:
        assert self._optimizer is not None, "set up for evaluation only"
        for group in self._optimizer.param_groups:
            group["lr"] = group["peak_lr"] * lr_factor
        return self._optimizer

    def _clip(self) -> Tensor:
        """Clips gradients to the bound; returns the global gradient norm in fp32 (a sum of squares overflows fp16 at
        256).

        Clips like torch.nn.utils.clip_grad_norm_: by max_norm / (norm + 1e-6) if that is below 1.
        """
        parameters = [p for p in self._model.parameters() if p.grad is not None]
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
        norms = torch.zeros(len(gradients), device=self._device)
        if gradients:
            norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).to(self._device)
        norm = self._global_norm(norms, parameters)
        if self._options.max_grad_norm is not None and gradients:
            factor = torch.clamp(self._options.max_grad_norm / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))
        return norm

    def _global_norm(self, norms: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Returns the norm of all gradients, from the norms of those that this rank holds, and the ranks that share
        them."""
        del parameters
        return torch.linalg.vector_norm(norms)

    def close(self) -> None:
        self._optimizer = None
