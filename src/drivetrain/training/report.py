"""The result of a run: the work done, its quality, its cost."""

from __future__ import annotations

import html
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PrivateAttr

from drivetrain.config.files import MOST_JSON_BYTES, parsed_json, read_text
from drivetrain.config.planned import PlannedFigures
from drivetrain.errors import RunError
from drivetrain.runtime.atomic_file import write_whole, writing
from drivetrain.runtime.strict_json import dumps, restored
from drivetrain.tracking.jsonl import FILE_NAME, read_events
from drivetrain.tracking.quantities import figures_text, flops_text, rate_text, size_text

DEPARTS = 0.1  # a measured value that is so far from its plan is reported
Status = Literal["completed", "stopped_early", "interrupted"]


class RunReport(BaseModel):
    """Measured values only. Memory is in bytes: allocated, reserved, tensor, resident (docs/reference/measure.md)."""

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
    # whether more is better, of metrics of which that is known; None: an earlier version wrote the report
    directions: dict[str, bool] | None = None
    best: dict[str, Any] | None  # step, metric, value, higher_is_better
    answers: dict[str, float] = {}  # that were learned from: batches, reward, first_reward, groups_without_signal
    terms: dict[str, float] = {}  # of a loss of several terms, the mean of each at the last point of the curve
    mixture: list[dict[str, Any]] = []  # of each data set: name, samples, share, and its last evaluation

    seconds: float  # wall time of the training loop over all its parts, resumed ones included
    seconds_by_part: dict[str, float]  # of this process
    first_step: int = 0  # steps that were made before this process began, of a run that was resumed
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

    planned: PlannedFigures | None = None  # of a run whose engine or precision a plan decided
    data: dict[str, Any]
    checkpoint: str | None  # newest
    best_checkpoint: str | None
    versions: dict[str, str]

    _folder: Path | None = PrivateAttr(None)

    @property
    def folder(self) -> Path:
        """The run's folder, with report.json, run.yaml, events.jsonl and checkpoints/."""
        if self._folder is not None:
            return self._folder
        if self.checkpoint is not None:
            return Path(self.checkpoint).parents[1]
        raise RunError("this report was not read from a folder, and its run left no checkpoint")

    def within(self, folder: Path) -> RunReport:
        """Returns the same report with another folder, since a run may have been moved."""
        found = self.model_copy()
        found._folder = folder
        return found

    def curve(self) -> dict[str, list[Any]]:
        """Returns columns of the training curve, a row every `tracking.log_every` steps, ready for pandas.DataFrame or
        a plot: step, epoch, loss, grad_norm, lr, scale, skipped_steps, samples, samples_per_second, elapsed_seconds."""
        return self._columns("step", lambda event: event)

    def evaluations(self) -> dict[str, list[Any]]:
        """Returns columns of the evaluations, a row each: step, loss, and one for each metric."""
        return self._columns("evaluation", lambda event: {"step": event["step"], **event["metrics"]})

    def _columns(self, kind: str, row: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, list[Any]]:
        file = self.folder / FILE_NAME
        rows = [row(event) for event in read_events(file) if event["event"] == kind] if file.exists() else []
        names = dict.fromkeys(name for each in rows for name in each if name not in ("event", "time"))
        return {name: [each.get(name) for each in rows] for name in names}

    @property
    def _title(self) -> str:
        """The name of the run's folder, by which several runs of one name are distinguished; else the run's name."""
        return self.folder.name if self._folder is not None or self.checkpoint is not None else self.name

    def summary(self) -> dict[str, str]:
        """Returns the most important values, as texts by name."""
        rate = "" if self.samples_per_second is None else f", {rate_text(self.samples_per_second)} samples/s"
        epochs = "1 epoch" if self.epochs == 1 else f"{self.epochs:.4g} epochs"
        best = self.best or {}
        return {
            "status": f"{self.status.replace('_', ' ')} after {self.steps:,} steps ({epochs})",
            "time": f"{self.seconds:.1f} s{rate}",
            "precision": self.precision + (" (emulated)" if self.emulated else ""),
            "engine": self.engine + (f" on {len(self.ranks)} ranks" if len(self.ranks) > 1 else ""),
            **{name: f"{value:.4f}" for name, value in self.metrics.items()},
            **({"answers": self.answered} if self.answers else {}),
            **({"chance": self.chance} if self.is_chance else {}),
            **({"departs from its plan": "; ".join(self.departures)} if self.departures else {}),
            **({"best": f"{best['metric']} {best['value']:.4f} at step {best['step']}"} if best else {}),
            **({"folder": str(self.folder)} if self._folder is not None or self.checkpoint else {}),
        }

    def __repr__(self) -> str:
        facts = self.summary()
        width = max(map(len, facts))
        return "\n".join([f"RunReport {self._title}", *(f"  {name:<{width}}  {text}" for name, text in facts.items())])

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        """Returns a small table, which notebooks show in place of the repr."""
        escaped = ((html.escape(name), html.escape(text)) for name, text in self.summary().items())
        rows = "".join(f"<tr><th style='text-align:left'>{name}</th><td>{text}</td></tr>" for name, text in escaped)
        return f"<table><caption>{html.escape(self._title)}</caption>{rows}</table>"

    @property
    def answered(self) -> str:
        """A sentence about the rewards of the answers that the model learned from; empty for a run that made none."""
        if not self.answers:
            return ""
        size, share = int(self.answers["batches"]), self.answers.get("groups_without_signal")
        last, first = ("", "") if size == 1 else (f" {size} batches", f" {size}")
        found = f"reward {self.answers['reward']:.4f} in the last{last or ' batch'}, "
        found += f"{self.answers['first_reward']:.4f} in the first{first}"
        return found if share is None else f"{found}; {share:.0%} of the last groups without signal"

    @property
    def flops_share(self) -> float | None:
        """The achieved share of the device's measured matmul rate; None where that rate is the lower of the two."""
        if self.flops_per_second is None or not self.matmul_flops_per_second or self.why_no_flops_share:
            return None
        return self.flops_per_second / self.matmul_flops_per_second

    @property
    def why_no_flops_share(self) -> str:
        """Why a measured matmul rate is nothing to compare with; empty where it is."""
        rate = self.matmul_flops_per_second
        if not rate or (self.flops_per_second or 0) <= rate:
            return ""
        return (
            f"no share: large products, timed after the last step, reached {flops_text(rate)}; other programs probably "
            "slowed them"
        )

    @property
    def share_of_full_training(self) -> float | None:
        """The bytes of weights, gradients and optimizer state over those of a run that trains all parameters, each with
        as many bytes as the trained ones have here. None if this run does."""
        trained, total = self.engaged["trained_parameters"], self.engaged["global_parameters"]
        held = self.ranks[0].get("held_bytes") if self.ranks else None
        if not held or not 0 < trained < total:
            return None
        share = sum(held.values()) / ((sum(held.values()) - held["frozen"]) * total / trained)
        return float(share)

    @property
    def tensor_peak(self) -> int | None:
        """The peak bytes of tensors, on the rank that needed most."""
        return self.peak_memory.get("allocated", self.peak_memory.get("tensor"))

    @property
    def departures(self) -> list[str]:
        """Sentences about measured values that differ from planned ones by more than DEPARTS; empty without a plan."""
        if self.planned is None:
            return []
        values = {
            "the peak of tensors": (self.tensor_peak, self.planned.peak_bytes, size_text),
            "the rate": (self.samples_per_second, self.planned.samples_per_second, _a_second),
        }
        return [
            f"{name} was {text(measured)}, planned {text(planned)}: {measured / planned - 1:+.0%}"
            for name, (measured, planned, text) in values.items()
            if measured and planned and abs(measured / planned - 1) > DEPARTS
        ]

    @property
    def is_chance(self) -> bool:
        """Whether the accuracy is no better than that of always answering the evaluation data's largest class, and the
        other classes are not recognised either."""
        share, accuracy = self.data.get("largest_class", {}).get("share"), self.metrics.get("accuracy")
        classes, f1 = self.data.get("classes", 2), self.metrics.get("macro_f1")
        if f1 is not None and f1 > 1 / classes + 0.05:  # neither one answer for all nor a random one has that
            return False
        return share is not None and share < 1 and accuracy is not None and accuracy <= share + 1e-6

    @property
    def chance(self) -> str:
        """A sentence about an accuracy for which nothing need be learned; empty for a better one."""
        if not self.is_chance:
            return ""
        largest, accuracy = self.data["largest_class"], self.metrics["accuracy"]
        always = f"always answering {largest['class']} gives"
        level = (
            f"is what {always}" if accuracy > largest["share"] - 1e-6 else f"< {largest['share']:.4f}, which {always}"
        )
        return f"accuracy {accuracy:.4f} {level}: the model has learned nothing yet; train longer or raise optimizer.lr"

    def write(self, path: Path) -> None:
        """Writes report.json. Raises RunError if there is no room for it; an earlier report stays."""
        with writing(path):
            write_whole(path, dumps({**self.model_dump(), "flops_share": self.flops_share}, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> RunReport:
        found = parsed_json(read_text(path, MOST_JSON_BYTES))
        if not isinstance(found, dict):
            raise ValueError(f"{path.name} holds a {type(found).__name__}, no report")
        return cls.model_validate(restored(found))


def _a_second(samples: float) -> str:
    return f"{figures_text(samples)} samples/s"
