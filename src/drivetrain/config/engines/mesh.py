"""One mesh of devices: pipeline stages, data ranks, context ranks and tensor ranks; their product is the world size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from drivetrain.config.adapter import PROMPTS, Adapter
from drivetrain.config.base import doc
from drivetrain.config.engines.block import NO_FP8, NO_MASTER, EngineBlock, Shares, Traits
from drivetrain.config.machine import Machine
from drivetrain.config.optimizers import OptimizerKind
from drivetrain.errors import Problem

if TYPE_CHECKING:
    from drivetrain.config.run import RunConfig

Schedule = Literal["gpipe", "1f1b", "zero_bubble"]
DEGREES = ("pp", "dp", "cp", "tp")
# options in an engine's name: without a value if they are on, schedules by their own names
NAMED: dict[str, dict[str, Any]] = {
    **{name: {name: True} for name in ("shard", "sequence_parallel", "loss_parallel")},
    **{name: {"schedule": name} for name in ("gpipe", "zero_bubble")},
}
LABEL = rf"mesh(-(({'|'.join(DEGREES)})[1-9][0-9]*|{'|'.join(NAMED)}))+"


# what a Transformers config calls the things that a degree must divide
HEADS = ("num_attention_heads", "num_key_value_heads", "n_head", "n_heads")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
DROPS_APART = "with sequence_parallel each rank draws for itself, and adapters' copies on ranks would drop other inputs"
NO_PROMPTS = "cuts models and sequences, and virtual tokens are put before those by a wrapper of PEFT's"


class MeshEngine(EngineBlock):
    TRAITS: ClassVar[Traits] = Traits(
        "pipeline, data, context and tensor parallel on one mesh",
        "mesh.engine:MeshEngine",
        refuses={"quantisation_aware": "tensor parallelism cuts rows, and with them the groups that share a scale"},
        lacks=NO_MASTER | NO_FP8,
    )
    name: Literal["mesh"] = doc("One device mesh: pipeline, data, context and tensor parallel in any product", "mesh")
    pp: int = doc("Pipeline stages that the model's blocks are divided among", 1, gt=0)
    dp: int | None = doc(
        "Ranks that share each global batch; left out, the world size over the other degrees", None, gt=0
    )
    cp: int = doc("Ranks that share each sequence (context parallel)", 1, gt=0)
    tp: int = doc("Ranks that share each layer (tensor parallel)", 1, gt=0)
    shard: bool = doc("dp and cp ranks keep shards of parameters, gradients and optimizer state, as fsdp", False)
    schedule: Schedule = doc("Order in which pipeline stages run micro-batches", "1f1b")
    sequence_parallel: bool = doc("tp: between the sharded layers each rank keeps a part of every sequence", False)
    loss_parallel: bool = doc("tp: logits stay sharded over the vocabulary, the loss too", False)

    @property
    def beside_data(self) -> int:
        """The number of ranks that work on the same sample."""
        return self.pp * self.cp * self.tp

    @property
    def label(self) -> str:
        """A name made of the degrees above 1 and the options that were chosen: mesh-pp2-tp2, mesh-dp2-shard. `of_label`
        reads it."""
        degrees = {name: getattr(self, name) or 1 for name in DEGREES}
        parts = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
        chosen = [name for name, option in NAMED.items() if all(getattr(self, k) == v for k, v in option.items())]
        return "-".join(["mesh", *parts, *chosen])

    @property
    def gives_pieces(self) -> bool:
        """Whether ranks hold shards of a parameter. Pipeline stages hold whole parameters."""
        return self.tp > 1 or self.shard

    @property
    def least_world(self) -> int:
        return self.beside_data * (self.dp or 1)

    def data_degree(self, devices: int) -> int:
        """Returns the number of ranks that each global batch is divided among."""
        return self.dp or max(1, devices // self.beside_data)

    def default_processes(self, machine: Machine, nodes: int) -> int:
        """Returns the product of the degrees; all GPUs where dp is left out and they can be used."""
        here = machine.device_count if machine.device == "cuda" else 1
        if self.dp is None and (here * nodes) % self.beside_data == 0:
            return here
        return max(1, self.least_world // nodes)

    def shares(self, devices: int) -> Shares:
        split = 1 / (self.pp * self.tp)
        if not self.shard:
            return Shares(split, split, split)
        share = split / (self.data_degree(devices) * self.cp)
        return Shares(share, share, share, gathers=2.0 if self.pp == 1 else 1.0)  # stages keep what they gathered

    @property
    def whole_on_device(self) -> bool:
        """Whether a rank holds all weights: not where they are cut or sharded on the CPU first."""
        return self.pp * self.tp == 1 and not self.shard

    @property
    def smallest_world(self) -> int:
        return self.beside_data

    def on(self, world: int) -> Self:
        data = world // self.beside_data
        shard = self.shard and data * self.cp > 1  # one rank has no other to share with
        return self.model_copy(update={"dp": None if self.dp is None else data, "shard": shard})

    @property
    def axes(self) -> Mapping[str, int]:
        return {name: ranks for name in ("pp", "cp", "tp") if (ranks := getattr(self, name)) > 1}

    @property
    def stages(self) -> int:
        return self.pp

    def needs_rows(self, devices: int) -> bool:
        del devices
        return self.cp > 1  # each row is cut

    @property
    def single_pass_axis(self) -> str | None:
        """Pipeline stages hold parts of one model, context ranks parts of each sequence."""
        return "pp" if self.pp > 1 else "cp" if self.cp > 1 else None

    @property
    def takes_encoder_rows(self) -> bool:
        return False  # not tried with stages and parts of layers

    @property
    def splits_the_head(self) -> bool:
        return self.tp > 1

    def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
        if run.processes is not None:  # else they are as many as it asks for
            yield from self.arithmetic(run.world_size, where)
        yield from self._options_without_degree(run.world_size, where)
        if run.micro_batch_limit is not None and (run.batch_size is not None or run.batch_size_per_device is not None):
            share = -(-run.step_samples // run.data_parallel_size)
            yield from self._idle_stages(share, run.micro_batch_limit)
        if self.schedule == "zero_bubble" and run.compile is True:
            why = "it takes backward passes apart, which PyTorch cannot do with compiled blocks"
            yield Problem(f"{where}.schedule", why, "leave compile out, or take 1f1b")
        yield from self.model_problems(run.workload.known_config, where)

    def arithmetic(self, world: int, where: str) -> Iterator[Problem]:
        """Reports degrees whose product is not the world size."""
        given = {name: getattr(self, name) for name in DEGREES}
        product = " * ".join(f"{name} ({degree})" for name, degree in given.items() if degree not in (1, None)) or "1"
        if self.dp is not None and self.least_world != world:
            fix = f"give processes * nodes = {self.least_world}, or leave dp out"
            yield Problem(where, f"world size ({world}) != {product}", fix)
        elif self.dp is None and world % self.beside_data:
            yield Problem(where, f"world size ({world}) is no multiple of {product}", "change processes or a degree")

    def _options_without_degree(self, world: int, where: str) -> Iterator[Problem]:
        """Reports options of an axis that has one rank only."""
        if self.shard and self.data_degree(world) * self.cp == 1:
            yield Problem(f"{where}.shard", "was given, but dp and cp are 1", "give dp or cp, or leave it out")
        for field in ("sequence_parallel", "loss_parallel"):
            if getattr(self, field) and self.tp == 1:
                yield Problem(f"{where}.{field}", "was given, but tp is 1", "give tp, or leave it out")
        if self.schedule != "1f1b" and self.pp == 1:
            yield Problem(f"{where}.schedule", f"{self.schedule} was given, but pp is 1", "give pp, or leave it out")

    def _idle_stages(self, share: int, micro_batch: int) -> Iterator[Problem]:
        """Reports fewer micro-batches than stages: the missing ones would be made up, and would not count.

        share: samples of a step that a data rank has, those that the model makes counted.
        """
        pieces = -(-share // micro_batch)
        if pieces < min(self.pp, share):
            samples = f"the {share} samples of a data rank"
            why = f"{micro_batch} cuts {samples} into {pieces}, fewer than pp ({self.pp}) stages"
            yield Problem("micro_batch_size", why, f"give at most {max(1, share // self.pp)}")

    def model_problems(self, config: dict[str, Any], where: str) -> Iterator[Problem]:
        """Reports degrees that a model's config rules out. Fields that the config lacks are checked when the model is
        built."""
        for name in HEADS:
            heads = config.get(name)
            if not isinstance(heads, int):
                continue
            if heads % self.tp:
                why = f"{name} ({heads}) is no multiple of tp ({self.tp})"
                yield Problem(f"{where}.tp", why, f"give a divisor of {heads}")
            elif heads % (self.cp * self.tp):  # context ranks deal out the heads that tensor ranks have left
                product = f"cp ({self.cp})" + (f" * tp ({self.tp})" if self.tp > 1 else "")
                why = f"{name} ({heads}) is no multiple of {product}"
                yield Problem(f"{where}.cp", why, f"give divisors of {heads}")
        for name in LAYERS:
            layers = config.get(name)
            if isinstance(layers, int) and layers < self.pp:
                yield Problem(f"{where}.pp", f"{name} ({layers}) < pp ({self.pp})", f"give at most {layers} stages")

    def adapter_problems(self, adapters: Sequence[Adapter], compiles: bool) -> Iterator[Problem]:
        """Reports adapters that cannot be spread. Adapters at a path are checked when the model is built."""
        prompts = sorted({adapter.method for adapter in adapters if adapter.path is None and adapter.method in PROMPTS})
        if prompts:
            why = f"engine=mesh {NO_PROMPTS} ({', '.join(prompts)})"
            yield Problem("adapter.method", why, "take engine=ddp, fsdp or deepspeed, or give lora")
        if self.tp > 1 and compiles:
            why = f"PyTorch's compiler fails on adapters of layers that tp ({self.tp}) ranks share"
            yield Problem("compile", why, "leave it or engine.tp out")
        if self.sequence_parallel and any(adapter.dropout for adapter in adapters):
            yield Problem("adapter.dropout", DROPS_APART, "leave it or engine.sequence_parallel out")
        if self.tp > 1 and any(adapter.dora for adapter in adapters):
            why = f"DoRA measures whole rows of weights, of which each of tp ({self.tp}) ranks has a part"
            yield Problem("adapter.dora", why, "leave it or engine.tp out")
        if self.tp > 1 and any(adapter.method == "oft" and adapter.path is None for adapter in adapters):
            why = f"OFT turns whole inputs, of which each of tp ({self.tp}) ranks has a part"
            yield Problem("adapter.method", why, "give lora, or leave engine.tp out")

    def low_bit_problems(self, kind: OptimizerKind, label: str) -> Iterator[Problem]:
        del label
        why = f"{kind.name} keeps its state in blocks, which are not joined over a mesh yet"
        yield Problem("optimizer.name", why, "take adamw, or engine=fsdp")


def of_label(name: str) -> dict[str, Any] | None:
    """Returns the block that a name such as mesh-pp2-tp2 is short for; None for names of another form."""
    if re.fullmatch(LABEL, name) is None:
        return None
    block: dict[str, Any] = {"name": "mesh"}
    for part in name.split("-")[1:]:
        named = NAMED.get(part) or {part[:2]: int(part[2:])}
        if named.keys() & block.keys():
            return None
        block |= named
    return block
