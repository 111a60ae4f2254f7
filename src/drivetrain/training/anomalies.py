"""Handles anomalies: reports them, keeps them in the run's folder, and inspects one that ends the run.

Below the run's folder:

    trouble/step-00000123/
        trouble.json        step, numbers, what is usual, the samples of each rank's micro-batches
        step-00000122/      only of a step that ended the run: a checkpoint as the step found it
    trouble/former-step-00000123/   noted before the run went on from an earlier step
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from drivetrain.config.run import RunConfig
from drivetrain.data.order import Order
from drivetrain.distributed.communicator import Communicator
from drivetrain.distributed.rng import only_torch_drew, restore_rng_state, rng_state
from drivetrain.engines.base import Engine
from drivetrain.errors import RunError, UserError
from drivetrain.runtime import storage
from drivetrain.runtime.strict_json import dumps, restored
from drivetrain.tracking.events import Event, Troubled
from drivetrain.training.batching import Batching
from drivetrain.training.inspect_step import first_of, inspected
from drivetrain.training.run_checkpoints import RunCheckpoints
from drivetrain.training.step_guard import Anomaly, ended
from drivetrain.training.windows import windows_of
from drivetrain.training.workload_rules import best_metric
from drivetrain.workloads.base import Workload

FILE = "trouble.json"
MOST_KEPT = 100  # steps in a run's folder; further ones are only reported


class Anomalies:
    """Called with each anomaly, by all ranks; raises an error if it ends the run."""

    def __init__(
        self,
        root: Path,
        run: RunConfig,
        engine: Engine,
        workload: Workload,
        communicator: Communicator,
        order: Order,
        cutting: Batching,
        send: Callable[[Event], None],
    ) -> None:
        self._root, self._run, self._engine, self._workload = root, run, engine, workload
        self._ranks, self._order, self._cutting, self._send = communicator, order, cutting, send
        self._generators = rng_state()

    def __call__(self, trouble: Anomaly) -> None:
        folder = folder_of(self._root, trouble.step)
        own = trouble.batch.pieces if self._engine.counts_samples else None
        pieces = [each for each in self._ranks.all_gather(own) if each is not None]
        kept = self._ranks.is_first and self._note(trouble, folder, pieces)
        numbers = trouble.numbers
        self._send(
            Troubled(
                step=trouble.step,
                trouble=trouble.kind,
                action=trouble.action,
                message=str(trouble),
                loss=numbers.loss,
                grad_norm=numbers.norm,
                usual_loss=numbers.usual_loss,
                usual_grad_norm=numbers.usual_norm,
                samples=trouble.batch.indices.tolist(),
                kept=str(folder) if kept else None,
            )
        )
        if trouble.action == "stopped":
            state, found = self._state(trouble, folder), self._looked_into(trouble)
            see = f"See it layer by layer: drivetrain replay {self._run.folder} --step {trouble.step}. "
            raise ended(trouble, f"{found}{state}{see}")

    def _note(self, trouble: Anomaly, folder: Path, pieces: list[list[list[int]]]) -> bool:
        """Writes the note; returns whether there was room. A full disk is reported by the checkpoint that needs it.

        pieces: the samples of each rank's micro-batches.
        """
        if not folder.exists() and self._root.is_dir() and sum(1 for _ in self._root.iterdir()) >= MOST_KEPT:
            return False
        numbers, (epoch, _) = trouble.numbers, self._order.batch(trouble.step - 1)
        facts = {
            "step": trouble.step,
            "epoch": epoch,
            "trouble": trouble.kind,
            "action": trouble.action,
            "message": str(trouble),
            "loss": numbers.loss,
            "grad_norm": numbers.norm,
            "usual_loss": numbers.usual_loss,
            "usual_grad_norm": numbers.usual_norm,
            "update_made": trouble.update_made,
            "samples": trouble.batch.indices.tolist(),
            "made_at": trouble.batch.made_at,
            "reduction": trouble.before.reduction,
            "micro_batches": pieces,
        }
        with suppress(OSError):
            storage.make(folder)
            storage.put(folder / FILE, dumps(facts, indent=2) + "\n")
            return True
        return False

    def _state(self, trouble: Anomaly, folder: Path) -> str:
        """Keeps the state before the step, which the engine still has: the update was not made.

        Not if the loss is scaled, since the scale has moved on, nor if Python's or NumPy's generator has: their earlier
        states are unknown. The state at the beginning need not be kept.
        """
        wanted = self._run.numerics.keep_state and trouble.before.step > 0
        if not wanted or trouble.update_made or self._run.precision_spec.scaled:
            return ""
        if not all(self._ranks.all_gather(only_torch_drew(self._generators, rng_state()))):
            return ""
        restore_rng_state(rng_state(trouble.mark))
        once = self._run.checkpoints.model_copy(update={"asynchronous": False})
        run = self._run.model_copy(update={"checkpoints": once})
        metric, number = best_metric(run, self._workload), self._workload.train
        try:
            RunCheckpoints(folder, run, self._engine, self._ranks, metric, number, _hush).save(trouble.before)
        except (RunError, UserError) as error:
            return f"(The state before it could not be kept: {error}.) "
        return f"The state before it is kept in {folder}. "

    def _looked_into(self, trouble: Anomaly) -> str:
        """Finds the first module whose numbers are not finite: runs the window again, on all ranks, with hooks."""
        if trouble.kind != "not_finite" or trouble.update_made or self._engine.compiled:
            return ""
        restore_rng_state(rng_state(trouble.mark))
        steps = range(trouble.step - 1, trouble.step)
        run, mine = self._run, self._cutting.slice
        try:
            [window] = windows_of(run, self._workload, self._engine, self._order, steps, mine, workers=False)
            found, _ = inspected(self._engine, self._workload, window.micro_batches)
        except Exception:  # the run ends with the trouble that it met first, whatever a second look meets
            return ""
        culprit = first_of(self._ranks.all_gather(found.culprit))
        return "" if culprit is None else f"{str(culprit)[0].upper()}{str(culprit)[1:]}. "


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def set_aside(root: Path, step: int) -> list[str]:
    """Sets aside the notes of later steps, which belong to a curve that is trained again; returns their folders' new
    names."""
    numbers = {path: path.name.removeprefix("step-") for path in root.glob("step-*")}
    later = [path for path, number in numbers.items() if number.isdecimal() and int(number) > step]
    return [_renamed(path, root / f"former-{path.name}") for path in sorted(later)]


def _renamed(path: Path, to: Path) -> str:
    if to.exists():
        storage.remove(to)
    storage.move(path, to)
    return to.name


def read_trouble(root: Path, step: int) -> dict[str, Any] | None:
    """Returns the notes of a step, if any."""
    file = folder_of(root, step) / FILE
    try:
        return restored(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _hush(_: Event) -> None:
    """Silences the saving of an anomaly's state, which the anomaly's own message reports."""
