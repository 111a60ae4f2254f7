"""Whether a planned candidate fits the memory of its devices, and by how much it is short."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.plan.candidates import Planned
from drivetrain.plan.step_costs import StepMemory
from drivetrain.tracking.quantities import size_text

# what no trace sees on one rank, in bytes: at least, at most. CUDA: context, NCCL's buffers, cuBLAS' and cuDNN's
# workspaces, as measured from 0.5 to 1.6 GB. CPU: the libraries that a rank imports, 0.5 GB with PyTorch alone and 0.9
# with Transformers and DeepSpeed
UNSEEN = {"cuda": (500_000_000, 1_600_000_000), "cpu": (500_000_000, 900_000_000)}


@dataclass(frozen=True)
class Verdict:
    """short_bytes: what one rank lacks, with the most that no trace sees; 0 where it fits."""

    planned: Planned
    room_bytes: int | None
    unseen_bytes: tuple[int, int] | None
    short_bytes: int | None

    @property
    def memory(self) -> StepMemory | None:
        return None if self.planned.costs is None else self.planned.costs.memory

    @property
    def fits(self) -> bool:
        return self.short_bytes == 0

    @property
    def reason(self) -> str | None:
        """Returns why the candidate was refused, or does not fit."""
        if self.memory is None or self.short_bytes is None or self.unseen_bytes is None or self.room_bytes is None:
            return self.planned.reason
        if self.fits:
            return None
        own, most = size_text(self.memory.reserved), size_text(self.unseen_bytes[1])
        return (
            f"a rank takes {own} and up to {most} that no trace sees, and has {size_text(self.room_bytes)}: "
            f"short of {size_text(self.short_bytes)}"
        )

    @property
    def fits_text(self) -> str:
        if self.memory is None:
            return "refused"
        return "yes" if self.fits else f"short of {size_text(self.short_bytes or 0)}"

    def row(self) -> dict[str, Any]:
        """Returns the row of `plan --json`; fields that are not known are left out."""
        run, costs = self.planned.candidate.run, self.planned.costs
        names: dict[str, Any] = {}
        if run is not None:
            names = {
                "engine": run.engine.label,
                "precision": run.precision,
                "processes": run.world_size,
                "micro_batch_size": run.micro_batch_limit,
            }
        row = {**names, "fits": self.fits, "reason": self.reason}
        if costs is None:
            return row
        return row | {
            "allocated_bytes": costs.memory.allocated,
            "reserved_bytes": costs.memory.reserved,
            "unseen_bytes": self.unseen_bytes,
            "room_bytes": self.room_bytes,
            "short_bytes": self.short_bytes,
            "parts": dict(costs.memory.parts),
            "timeline": costs.memory.timeline,
            "trained_parameters": costs.trained_parameters,
            "origin": costs.origin,
        }


def verdict(planned: Planned, machine: Machine) -> Verdict:
    run, costs = planned.candidate.run, planned.costs
    if run is None or costs is None:
        return Verdict(planned, None, None, None)
    room, unseen = room_of_a_rank(run, machine), UNSEEN[machine.device]
    return Verdict(planned, room, unseen, max(0, costs.memory.reserved + unseen[1] - room))


def room_of_a_rank(run: RunConfig, machine: Machine) -> int:
    """Returns the bytes that a rank may take: a device's, of a CPU host the rank's share, or the run's own limit."""
    shares = 1 if machine.device == "cuda" else run.world_size // run.nodes
    room = machine.memory_bytes // shares
    return room if run.memory_limit_bytes is None else min(room, run.memory_limit_bytes)
