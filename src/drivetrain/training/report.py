"""The result of a run: what was done, how well, at what cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from drivetrain.config.files import MOST_JSON_BYTES, parsed_json, read_text
from drivetrain.runtime.atomic_file import write_whole, writing
from drivetrain.runtime.strict_json import dumps, restored

Status = Literal["completed", "stopped_early", "interrupted"]


class RunReport(BaseModel):
    """Measured values only. Memory in bytes, named as in docs/measure.md: allocated, reserved, tensor, resident."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    name: str
    verb: Literal["train", "predict"] = "train"
    status: Status
    precision: str
    emulated: bool  # 16-bit products were computed as rounded fp32 products
    engine: str
    device: str
    engaged: dict[str, Any]
    chosen: dict[str, Any] = {}  # by the machine and the data: row_tokens, not_compiled, loader_workers, allocator

    steps: int
    skipped_steps: int
    epochs: float
    samples: int
    metrics: dict[str, float]  # of the last evaluation
    best: dict[str, Any] | None  # step, metric, value

    seconds: float  # wall time of the training loop over all its parts, resumed ones included
    seconds_by_part: dict[str, float]  # of this process
    samples_per_second: float | None  # steady: without the first steps, evaluation and saving
    peak_memory: dict[str, int]  # of the rank that needed most
    utilisation: dict[str, Any]  # of all devices
    flops_per_sample: float | None  # forward and backward, recompute included
    flops_per_second: float | None
    matmul_flops_per_second: float | None  # what the devices reach on large matrices in the compute dtype
    ranks: list[dict[str, Any]] = []  # of each: peak_memory, utilisation, local_parameters, ...

    restarts: list[str] = []  # why, in this launch
    effective_share: float | None = None  # of the time since the launch: in steps, evaluations and saves that count
    network: dict[str, float] = {}  # between the ranks, before the first step

    data: dict[str, Any]
    checkpoint: str | None  # newest
    best_checkpoint: str | None
    versions: dict[str, str]

    @property
    def flops_share(self) -> float | None:
        """Achieved share of the device's measured matmul rate."""
        if self.flops_per_second is None or not self.matmul_flops_per_second:
            return None
        return self.flops_per_second / self.matmul_flops_per_second

    @property
    def share_of_full_training(self) -> float | None:
        """Bytes of weights, gradients and optimizer state over those of a run that trains all parameters, each with as
        many bytes as the trained ones have here. None where that is this run."""
        trained, total = self.engaged["trained_parameters"], self.engaged["global_parameters"]
        held = self.ranks[0].get("held_bytes") if self.ranks else None
        if not held or not 0 < trained < total:
            return None
        share = sum(held.values()) / ((sum(held.values()) - held["frozen"]) * total / trained)
        return float(share)

    def write(self, path: Path) -> None:
        """RunError if there is no room for it; an earlier report stays."""
        with writing(path):
            write_whole(path, dumps({**self.model_dump(), "flops_share": self.flops_share}, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> RunReport:
        found = parsed_json(read_text(path, MOST_JSON_BYTES))
        if not isinstance(found, dict):
            raise ValueError(f"{path.name} holds a {type(found).__name__}, no report")
        return cls.model_validate(restored(found))
