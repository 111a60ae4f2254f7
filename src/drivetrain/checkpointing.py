"""A run's checkpoints: the engine's state and the run's progress, to disk and back."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drivetrain.checkpoint.directory import check_fits, clean_partials, load, newest_good, save
from drivetrain.checkpoint.retention import best, prune
from drivetrain.config.run import RunConfig
from drivetrain.engines.base import Engine
from drivetrain.errors import problem
from drivetrain.loop import Progress
from drivetrain.tracking.events import CheckpointSaved, Event, Warned
from drivetrain.workloads.base import BestMetric


class RunCheckpoints:
    def __init__(
        self,
        root: Path,
        run: RunConfig,
        engine: Engine,
        metric: BestMetric,
        num_samples: int,
        send: Callable[[Event], None],
    ) -> None:
        self._root, self._run, self._engine, self._metric, self._send = root, run, engine, metric, send
        # the order of the data is a function of these; a resumed run must not change them under way
        self._order = {"seed": run.seed, "batch_size": run.global_batch(), "num_samples": num_samples}

    def save(self, progress: Progress) -> None:
        """Write one, then delete what need not be kept. RunError leaves the earlier ones as they were."""
        start = time.perf_counter()
        state = self._engine.state_dict()
        facts: dict[str, Any] = {
            "run": self._run.name,
            "precision": self._run.precision,
            "engine": self._run.engine.name,
        }
        if progress.last_evaluation == progress.step:
            facts |= {"metric": progress.metrics[self._metric.name], "metric_name": self._metric.name}
        parts = {
            "model": state["model"],
            "optimizer": state["optimizer"],
            "training": {**progress.state(), "engine": state["engine"], "order": self._order},
        }
        path = save(self._root, progress.step, parts, facts, assets=self._engine.save_assets)
        prune(
            self._root, self._run.checkpoints.keep_last, self._run.checkpoints.keep_best, self._metric.higher_is_better
        )
        size = sum(file.stat().st_size for file in path.iterdir())
        seconds = time.perf_counter() - start
        self._send(CheckpointSaved(step=progress.step, path=str(path), bytes=size, seconds=seconds))

    def restore(self) -> Progress:
        """The state of the newest checkpoint that verifies; a fresh start, said so, if there is none."""
        clean_partials(self._root)
        newest, skipped = newest_good(self._root)
        for why in skipped:
            self._send(Warned(message=f"checkpoint skipped: {why}"))
        if newest is None:
            if skipped:
                raise problem("--resume", f"no checkpoint in {self._root} verifies", "start anew with --overwrite")
            self._send(Warned(message=f"no checkpoint in {self._root} yet: starting from the beginning"))
            return Progress()
        state = load(newest)
        training = state["training"]
        self._same_order(training["order"])
        check_fits(self._engine.weights(), state["model"], newest)
        self._engine.load_state_dict({**state, "engine": training["engine"]})
        return Progress.restored(training)

    def newest(self) -> Path | None:
        return newest_good(self._root)[0]

    def best(self) -> Path | None:
        return best(self._root, self._metric.higher_is_better)

    def _same_order(self, saved: dict[str, int]) -> None:
        changed = [
            f"{name} was {saved[name]}, now {value}" for name, value in self._order.items() if saved[name] != value
        ]
        if changed:
            raise problem(
                "--resume",
                f"the order of the data changed since the checkpoint: {'; '.join(changed)}",
                "give the values of the earlier run, or start anew with --overwrite",
            )
