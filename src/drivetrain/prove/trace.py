"""Records the first steps of a run computed in one way: losses, gradients, samples, and a resume."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from drivetrain.checkpoint.state import same
from drivetrain.config.machine import Machine
from drivetrain.config.run import RunConfig
from drivetrain.data.loader import Window
from drivetrain.data.order import Order
from drivetrain.data.streams.endless import Endless
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.numerics.torch_precision import arithmetic
from drivetrain.prove.deterministic_workload import Stilled, without_dropout
from drivetrain.prove.pace import Pace
from drivetrain.runtime import scratch
from drivetrain.runtime.atomic_file import writing
from drivetrain.tracking.events import Event
from drivetrain.training.assemble import assemble_around
from drivetrain.training.auto_settings import order_of, total_steps_of
from drivetrain.training.evaluation import evaluate
from drivetrain.training.observed_steps import ObservedSteps, keep_nothing
from drivetrain.training.progress import Progress
from drivetrain.training.run_checkpoints import RunCheckpoints
from drivetrain.training.workload_rules import best_metric
from drivetrain.workloads.base import Samples
from drivetrain.workloads.build import build_workload
from drivetrain.workloads.generating import JudgesAnswers, MakesSamples

ROW = 2**20  # elements whose direction is drawn; each further row takes the same, times a number of its own
EVALUATION_BATCHES = 16  # and a ragged one, over all ranks


class Trace(BaseModel):
    """The record of all ranks together."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, tuple[float, float]]]  # a step: name → (norm, projection on a fixed direction)
    batches: list[list[int]]  # a step: the samples of the global batch
    loaded: list[list[int]]  # a step: the samples that the ranks loaded and counted
    evaluation: dict[str, float] | None  # before the first step; None where none was asked for
    engaged: list[dict[str, Any]]  # of each rank
    dropouts: int
    batch_norms: int
    makes_samples: bool  # the model would make samples: steps learned from invented ones
    judges_answers: bool  # evaluations would judge answers of the model
    resumed: bool | None  # whether a save, a fresh start and a resume in the middle led to the same bits


def trace(
    run: RunConfig,
    machine: Machine,
    steps: int,
    resume: bool,
    evaluates: bool = True,
    say: Callable[[str], None] | None = None,
) -> Trace:
    """Records a trace of so many steps, or of all if the run has fewer; called by every rank. Writes nothing but a
    checkpoint in a temporary folder. The first rank alone records gradients. say: receives lines of progress there."""
    with arithmetic(run.precision_spec, machine), without_dropout():
        return _Tracer(run, machine, steps, say or _hush).traced(resume, evaluates)


class _Recorded:
    """Samples that record which rank read them."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self._samples)

    def load(self, index: int, epoch: int) -> Any:
        self.asked.append(index)
        return self._samples.load(index, epoch)


class _Invented:
    """Samples that the model would make: what it makes depends on rounding, so that no two engines could be compared
    by it."""

    def __init__(self, workload: MakesSamples) -> None:
        self._workload, self._prompts = workload, workload.train

    def __len__(self) -> int:
        return len(self._prompts)

    def load(self, index: int, epoch: int) -> Any:
        return self._workload.invented(self._prompts.load(index, epoch), index)


class _RecordedStream(_Recorded, Endless):
    """The same for a stream, which is read draw by draw and has no length."""

    _samples: Endless

    @property
    def identity(self) -> str:
        return self._samples.identity

    def order(self, batch_size: int, seed: int, by_epochs: bool) -> Order:
        return self._samples.order(batch_size, seed, by_epochs)


class _First:
    """The first samples of a data set."""

    def __init__(self, samples: Samples, number: int) -> None:
        self._samples, self._number = samples, min(number, len(samples))

    def __len__(self) -> int:
        return self._number

    def load(self, index: int, epoch: int) -> Any:
        return self._samples.load(index, epoch)


class _Tracer:
    def __init__(self, run: RunConfig, machine: Machine, steps: int, say: Callable[[str], None]) -> None:
        self._run, self._machine, self._say = run, machine, say
        self._ranks = Communicator()
        inner = build_workload(run.workload, run.seed, run.adapter, run.quantised_base, run.quantisation_aware)
        self._train = inner.train
        self._makes_samples, self._judges = isinstance(inner, MakesSamples), isinstance(inner, JudgesAnswers)
        samples = _Invented(inner) if isinstance(inner, MakesSamples) else inner.train
        self._samples = _RecordedStream(samples) if isinstance(samples, Endless) else _Recorded(samples)
        evaluation = None
        if inner.evaluation is not None and not self._judges:
            # as many on any number of ranks
            number = EVALUATION_BATCHES * run.evaluation_batch + run.evaluation_batch // 2 + 1
            evaluation = _First(inner.evaluation, number)
        self._workload = Stilled(inner, self._samples, evaluation)
        self._order = order_of(run, inner)
        self._steps = min(steps, total_steps_of(run, self._order))

    def traced(self, resume: bool, evaluates: bool) -> Trace:
        middle = self._steps // 2
        resume = resume and middle > 0  # else there is no state to go on from
        self._pace = Pace(self._steps + (self._steps - middle) * resume, self._say)
        engine = self._engine()
        found = Trace(
            losses=[],
            norms=[],
            gradients=[],
            batches=[],
            loaded=[],
            evaluation=self._evaluated(engine) if evaluates else None,
            engaged=self._ranks.all_gather(asdict(engine.engaged())),
            dropouts=self._workload.dropouts,
            batch_norms=self._workload.batch_norms,
            makes_samples=self._makes_samples,
            judges_answers=self._judges,
            resumed=None,
        )
        with self._aside() as root:
            progress = Progress()
            with self._checkpoints(root, engine) as checkpoints:
                self._go(engine, progress, middle, found, checkpoints.save if resume else keep_nothing)
                self._go(engine, progress, self._steps, found)
            if resume:
                through = {name: weight.clone() for name, weight in engine.weights().items()}
                engine.close()
                resumed = self._resumed(root)
                # on the first rank, which has the weights; the folder stays until all are through
                found.resumed = self._ranks.on_first(lambda: same(through, resumed))
        return found

    @contextmanager
    def _aside(self) -> Iterator[Path]:
        """Yields a folder for all ranks, which the first one makes, and deletes at the end."""
        with ExitStack() as stack:

            def made() -> Path:
                with writing("the temporary folder", then="start again"):
                    return stack.enter_context(scratch.make())

            yield self._ranks.on_first(made)

    def _engine(self) -> Engine:
        return assemble_around(self._workload, self._run, self._machine, self._ranks)

    def _checkpoints(self, root: Path, engine: Engine) -> RunCheckpoints:
        metric = best_metric(self._run, self._workload)
        return RunCheckpoints(root, self._run, engine, self._ranks, metric, self._train, _hush)

    def _resumed(self, root: Path) -> dict[str, Tensor]:
        engine = self._engine()
        progress = self._checkpoints(root, engine).restore()
        self._go(engine, progress, self._steps, None)
        return engine.weights()

    def _go(
        self,
        engine: Engine,
        progress: Progress,
        until: int,
        found: Trace | None,
        save: Callable[[Progress], None] = keep_nothing,
    ) -> None:
        """Takes steps with the run's loop. found: the trace that gets them; save: keeps the progress at the end."""
        self._samples.asked.clear()
        look = functools.partial(self._record, engine, found)
        steps = ObservedSteps(self._run, self._machine, self._workload, engine, self._order)
        numbers = steps.go(progress, until, look, self._step_done, save)
        if found is not None:
            found.losses += [loss for loss, _ in numbers]
            found.norms += [norm for _, norm in numbers]

    def _record(self, engine: Engine, found: Trace | None, window: Window) -> None:
        """Records the gradients and samples of a step whose update is not made yet."""
        asked, fillers = self._asked(), sum(not batch.counts for batch in window.micro_batches)
        if found is None:
            return
        for _ in range(fillers):
            asked.remove(int(window.indices[0]))
        found.gradients.append(self._fingerprints(engine))
        found.batches.append(window.indices.tolist())
        own = asked if engine.counts_samples else []
        found.loaded.append([index for share in self._ranks.all_gather(own) for index in share])

    def _step_done(self, _: int) -> None:
        if self._ranks.is_first:
            self._pace.step_done()

    def _fingerprints(self, engine: Engine) -> dict[str, tuple[float, float]]:
        """Returns fingerprints on the first rank, whose trace is the one that is read; all ranks gather."""
        gradients = engine.gradients()
        return {n: fingerprint(n, gradient) for n, gradient in gradients.items()} if self._ranks.is_first else {}

    def _asked(self) -> list[int]:
        asked = list(self._samples.asked)
        self._samples.asked.clear()
        return asked

    def _evaluated(self, engine: Engine) -> dict[str, float] | None:
        return None if self._workload.evaluation is None else evaluate(self._run, self._workload, engine)


def _hush(_: Event | str) -> None:
    """Silences the loop's messages while a trace runs, unless someone listens."""


def fingerprint(name: str, gradient: Tensor) -> tuple[float, float]:
    """Returns the norm, and the projection on a direction that depends on the name only."""
    flat = gradient.detach().flatten().cpu()
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    row = torch.randn(min(flat.numel(), ROW), generator=generator).double()
    square = projection = 0.0
    for piece in flat.split(ROW):  # an embedding's gradient would be as large again twice in double precision
        piece = piece.double()
        square += float(piece @ piece)
        projection += float(torch.randn(1, generator=generator)) * float(piece @ row[: piece.numel()])
    return square**0.5, projection
