"""Suggests what to try next: changes of the run file that should make a step quicker, by profile and plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from drivetrain.config.run import RunConfig

LEAST_GAIN = 0.03  # of a step's seconds: less is not worth a try
LEAST_OVERLAP = 0.10  # of a step's seconds in which ranks only exchange: less is no reason for another engine
# overrides -> seconds of a step; None where it does not fit, or is not known
Planned = Callable[[Sequence[str]], float | None]


@dataclass(frozen=True)
class Suggestion:
    """gain: the share of a step's seconds that it should save. basis: where the gain was taken from: the profile, which
    gives the most that can be saved, or the plan. changes_result: whether the trained model becomes another one."""

    overrides: tuple[str, ...]
    why: str
    gain: float
    basis: Literal["profile", "plan"]
    changes_result: bool = False

    def as_object(self) -> dict[str, Any]:
        """Returns the suggestion as `--json` prints it."""
        return {
            "overrides": list(self.overrides),
            "why": self.why,
            "gain": self.gain,
            "basis": self.basis,
            "changes_result": self.changes_result,
        }


def suggestions(run: RunConfig, rank: dict[str, Any], workers: int, planned: Planned) -> list[Suggestion]:
    """Returns what should save at least LEAST_GAIN of a step, the largest gain first.

    rank: the `breakdown` of the slowest rank. workers: the loader's processes in the profiled steps. planned: called
    with overrides.
    """
    found = [*_by_profile(run, rank, workers), *_by_plan(run, rank, planned)]
    return sorted((each for each in found if each.gain >= LEAST_GAIN), key=lambda each: -each.gain)


def _by_profile(run: RunConfig, rank: dict[str, Any], workers: int) -> Iterator[Suggestion]:
    step = rank["step"]
    waiting = rank["parts"].get("data", 0.0) / step
    if waiting > 0:
        more = max(1, 2 * workers)
        yield Suggestion((f"loader.workers={more}",), f"{waiting:.0%} of a step waits for samples", waiting, "profile")
    if run.recompute is not False and rank["recompute"] > 0:
        share = rank["recompute"] / step
        yield Suggestion(("recompute=false",), f"{share:.0%} of a step repeats the forward pass", share, "profile")
    if rank["on_gpu"] and run.compile is False:
        share = rank["idle"] / step
        why = f"the GPU waits for Python in {share:.0%} of a step"
        yield Suggestion(("compile=true",), why, share, "profile")


def _by_plan(run: RunConfig, rank: dict[str, Any], planned: Planned) -> Iterator[Suggestion]:
    base = planned(())
    if not base:
        return
    for overrides, why, changes in _ways(run, rank):
        seconds = planned(overrides)
        if seconds is not None:
            yield Suggestion(overrides, why, 1 - seconds / base, "plan", changes)


def _ways(run: RunConfig, rank: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str, bool]]:
    """Yields overrides, the reason, and whether they change the result."""
    exposed = rank["exposed_exchange"] / rank["step"]
    if run.engine.driving.gives_pieces and exposed >= LEAST_OVERLAP:
        yield ("engine=ddp",), f"{exposed:.0%} of a step only exchanges; whole weights exchange gradients alone", False
    share = -(-run.global_batch // run.data_parallel_size)
    if run.micro_batch_limit is not None and run.micro_batch_limit < share:
        larger = min(share, 2 * run.micro_batch_limit)
        yield (f"micro_batch_size={larger}",), "larger products use the device better", False
    if run.precision_spec.compute == "float32":
        yield ("precision=bf16-mixed",), "16-bit products are quicker where the device has instructions for them", True
