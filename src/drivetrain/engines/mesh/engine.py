"""Pipeline, data, context and tensor parallel in any product, on one device mesh (pp, dp, cp, tp).

The order is the engines': cut the stage, split its layers, then shard or replicate it over the data ranks. Context
ranks hold parts of the same sequences: to parameters they are data ranks. The optimizer updates what this rank holds of
each parameter, as plain tensors, whatever they are sharded over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from drivetrain.config.engines.mesh import MeshEngine as Config
from drivetrain.data.loader import MicroBatch
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.auxiliary import attached
from drivetrain.engines.base import Engaged, EngineOptions, StepGuard, StepResult, untimed
from drivetrain.engines.evaluation_sums import EvaluationSums
from drivetrain.engines.fsdp import SameParameters, ready_to_shard
from drivetrain.engines.gradient_sum import GradientSum, sum_gradients
from drivetrain.engines.mesh.context_parallel import part_of
from drivetrain.engines.mesh.dry_run import Trial, exact
from drivetrain.engines.mesh.parallelize import beside_spread, shard_apart, spread
from drivetrain.engines.mesh.pipeline import Pipeline
from drivetrain.engines.mesh.spread_state import SpreadState
from drivetrain.engines.mesh.state import Held, shards
from drivetrain.engines.mesh.tied_embeddings import TiedEnds
from drivetrain.engines.mesh.topology import MeshPosition, MeshScaler
from drivetrain.engines.window_loss import WindowLoss
from drivetrain.memory.transfers import sent
from drivetrain.numerics.torch_precision import arithmetic, autocast, dtype
from drivetrain.optim.optimizers import OptimizerFactory
from drivetrain.workloads.base import Batch, Outputs, Workload
from drivetrain.workloads.loss_contract import LossContext
from drivetrain.workloads.metrics import Metric
from drivetrain.workloads.sample_scores import SampleScores


class MeshEngine(SpreadState):
    _compiles_by_block = True
    _scaler_type = MeshScaler
    _tries = False  # in the step at set-up, which trains nothing
    _partial: Sequence[nn.Parameter] = ()  # of which each tensor rank's gradient is a part of a sum

    def __init__(self, config: Config, options: EngineOptions, ranks: Communicator) -> None:
        super().__init__(config, options, ranks)
        self._place = place = MeshPosition(config, ranks, self._device.type)
        self.data_rank, self.data_world = place.at["dp"], place.dp
        # tensor ranks draw the same for what they hold copies of; between layers that share sequences there is none
        self.random_stream = ranks.rank if config.sequence_parallel else ranks.rank // config.tp
        self.counts_samples, self.runs_own_batches = place.leads_samples, place.runs_own_batches

    @property
    def _averaged_over(self) -> int:
        return self._place.dp * self._place.cp if self._config.shard else 1  # replicas are summed

    # --- setting up --------------------------------------------------------------------------------------------------

    def _built(self, workload: Workload) -> nn.Module:
        model = self._with_auxiliary(workload.build_model()).to(dtype(self._options.precision.parameters))
        beside = LossContext(self._auxiliary.callables)
        self._trial = Trial(workload, self._options, self._config, self._place, self._ranks, beside)
        self._trial.watch(model, self._trains)
        self._part = spread(model, workload, self._config, self._place, self._options, self._trial)
        self._pipeline, self._attention = self._part.pipeline, self._part.attention
        self.stage_depths = self._part.depths
        return model.to(self._device)

    def _blocks(self) -> list[nn.Module]:
        return self._part.blocks

    def _wrap(self, model: nn.Module) -> nn.Module:
        root = model if self._pipeline is None else self._pipeline.stage
        mesh = self._place.axis("data")
        self._sum: GradientSum | None = None
        self._same = None
        if mesh is not None and self._config.shard:
            ready_to_shard(model)
            # a pipeline runs several forwards before a backward
            shard_apart(root, [*self._part.blocks, *attached(model).values()], mesh, self._pipeline is None)
            if not self._options.traced:
                self._same = SameParameters(model, mesh.get_group(), self._device, "leave shard out")
        elif mesh is not None:
            self._sum = GradientSum(model.parameters(), mesh.get_group())
        self._held = Held(model)
        self._tied = TiedEnds(model, self._part.tied, self._place.group("pp"), self._options.traced)
        return root

    def _wrap_auxiliary(self, model: nn.Module, precision: Any) -> nn.Module:
        return beside_spread(model, self._workload, self._config, self._place, self._options, precision)

    def _build_optimizer(self, build: OptimizerFactory) -> torch.optim.Optimizer:
        def made(cls: type[torch.optim.Optimizer], groups: list[Any], arguments: dict[str, Any]) -> Any:
            return cls(groups or [{"params": []}], **arguments)  # a stage may have nothing to train

        return build(self._held, made)

    def _check_engaged(self) -> None:
        self._trial.check_pieces(self._part, self._held, self._copies)
        summed = self._tried()
        self._partial = [p for name, p in self._model.named_parameters() if name in summed]
        self._held.clear_gradients()
        if self._pipeline is not None:
            self._pipeline.begin()

    def _tried(self) -> set[str]:
        """Runs the trial step; returns the parameters to sum over tensor ranks."""
        before, precision = (self._options, self._scaler), exact(self._options.precision)
        self._options, self._scaler = replace(self._options, precision=precision), MeshScaler(enabled=False)
        self._tries = True
        with arithmetic(precision, self._options.machine), torch.compiler.set_stance("force_eager"):
            found = self._trial.run(self._model, self._trial_loss, self._trial_step if self._trains else None)
        self._tries = False
        self._options, self._scaler = before
        return found

    def _trial_loss(self, batch: MicroBatch) -> Tensor | None:
        """This rank's part of the mean loss of all samples."""

        def work(model: nn.Module, tensors: Batch) -> Tensor:
            context = LossContext(self._auxiliary.callables, self._trial.statistics(batch, self._device))
            return self._trial.mean(self._loss_sums(model, tensors, context))

        attention, blocks = self._attention, len(self._part.blocks)
        with attention.called_by(blocks, self._model.config) if attention is not None else nullcontext():
            return self._through(batch, work)

    def _trial_step(self, batch: MicroBatch) -> None:
        self.forward_backward([batch])
        if self._same is not None:
            self._same.check()

    def _ready_to_train(self) -> None:
        if not self._tries:
            super()._ready_to_train()

    def engaged(self) -> Engaged:
        sizes = self._part.sizes
        return Engaged(
            wrapper=f"{type(self._forward).__name__} on {self._place}",
            world_size=self._ranks.world,
            local_parameters=sum(self._part.held(self._held).values()),
            global_parameters=sum(sizes.values()),
            trained_parameters=sum(sizes[name] for name, trains in self._part.trains.items() if trains),
            parameter_dtype=", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in self._held.parameters()})),
        )

    def measured(self) -> dict[str, Any]:
        return {**super().measured(), **({} if self._pipeline is None else self._pipeline.measured())}

    def _copies(self, parameter: Tensor) -> float:
        """Returns the number of ranks that hold the same piece of a parameter."""
        return (2 if parameter in self._tied else 1) * self._ranks.world / self._config.pp / shards(parameter)

    # --- a step ------------------------------------------------------------------------------------------------------

    def _exchange(self, last: bool) -> AbstractContextManager[Any]:
        if self._averaged_over > 1:
            cast(FSDPModule, self._forward).set_requires_gradient_sync(last)
        return nullcontext()

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        full = list(micro_batches) if self._pipeline is None else self._pipeline.filled(micro_batches)
        if self._sum is not None:
            self._sum.expect(len(full))
        with loss_parallel() if self._config.loss_parallel else nullcontext():
            loss = super().forward_backward(full) if self._pipeline is None else self._window(self._pipeline, full)
        if self._sum is not None:
            self._sum.finish()
        if self._same is not None:
            self._same.look()
        self._tied.sum_gradients()
        if self._partial:
            sum_gradients(self._partial, self._place.required("tp").get_group())
        self._held.take_gradients()
        if self.term_shares is not None and not self._place.tells_loss:
            self.term_shares *= 0
        return loss if self._place.tells_loss else loss * 0

    def _window(self, pipeline: Pipeline, full: Sequence[MicroBatch]) -> Tensor:
        self._ready_to_train()
        context = LossContext(self._auxiliary.callables)
        window = WindowLoss(self._workload, self._global_counts(full), self._device)
        batches = [self._to_device(batch.tensors) for batch in full]
        total = torch.zeros((), device=self._device)
        self._scaler.scale(total)  # makes the scale, on stages without a loss too

        def loss_of(model: nn.Module, number: int) -> Tensor:
            with autocast(self._options.precision, self._device):
                loss = window.part(self._loss_sums(model, batches[number], context), full[number].counts)
            total.add_(loss.detach())
            return self._scaler.scale(loss * self._averaged_over)

        part = untimed if self._options.traced else self._options.part  # a trace tells the passes apart
        with part("forward_backward"):
            pipeline.window(batches, loss_of)
        self.term_shares = window.shares
        return total

    def _to_device(self, batch: Batch) -> Batch:
        cuts = self._attention is not None and not self._attention.has_whole_sequences
        ranks = self._config.cp if cuts else 1
        if ranks > 1 or self._length_share > 1:
            pads = self._workload.by_position
            batch = part_of(batch, pads, self._place.at["cp"] if cuts else 0, ranks, self._length_share)
        return super()._to_device(batch)

    @property
    def _length_share(self) -> int:
        """Returns the number of tensor ranks that share each sequence between the layers."""
        return self._config.tp if self._config.sequence_parallel else 1

    def _loss_sums(self, model: nn.Module, batch: Batch, context: LossContext) -> Mapping[str, Tensor]:
        sums = super()._loss_sums(model, batch, context)
        return {name: loss.full_tensor() if isinstance(loss, DTensor) else loss for name, loss in sums.items()}

    def optimizer_step(self, lr_factor: float, judge: StepGuard | None = None) -> StepResult:
        result = super().optimizer_step(lr_factor, judge)
        self._held.clear_gradients()
        return result

    def _global_norm(self, norms: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Counts each piece once, however many ranks hold it."""
        copies = sent(torch.tensor([self._copies(p) for p in parameters]), self._device)
        squares = (norms**2 / copies).sum()
        return self._ranks.sum(squares).sqrt()

    # --- evaluation and prediction -----------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(
        self, batches: Iterable[MicroBatch], metrics: Mapping[str, Metric], scores: SampleScores | None = None
    ) -> dict[str, float]:
        """Evaluates on the last stage, its data ranks together; its last rank sends the result to all. With cp > 1
        there are no scores: no rank has a whole sample."""
        self._ready_for_inference()
        data_ranks = self._place.group("data")
        for metric in metrics.values():
            metric.process_group = data_ranks
            metric.distributed_available_fn = lambda: data_ranks is not None
        sums = EvaluationSums(self._workload, metrics, scores if self._place.cp == 1 else None, self._device)
        outputs_of = functools.partial(self._workload.outputs_in, context=LossContext(self._auxiliary.callables))
        for batch in batches:
            outputs: Outputs | None = self._through(batch, outputs_of)
            if batch.counts and outputs is not None:
                sums.add(outputs)
        values = {}
        if self._place.at["pp"] == self._config.pp - 1:
            values = sums.values(lambda each: self._place.sum(each, "data"))
        # one rank's: which save is best and when to stop must not hang on the last bit of copies
        return self._ranks.all_gather(values)[-1]

    @torch.no_grad()
    def predict(self, batches: Iterable[MicroBatch]) -> Iterator[dict[str, Any]]:
        self._ready_for_inference()
        for batch in batches:
            with self._attention.whole_sequences() if self._attention else nullcontext():
                rows = self._through(batch, self._workload.predict) or []
            speaks = batch.counts and self._place.at["tp"] == self._place.at["cp"] == 0
            for dealt in self._ranks.gather(rows if speaks else []) or ():
                yield from dealt

    def _through(self, batch: MicroBatch, work: Callable[[nn.Module, Batch], Any]) -> Any:
        """Returns the result of `work` on the model and a batch on the last stage, None on others."""
        tensors = self._to_device(batch.tensors)

        def autocasted(model: nn.Module) -> Any:
            with autocast(self._options.precision, self._device):
                return work(model, tensors)

        if self._pipeline is None:
            return autocasted(self._forward)
        return self._pipeline.forward_only(tensors, autocasted)

    def _ready_for_inference(self) -> None:
        data_ranks = self._place.group("data")
        for buffer in self._model.buffers() if data_ranks is not None else ():
            dist.broadcast(buffer, group=data_ranks, group_src=0)
        self._model.eval()
