"""The run file as a whole."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from drivetrain.config import training
from drivetrain.config.adapter import Adapters
from drivetrain.config.base import Frozen, JsonSchemaMadeLate, decides_memory, doc
from drivetrain.config.engines import SINGLE, EngineConfig
from drivetrain.config.location import Location, Mirror, store_address
from drivetrain.config.numerics import Numerics
from drivetrain.config.precision import PRECISIONS, Precision, PrecisionName
from drivetrain.config.quantisation_aware import QuantisationAwareBlock
from drivetrain.config.quantised import QuantisedBaseBlock
from drivetrain.config.workload import Workload

MICRO_BATCHES_A_STAGE = 4  # stages then wait for (p - 1) / (5p - 1), less than a fifth of the time
NAME = r"^[^/\\]*[^/\\.][^/\\]*$"  # of a run: a folder's own name
MOST_EVALUATED = 128  # samples: on many devices the global batch would be too much for each of them


class RunConfig(Frozen):
    name: str = doc("Name of the run; left out, that of the run file", "run", min_length=1, pattern=NAME)
    output: Location | None = doc("Folder for all results; left out, runs/<name>", None)
    mirror: Mirror | None = doc(
        "Address in an object store, s3://BUCKET/FOLDER, where the results are uploaded to while the run goes on", None
    )

    workload: Annotated[Workload, Field(discriminator="type")] = doc(
        "The training task: model, data and kind", json_schema_extra=decides_memory
    )
    adapter: Adapters | None = doc(
        "Train adapters beside the frozen model: one block, or a list of them", None, json_schema_extra=decides_memory
    )
    quantised_base: QuantisedBaseBlock | None = doc(
        "Keep the frozen model under adapters in 4 or 8 bits", None, json_schema_extra=decides_memory
    )
    quantisation_aware: QuantisationAwareBlock | None = doc(
        "Train linear layers to be quantised in the end", None, json_schema_extra=decides_memory
    )
    precision: Annotated[PrecisionName, JsonSchemaMadeLate(lambda: {"enum": [*PRECISIONS, "auto"]})] = doc(
        f"{', '.join(PRECISIONS)}; auto: a plan chooses (train, check)", "fp32", json_schema_extra=decides_memory
    )
    scaler: training.Scaler = doc("Loss scaling (fp16-mixed, fp16-master)", training.Scaler())
    engine: EngineConfig = doc(
        "How the run is spread over devices; auto: a plan chooses (train, check)",
        SINGLE,
        json_schema_extra=decides_memory,
    )
    processes: int | None = doc(
        "Ranks of ONE machine, one a device; left out, as many as it has GPUs",
        None,
        gt=0,
        json_schema_extra=decides_memory,
    )
    nodes: int = doc("Machines the run is spread over", 1, gt=0, json_schema_extra=decides_memory)
    min_nodes: int | None = doc("Machines that are enough to start, and to go on when others are lost", None, gt=0)
    max_restarts: int = doc("Restarts from the newest good checkpoint after a process or a machine died", 0, ge=0)
    grace_seconds: int = doc("Time to save in after SIGTERM or Ctrl-C; then ranks are ended", 300, gt=0)
    hang_seconds: int | None = doc(
        "End the run after so long a standstill, and report which rank waits where; null: never", 300, gt=0
    )
    device: Literal["auto", "cpu", "cuda"] = doc(
        "auto takes a GPU if there is one", "auto", json_schema_extra=decides_memory
    )
    memory_limit: float | None = doc(
        "GiB that a process may take of its device; left out, all there is",
        None,
        gt=0,
        json_schema_extra=decides_memory,
    )

    batch_size: int | None = doc(
        "Samples of one step over all devices: the global batch", None, gt=0, json_schema_extra=decides_memory
    )
    batch_size_per_device: int | None = doc(
        "The same for one device; give one of the two", None, gt=0, json_schema_extra=decides_memory
    )
    micro_batch_size: Annotated[int, Field(gt=0)] | Literal["auto"] | None = doc(
        "Samples one device runs at once; more are accumulated. auto tries what fits", None
    )
    micro_batch_tokens: int | None = doc("Tokens one device runs at once; more are accumulated", None, gt=0)

    loop: training.Loop = doc("Length of the run")
    optimizer: training.Optimizer = doc("Optimizer", training.Optimizer(), json_schema_extra=decides_memory)
    schedule: training.Schedule = doc("Learning rate over the run", training.Schedule())
    numerics: Numerics = doc("Reaction to spikes and numbers that are not finite", Numerics())
    evaluation: training.Evaluation = doc("When and how to evaluate", training.Evaluation())
    checkpoints: training.Checkpoints = doc("When to save and what to keep", training.Checkpoints())
    tracking: training.Tracking = doc("Progress, files and trackers of the run", training.Tracking())
    loader: training.Loader = doc("How data reach the model", training.Loader())

    recompute: bool | Literal["selective"] = doc(
        "Recompute activations in the backward pass: less memory, more time; selective keeps matrix products",
        False,
        json_schema_extra=decides_memory,
    )
    offload_activations: bool = doc(
        "Keep activations of the model's blocks in CPU memory until the backward pass: less GPU memory, more time",
        False,
        json_schema_extra=decides_memory,
    )
    compile: bool | Literal["auto"] = doc(
        "Compile the model's blocks with torch.compile; auto: on a GPU, where it is known to pay",
        "auto",
        json_schema_extra=decides_memory,
    )
    allocator: Literal["auto", "keep", "system"] = doc(
        "keep: freed CPU memory is kept for reuse (quicker, higher resident memory), a GPU's lies in segments that "
        "grow (fewer gaps); system: the defaults of the C library and PyTorch; auto: keep, or on a CPU, with an engine "
        "that shards to save memory, system",
        "auto",
        json_schema_extra=decides_memory,
    )
    seed: int = doc("Seed of the weights, the data order, augmentation and dropout", 0, ge=0, lt=2**32)
    deterministic: bool = doc("GPU: choose deterministic kernels, so that resuming is exact to the bit", False)

    @model_validator(mode="before")
    @classmethod
    def _mirrored_output(cls, given: Any) -> Any:
        """Takes an address in a store as output for the mirror of runs/<name>."""
        output = given.get("output") if isinstance(given, dict) else None
        if not isinstance(output, str | Path) or store_address(output) is None or given.get("mirror") is not None:
            return given
        return {**{key: value for key, value in given.items() if key != "output"}, "mirror": store_address(output)}

    @classmethod
    def deciding_memory(cls) -> list[str]:
        """Returns the names of the fields that decide how much memory a sample takes, or how many samples there
        are."""
        return [name for name, field in cls.model_fields.items() if field.json_schema_extra is decides_memory]

    @property
    def folder(self) -> Path:
        return self.output.expanduser() if self.output is not None else Path("runs") / self.name

    @property
    def precision_spec(self) -> Precision:
        return PRECISIONS[self.precision]

    @property
    def world_size(self) -> int:
        """The number of processes; a number left out counts as one (`rules.resolved` fills it in)."""
        return (self.processes or 1) * self.nodes if self.engine.traits.spreads else 1

    @property
    def devices(self) -> int:
        """The number of devices: one a process, with dp several."""
        return self.engine.devices(self.processes, self.world_size)

    @property
    def data_parallel_size(self) -> int:
        """The number of devices that share each global batch; on a mesh, groups of devices."""
        return self.engine.data_degree(self.devices)

    @property
    def global_batch(self) -> int:
        """The number of samples of one step over all devices."""
        if self.batch_size is not None:
            return self.batch_size
        assert self.batch_size_per_device is not None, "rules.check lets no run without a batch pass"
        return self.batch_size_per_device * self.data_parallel_size

    @property
    def memory_limit_bytes(self) -> int | None:
        return None if self.memory_limit is None else int(self.memory_limit * 2**30)

    @property
    def micro_batch_limit(self) -> int | None:
        """micro_batch_size if it is a number. `auto` is resolved before training starts."""
        return None if self.micro_batch_size == "auto" else self.micro_batch_size

    @property
    def step_samples(self) -> int:
        """Returns the samples that a step learns from: those of the global batch, or those that the model makes."""
        return math.ceil(self.global_batch * self.workload.samples_made)

    @property
    def micro_batch(self) -> int:
        """The number of samples that one process runs forward at once in training; with dp, over all its replicas."""
        replicas = self.devices // self.world_size
        if self.micro_batch_limit is not None:
            return self.micro_batch_limit * replicas
        return math.ceil(self.step_samples / self._pieces)

    @property
    def _pieces(self) -> int:
        """Returns how many micro-batches a batch has where the user states none: several for a pipeline, whose stages
        would idle."""
        stages = self.engine.stages
        return self.data_parallel_size * MICRO_BATCHES_A_STAGE * stages if stages > 1 else 1

    @property
    def evaluation_batch(self) -> int:
        """The number of samples that one process runs forward at once in evaluation and prediction."""
        return self.evaluation.batch_size or min(self.micro_batch, MOST_EVALUATED)
