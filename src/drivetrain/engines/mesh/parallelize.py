"""Makes one rank's part of a whole model: cuts its stage out, splits its layers, exchanges attention over ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from drivetrain.config.engines.mesh import NO_PROMPTS, MeshEngine
from drivetrain.config.precision import Precision
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import EngineOptions, untimed
from drivetrain.engines.fsdp import ready_to_shard, shard, shard_outermost
from drivetrain.engines.mesh import tensor_parallel, tensor_plan
from drivetrain.engines.mesh.block_discovery import Anatomy, balanced
from drivetrain.engines.mesh.context_parallel import Ulysses, use_ulysses
from drivetrain.engines.mesh.declared_plan import check_declared
from drivetrain.engines.mesh.dry_run import Trial
from drivetrain.engines.mesh.pipeline import Pipeline
from drivetrain.engines.mesh.stage_split import Link, cut
from drivetrain.engines.mesh.state import Held
from drivetrain.engines.mesh.topology import MeshPosition
from drivetrain.errors import RunError, UserError, problem
from drivetrain.memory.recompute import repeated_blocks
from drivetrain.models.quantised_base import weights_of_codes
from drivetrain.numerics.torch_precision import dtype
from drivetrain.workloads.base import Workload


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a model."""

    blocks: list[nn.Module]  # its own of those that repeat
    whole: dict[str, torch.Size]  # of all weights, those of other ranks too
    trains: dict[str, bool]  # of all parameters
    speaks_for: set[str]  # of the state that it has, what no other stage saves
    tied: list[str]  # parameters that the first and the last stage both hold
    stands: dict[str, int]  # of codes: weights that each of their numbers stands for, none where they are scales
    pipeline: Pipeline | None = None
    attention: Ulysses | None = None
    outline: nn.Module | None = None  # the whole model without numbers, where this is a stage that writes adapters
    depths: tuple[int, ...] = ()  # blocks of each stage, those too that a trace leaves out

    @property
    def sizes(self) -> dict[str, int]:
        """The number of elements of each whole parameter; for codes, of weights."""
        return {name: self.whole[name].numel() * self.stands.get(name, 1) for name in self.trains}

    def held(self, own: nn.Module) -> dict[str, int]:
        """The same for the rank's part."""
        return {name: p.numel() * self.stands.get(name, 1) for name, p in own.named_parameters()}

    def check_pieces(
        self, held: Held, copies: Callable[[Tensor], float], communicator: Communicator, device: torch.device
    ) -> None:
        """Raises RunError unless the ranks hold all of each parameter together. copies: ranks that hold the same
        piece."""
        pieces = sum(count / copies(held.whole(name)) for name, count in self.held(held).items())
        found = int(communicator.sum(torch.tensor(pieces, dtype=torch.float64, device=device)).round())
        total = sum(self.sizes.values())
        if found != total:
            raise RunError(f"engine=mesh: the ranks hold {found:,} different parameters together, not {total:,}")


def spread(
    model: nn.Module, workload: Workload, config: MeshEngine, place: MeshPosition, options: EngineOptions, trial: Trial
) -> RankPart:
    """Spreads in place. model: on the CPU, in its dtype. Raises UserError if it cannot be cut or split so."""
    whole = {name: tensor.shape for name, tensor in model.state_dict().items()}
    trains = {name: p.requires_grad for name, p in model.named_parameters()}
    codes = weights_of_codes(model)
    stands = {name: codes[id(p)] for name, p in model.named_parameters() if id(p) in codes}
    _check_layers_stay(model, config, place)
    _check_no_prompts(workload)
    blocks, pipeline, attention, outline = repeated_blocks(model), None, None, None
    depths: tuple[int, ...] = ()
    tied: list[str] = []
    speaks_for = set(whole)
    plan = _plan(model, workload, config, options) if config.tp > 1 else {}
    if config.pp > 1:
        anatomy = trial.anatomy(model)
        if len(anatomy.blocks) < config.pp:
            why = f"{type(model).__name__} has {len(anatomy.blocks)} blocks, fewer than pp ({config.pp})"
            raise problem("engine.pp", why, f"give at most {len(anatomy.blocks)} stages")
        tied = anatomy.tied
        parts = balanced(anatomy.costs, config.pp)
        depths = tuple(map(len, parts))
        own = _kept(parts[place.at["pp"]], options.stage_blocks, len(anatomy.blocks))
        mine = {anatomy.blocks[number] for number in own}
        blocks = [block for name, block in model.named_modules() if name in mine]
        if workload.adapters is not None and place.leads and place.at["pp"] == 0:
            outline = _outline(model)
        link = Link()
        speaks_for = cut(model, anatomy, own, link)
        pipeline = _pipeline(model, link, anatomy, config, place, options)
    if config.cp > 1:
        if not workload.by_position:
            why = f"the samples of {type(workload).__name__} are no sequences that can be cut"
            raise problem("engine.cp", why, "leave cp out")
        attention = use_ulysses(model, place.required("cp").get_group(), config.tp)
    if plan:
        parallel = {"sequence_parallel": config.sequence_parallel, "loss_parallel": config.loss_parallel}
        tensor_parallel.split(model, place.required("tp"), plan, **parallel)
    return RankPart(blocks, whole, trains, speaks_for, tied, stands, pipeline, attention, outline, depths)


def _kept(own: range, most: int | None, blocks: int) -> range:
    """Returns at most so many of a stage's blocks, with the first or the last one of the model if it has that."""
    if most is None or len(own) <= most:
        return own
    return range(own.stop - most, own.stop) if own.stop == blocks else range(own.start, own.start + most)


def beside_spread(
    model: nn.Module,
    workload: Workload,
    config: MeshEngine,
    place: MeshPosition,
    options: EngineOptions,
    precision: Precision,
) -> nn.Module:
    """Splits and shards an auxiliary model that runs without gradient like the trained one, in place. One without a
    plan for its layers is whole on every tensor rank. precision: that it is kept in."""
    if config.tp > 1:
        try:
            plan = _plan(model, workload, config, options)
        except UserError:
            plan = {}
        if plan:
            apart = {"sequence_parallel": False, "loss_parallel": False}
            tensor_parallel.split(model, place.required("tp"), plan, **apart)
    mesh = place.axis("data")
    if mesh is not None and config.shard:
        ready_to_shard(model)
        shard_apart(model, repeated_blocks(model), mesh, True)
    return model.to(options.device, dtype(precision.parameters))


def shard_apart(root: nn.Module, apart: list[nn.Module], mesh: DeviceMesh, reshard: bool) -> None:
    """Shards each of these modules, and what the root holds outside of them, over the mesh, in place. reshard: whether
    a module is freed after its forward pass."""
    settings: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard}
    for module in apart:
        shard(module, settings)
    shard_outermost(root, bool(apart), settings)


def _outline(model: nn.Module) -> nn.Module:
    """Returns a copy whose tensors are on the meta device."""
    empty: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for p in model.parameters():
        empty[id(p)] = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
    return copy.deepcopy(model, empty)


def _check_no_prompts(workload: Workload) -> None:
    if workload.adapters is not None and workload.adapters.positions:
        raise problem("adapter", f"a mesh {NO_PROMPTS}", "take engine=ddp, fsdp or deepspeed")


def _check_layers_stay(model: nn.Module, config: MeshEngine, place: MeshPosition) -> None:
    """Refuses layers that one rank may leave out at random and another not: they would wait for each other for ever."""
    shards = config.shard and place.dp * place.cp > 1
    options = {"pp": config.pp > 1, "cp": config.cp > 1, "shard": shards, "sequence_parallel": config.sequence_parallel}
    given = [name for name, is_on in options.items() if is_on]
    asked: Any = getattr(model, "config", None)
    chances = vars(asked) if asked is not None and given else {}
    for name, chance in chances.items():
        if name.endswith("layerdrop") and chance:
            why = f"{name} is {chance}: each rank would leave out other layers"
            raise problem(f"engine.{given[0]}", why, f"give {name}: 0 in workload.model.config, or leave it out")


def _plan(model: nn.Module, workload: Workload, config: MeshEngine, options: EngineOptions) -> dict[str, str]:
    declared = workload.layout.tensor_parallel
    if declared:
        check_declared(model, declared)
    plan = tensor_plan.plan_of(model, declared)
    if options.compile and tensor_plan.is_derived(model, declared):
        why = f"the plan of {type(model).__name__} is derived from its layers' names, and such blocks fail to compile"
        raise problem("compile", why, "leave compile or engine.tp out")
    if config.sequence_parallel and not workload.by_position:
        why = f"the samples of {type(workload).__name__} are no sequences that can be cut"
        raise problem("engine.sequence_parallel", why, "leave it out")
    tensor_plan.check_fits(model, plan, config.tp, config.sequence_parallel, config.loss_parallel)
    return plan


def _pipeline(
    model: nn.Module, link: Link, anatomy: Anatomy, config: MeshEngine, place: MeshPosition, options: EngineOptions
) -> Pipeline:
    return Pipeline(
        model,
        link,
        anatomy.hidden,
        schedule=config.schedule,
        group=place.required("pp").get_group(),
        device=options.device,
        transport=dtype(options.precision.parameters),
        length_share=config.tp if config.sequence_parallel else 1,
        part=options.part if options.traced else untimed,  # the passes of a real one take turns: their sum is timed
    )
