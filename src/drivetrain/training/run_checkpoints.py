"""A run's checkpoints: the engine's state and the run's progress, to disk and back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drivetrain.checkpoint.directory import check_fits, clean_partials, newest_good, read, read_manifest
from drivetrain.checkpoint.host_copies import HostCopies
from drivetrain.checkpoint.links import best_step, link
from drivetrain.checkpoint.retention import best, prune
from drivetrain.checkpoint.run_state import verify
from drivetrain.checkpoint.saving import save
from drivetrain.config.run import RunConfig
from drivetrain.data.streams.endless import order_key, restore_state, state_of
from drivetrain.distributed.communicator import Communicator
from drivetrain.distributed.rng import restore_rng_state, rng_state, seed_rank
from drivetrain.engines.base import Engine, State
from drivetrain.errors import RunError, problem
from drivetrain.tracking.events import CheckpointSaved, Event, Warned
from drivetrain.training.progress import Progress
from drivetrain.workloads.base import BestMetric, Samples


class RunCheckpoints:
    _writer: ThreadPoolExecutor | None  # None: training waits for the disk
    _under_way: Future[None] | None

    def __init__(
        self,
        root: Path,
        run: RunConfig,
        engine: Engine,
        communicator: Communicator,
        metric: BestMetric,
        samples: Samples,
        send: Callable[[Event], None],
        saved: Callable[[int, Path], None] = lambda _, __: None,
    ) -> None:
        self._root, self._run, self._engine, self._ranks, self._metric = root, run, engine, communicator, metric
        self._send, self._saved = send, saved
        # the order of the data is a function of these; a resumed run must not change them under way
        self._order: dict[str, Any] = {"seed": run.seed, "batch_size": run.global_batch}
        self._order |= order_key(samples, by_epochs=run.loop.steps is None)
        self._samples = samples
        self._writing_ranks, self._writer, self._under_way = communicator, None, None
        self._host_copies = HostCopies()
        self._good: deque[int] = deque(maxlen=run.checkpoints.keep_last)  # steps of the newest that are known to verify
        if run.checkpoints.asynchronous:
            self._writing_ranks = Communicator("saving")
            self._writer = ThreadPoolExecutor(1, "saving")

    def save(self, progress: Progress) -> None:
        """Writes one, then deletes those that need not be kept. After a RunError the earlier ones are unchanged.

        Every rank writes what it holds. If asynchronous, from a copy and while training goes on: an error is raised by
        the next call of save or finish, which wait for it.
        """
        self.finish()
        start = time.perf_counter()
        facts, parts = self._facts(progress), self._parts(progress, self._engine.state_dict())
        parts = self._host_copies.of(parts, apart=self._writer is not None)
        if self._writer is None:
            self._write(progress.step, start, facts, parts)
        else:
            self._under_way = self._writer.submit(self._write, progress.step, start, facts, parts)

    def __enter__(self) -> RunCheckpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(RunError) if kind is not None else nullcontext():  # what came first is what to tell
            self.finish()

    def finish(self) -> None:
        """Waits for the save that is under way, if any. Raises RunError if it failed."""
        writing, self._under_way = self._under_way, None
        if writing is not None:
            writing.result()

    def _write(self, step: int, start: float, facts: dict[str, Any], parts: dict[str, State]) -> None:
        self._host_copies.wait()
        path = save(self._root, step, parts, facts, self._engine.save_assets, self._writing_ranks)
        self._good.append(step)
        size = self._writing_ranks.on_first(lambda: self._pruned(step, path, facts))
        seconds = time.perf_counter() - start
        self._send(CheckpointSaved(step=step, path=str(path), bytes=size, seconds=seconds))

    def _pruned(self, step: int, path: Path, facts: dict[str, Any]) -> int:
        """Returns the bytes of a new checkpoint, after older ones that need not be kept are deleted and links point at
        it."""
        kept = self._run.checkpoints
        higher, metric = self._metric.higher_is_better, self._metric.name
        self._saved(step, path)
        prune(self._root, kept.keep_last, kept.keep_best, higher, metric, path)
        link(path, best_step(facts))
        return sum(file.stat().st_size for file in path.iterdir())

    def _facts(self, progress: Progress) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "run": self._run.name,
            "precision": self._run.precision,
            "engine": self._run.engine.label,
        }
        if progress.last_evaluation == progress.step and self._metric.name in progress.metrics:
            facts |= {"metric": progress.metrics[self._metric.name], "metric_name": self._metric.name}
        if progress.best is not None:
            facts["best"] = progress.best  # of the run so far; its own checkpoint may be another, or not kept
        return facts

    def _parts(self, progress: Progress, state: State) -> dict[str, State]:
        generators = self._ranks.gather((self._engine.random_stream, rng_state()))
        parts = {"model": state["model"], "optimizer": state["optimizer"], "training": {}}
        if generators is not None:
            parts["training"] = {
                "progress": asdict(progress),
                "generators": [own for _, own in generators],  # of each rank
                "streams": [number for number, _ in generators],
                "engine": state["engine"],
                "order": self._order,
                "optimizer": self._run.optimizer.name,
                "length": self._length,
                "data": state_of(self._samples, progress.step),
            }
            if "beside" in state:
                parts["training"]["beside"] = state["beside"]
        if "auxiliary" in state:
            parts["auxiliary"] = state["auxiliary"]
        return parts

    def covered(self) -> int:
        """Returns the first step that a run which is resumed may have to make again: that after the oldest of
        `keep_last` checkpoints which this start wrote or began with; 0 before there are so many."""
        return min(self._good) if len(self._good) == self._good.maxlen else 0

    def restore(self) -> Progress:
        """Loads the newest checkpoint that verifies; if there is none, reports a fresh start."""
        newest, skipped = self._ranks.on_first(self._found)
        for why in skipped:
            self._send(Warned(message=f"checkpoint skipped: {why}"))
        if newest is None:
            if skipped:
                raise problem("--resume", f"no checkpoint in {self._root} verifies", "start anew with --overwrite")
            self._send(Warned(message=f"no checkpoint in {self._root} yet: starting from the beginning"))
            return Progress()
        return self.restore_from(newest)

    def restore_from(self, path: Path) -> Progress:
        """Loads a checkpoint that was verified."""
        state = read(path)
        training, before = state["training"], read_manifest(path).facts.get("precision")
        if before not in (None, self._run.precision):
            reported = (
                f"the checkpoint was made with precision={before}, and the run goes on with {self._run.precision}"
            )
            self._send(Warned(message=reported))
        self._same_order(training["order"])
        self._same_optimizer(training.get("optimizer", self._run.optimizer.name))
        self._same_length(training.get("length") or self._length)
        check_fits(self._engine.shapes(), state["model"], path)
        for message in self._engine.check_base(path):
            self._send(Warned(message=message))
        self._engine.load_state_dict({**state, "engine": training["engine"], "beside": training.get("beside")})
        progress = Progress(**training["progress"])
        self._good.append(progress.step)
        self._same_metric(progress)
        restore_state(self._samples, training.get("data"))
        saved = training["generators"]
        self._restore_generators(saved, training.get("streams", [*range(len(saved))]), progress.step)
        return progress

    def _found(self) -> tuple[Path | None, list[str]]:
        clean_partials(self._root)
        return newest_good(self._root, verify)

    def _restore_generators(self, saved: list[Any], streams: list[int], step: int) -> None:
        """Restores the generators if the ranks draw from the same streams as before; otherwise each stream starts
        anew."""
        own = self._engine.random_stream
        if self._ranks.all_gather(own) == streams:
            restore_rng_state(saved[self._ranks.rank])
            return
        seed_rank(self._run.seed + step, own)
        message = (
            f"the checkpoint is of {len(saved)} ranks and this run has {self._ranks.world}, or they are laid out in "
            "another way: dropout draws other masks than it would have drawn; all else goes on as it was"
        )
        self._send(Warned(message=message))

    def newest(self) -> Path | None:
        return newest_good(self._root, verify)[0]

    def best(self, progress: Progress) -> Path | None:
        """Returns the checkpoint of the run's best evaluation; None if that was not saved, or is deleted or damaged."""
        found = best(self._root, self._metric.higher_is_better, self._metric.name)
        wanted = (progress.best or {}).get("step")
        return found if found is not None and read_manifest(found).step == wanted else None

    def _same_metric(self, progress: Progress) -> None:
        """Keeps the best value only of the same metric; for another one the best is that of the checkpoints."""
        before, now = (progress.best or {}).get("metric", self._metric.name), self._metric.name
        if before == now:
            return
        progress.best, progress.evaluations_without_gain = self._ranks.on_first(self._best_kept), 0
        left = "none was evaluated by it" if progress.best is None else f"the best is of step {progress.best['step']}"
        reported = (
            f"the best was chosen by {before} so far, and is by {now} from here on: of the checkpoints kept, {left}"
        )
        self._send(Warned(message=reported))

    def _best_kept(self) -> dict[str, Any] | None:
        """Returns the best evaluation in the progress."""
        found = best(self._root, self._metric.higher_is_better, self._metric.name)
        manifest = None if found is None else read_manifest(found)
        if manifest is None or manifest.facts.get("metric_name") != self._metric.name:
            return None
        return {"step": manifest.step, "metric": self._metric.name, "value": manifest.facts["metric"]}

    def _same_optimizer(self, saved: str) -> None:
        if saved != self._run.optimizer.name:
            raise problem(
                "--resume",
                f"the checkpoint holds the state of {saved}, which {self._run.optimizer.name} cannot take",
                f"give optimizer.name={saved}, or start anew with --overwrite",
            )

    @property
    def _length(self) -> str:
        loop = self._run.loop
        unit, number = ("step", loop.steps) if loop.steps is not None else ("epoch", loop.epochs)
        return f"{number} {unit}{'' if number == 1 else 's'}"

    def _same_length(self, saved: str) -> None:
        name = self._run.schedule.name
        if saved != self._length and name not in ("constant", "inverse_sqrt"):  # which do not ask how long a run is
            self._send(
                Warned(
                    message=f"the checkpoint is of a run of {saved}, and this one has {self._length}: the learning "
                    f"rate leaves the old schedule here and goes on along one of {self._length} ({name})"
                )
            )

    def _same_order(self, saved: dict[str, Any]) -> None:
        changed = [
            f"{name} was {saved[name]}, now {value}"
            for name, value in self._order.items()
            if name in saved and saved[name] != value  # older checkpoints lack the mixture
        ]
        if changed:
            raise problem(
                "--resume",
                f"the order of the data changed since the checkpoint: {'; '.join(changed)}",
                "give the values of the earlier run, or start anew with --overwrite",
            )
