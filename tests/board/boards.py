"""A board on a thread of the test's process, over folders that the test makes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drivetrain.board.access import Access, User, digest
from drivetrain.board.app import Guards, application
from drivetrain.board.audit import Audit
from drivetrain.board.board import OWN, Board
from drivetrain.board.detect import ThisMachine
from drivetrain.config.machine import Machine
from tests.running_server import Running, running

TOKEN = "a-token-of-the-tests-0123456789"
TOKENS = {name: f"the-token-of-{name}-0123456789" for name in ("vera", "otto", "olga", "anna")}
USERS = {
    TOKENS["vera"]: User("vera", "viewer"),
    TOKENS["otto"]: User("otto", "operator"),
    TOKENS["olga"]: User("olga", "operator"),
    TOKENS["anna"]: User("anna", "administrator"),
}
DIGITS = """\
# the demo
workload:
  type: image_classification
  model:
    norm: group
    config: {model_type: resnet, layer_type: basic, embedding_size: 4, hidden_sizes: [4], depths: [1]}
  data: {source: digits, evaluation_fraction: 0.2}  # bundled
batch_size: 64
loop: {steps: 3}
optimizer: {name: sgd, lr: 0.1}
"""


class FixedMachine(ThisMachine):
    """A machine that needs no look: one CPU."""

    def __init__(self, device: str = "cpu", count: int = 1) -> None:
        name, capability = ("a CPU", None) if device == "cpu" else ("a GPU", (9, 0))
        natives = frozenset({"float32", "float16", "bfloat16"})
        self._fixed = Machine(device, name, count, 1 << 34, 2, capability, natives)

    def machine(self) -> Machine:
        return self._fixed


def made(
    root: Path, data: Sequence[Path] = (), machine: ThisMachine | None = None, operators_code: bool = False
) -> Board:
    """Returns a board that starts nothing until its queue is let go on."""
    root.mkdir(exist_ok=True)
    (root / OWN).mkdir(exist_ok=True)
    board = Board.at(root, data, machine or FixedMachine(), operators_code)
    board.queue.change(paused=True)
    return board


@contextmanager
def serving(
    root: Path,
    users: Mapping[str, User] | None = None,
    data: Sequence[Path] = (),
    machine: ThisMachine | None = None,
    operators_code: bool = False,
    **guards: Any,
) -> Iterator[tuple[Running, Board]]:
    """Serves a board. users: by token; left out, an administrator with TOKEN."""
    board = made(root, data, machine, operators_code)
    named = {TOKEN: User("admin", "administrator")} if users is None else users
    access = Access({digest(token): user for token, user in named.items()}, b"signs" * 8, "drivetrain-board-test")
    board.start()
    try:
        with running(application(board, access, Audit(root / OWN / "audit.jsonl"), Guards(**guards))) as found:
            found.seconds = 240  # for verbs that import PyTorch
            yield found, board
    finally:
        board.close()


def ask(server: Running, path: str, body: Any = None, method: str | None = None, **headers: str) -> tuple[int, Any]:
    """Returns status and content of an answer to the administrator."""
    status, _, found = server.ask(path, body, method, **{"authorization": f"Bearer {TOKEN}", **headers})
    return status, found


def by(server: Running, name: str, path: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
    """Returns status and content of an answer to one of USERS."""
    status, _, found = server.ask(path, body, method, authorization=f"Bearer {TOKENS[name]}")
    return status, found


def write_run(folder: Path, steps: int = 30, finished: str | None = "completed", **settings: Any) -> Path:
    """Writes the folder of a run as a training leaves it."""
    folder.mkdir(parents=True)
    run = {"name": folder.name, "engine": "single", "precision": "fp32", "workload": {"type": "module"}, **settings}
    (folder / "run.yaml").write_text(json.dumps(run))
    (folder / "events.jsonl").write_text("")
    append(folder, "run_started", name=folder.name, output=str(folder), total_steps=100, first_step=0,
           samples_per_epoch=10)  # fmt: skip
    for step in range(1, steps + 1):
        point(folder, step)
    if finished is not None:
        append(folder, "run_finished", status=finished, step=steps, message="")
    return folder


def point(folder: Path, step: int, loss: float | None = None, **device: Any) -> None:
    value: Any = {"loss": 1 / step if loss is None else loss}
    numbers = {"epoch": step / 10, "grad_norm": 1.0, "lr": 0.1, "scale": None, "skipped_steps": 0}
    append(folder, "step", step=step, samples=step * 8, samples_per_second=100.0, elapsed_seconds=step / 2, **value,
           **numbers, **device)  # fmt: skip


def append(folder: Path, kind: str, **fields: Any) -> None:
    line = {"time": "2026-11-25T12:00:00.000+00:00", "event": kind, **fields}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
