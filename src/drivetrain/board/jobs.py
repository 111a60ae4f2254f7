"""Verbs about a run that exists: evaluate, predict, export. Their entries stand in the same queue as trainings."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from drivetrain.board import run_file
from drivetrain.board.access import User
from drivetrain.board.board import Board, same
from drivetrain.board.entries import OUTPUT, id_of
from drivetrain.board.files import allowed
from drivetrain.board.queue import digest_of, unknown_devices
from drivetrain.board.records import READS_TEXTS, TEXTS, Asked, Entry, now
from drivetrain.board.runs import NAME
from drivetrain.config.load import validate
from drivetrain.errors import UserError
from drivetrain.export.formats import FORMATS
from drivetrain.inference.prediction_file import PredictionFile
from drivetrain.runtime.run_folder import RunFolder
from drivetrain.runtime.strict_json import plain
from drivetrain.web.refusals import Refusal

PREDICTIONS, TABLE, EXPORTS = "predictions.jsonl", "predictions.csv", "exports"
SHOWN_ROWS = 200


def evaluate(
    board: Board, user: User, run: str, key: str, checkpoint: str, data: str | None, devices: list[str] | None
) -> tuple[Entry, bool]:
    """Queues an evaluation. data: a file or folder in place of the run's evaluation data."""
    own = [] if data is None else [f"workload.data.evaluation={run_file.flow(str(allowed(board.data_places, data)))}"]
    words = [*own, f"--checkpoint={checkpoint_of(board, run, checkpoint)}"]
    return queued(board, user, run, key, "evaluate", words, devices)


def predict(
    board: Board,
    user: User,
    run: str,
    key: str,
    checkpoint: str,
    source: str | Sequence[str] | None,
    devices: list[str] | None,
) -> tuple[Entry, bool]:
    """Queues predictions. source: a path, texts that were typed, or None for the run's evaluation data."""
    is_typed = source is not None and not isinstance(source, str)
    given = [] if source is None else [READS_TEXTS] if is_typed else [f"--data={source}"]
    words = [f"--checkpoint={checkpoint_of(board, run, checkpoint)}", *given]
    output = board.queue.entries.folder / id_of(user.name, key) / PREDICTIONS
    # typed texts in a file: the system takes 128 KiB a word, and a few MiB of all words together
    files = {TEXTS: "".join(f"{text}\n" for text in source or ())} if is_typed else {}
    return queued(board, user, run, key, "predict", [*words, f"--output={output}"], devices, files)


def export(
    board: Board,
    user: User,
    run: str,
    key: str,
    checkpoint: str,
    format_: str,
    options: dict[str, str | None],
    devices: list[str] | None,
) -> tuple[Entry, bool]:
    """Queues an export, into a new folder within the run's."""
    words = [f"--checkpoint={checkpoint_of(board, run, checkpoint)}", f"--to={format_}", "--json"]
    words += [f"--{name}={value}" for name, value in options.items() if value is not None]
    output = board.runs.folder(run) / EXPORTS / f"{format_}-{id_of(user.name, key)[:8]}"
    return queued(board, user, run, key, "export", [*words, f"--output={output}"], devices)


def queued(
    board: Board,
    user: User,
    run: str,
    key: str,
    verb: str,
    words: list[str],
    devices: list[str] | None,
    files: Mapping[str, str] | None = None,
) -> tuple[Entry, bool]:
    """Queues a verb about a run. files: of the entry, by name."""
    files = dict(files or {})
    digest = digest_of(verb=verb, run=run, words=words, devices=devices, files=files)
    name = id_of(user.name, key)
    unknown_devices(devices)
    with board.queue.with_lock():
        earlier = board.queue.entries.one(name)
        if earlier is not None:
            return same(earlier, digest), False
        config, problems = validate(run_file.values_of(RunFolder(board.runs.folder(run)).run_file.read_text()), [])
        if config is None or problems:
            raise UserError(problems)
        on_gpu = board.machine.machine().device == "cuda" and config.device != "cpu"
        asked = Asked(
            id=name,
            digest=digest,
            verb=verb,
            run=run,
            words=[verb, str(board.runs.folder(run)), *words],
            owner=user.name,
            created=now(),
            device="cuda" if on_gpu else "cpu",
            count=config.devices if on_gpu and verb != "export" else 1,
            wanted=devices,
        )
        return board.queue.add(asked, files)


def checkpoint_of(board: Board, run: str, asked: str) -> str:
    """Returns best, last, or the folder of a checkpoint of the run. Raises Refusal for another."""
    summary = board.runs.one(run)
    if "predict" not in summary["can"]:
        raise Refusal(409, f"the run is {summary['status']}, or has no checkpoint", "no_checkpoint")
    if asked in ("best", "last"):
        return asked
    folder = board.runs.folder(run) / "checkpoints" / asked
    if NAME.fullmatch(asked) is None or not folder.is_dir():
        raise Refusal(404, "the run has no such checkpoint", "no_checkpoint", "checkpoint")
    return str(folder)


def formats() -> list[dict[str, Any]]:
    """Returns the formats of exports, as the form for them needs them."""
    return [
        {
            "name": name,
            "says": f"loaded by {each.loaded_by}",
            "dtypes": list(each.dtypes),
            "quantised": list(each.quantised),
            "needs_adapter": each.needs_adapter,
            "refuses": dict(each.refuses),
        }
        for name, each in FORMATS.items()
    ]


def result(board: Board, entry: Entry) -> dict[str, Any] | None:
    """Returns what an entry that has completed left: metrics, the first predictions, the verdict of an export."""
    if entry.state != "completed":
        return None
    folder = board.queue.entries.folder / entry.id
    if entry.asked.verb == "predict":
        return _predictions(folder, entry.id)
    if entry.asked.verb in ("evaluate", "export"):
        printed = folder / OUTPUT
        with contextlib.suppress(OSError, ValueError):
            found = plain(json.loads(printed.read_text(encoding="utf-8")))
            return found if entry.asked.verb == "evaluate" else _exported(found, entry)
    return None


def _exported(report: dict[str, Any], entry: Entry) -> dict[str, Any]:
    place = next(word for word in entry.asked.words if word.startswith("--output=")).removeprefix("--output=")
    folder = Path(place)
    files = [each.relative_to(folder).as_posix() for each in sorted(folder.rglob("*")) if each.is_file()]
    verdict = "accepted over its bound" if report.get("accepted_over_bound") else "verified"
    inner = f"{EXPORTS}/{folder.name}"
    return {"verdict": verdict, "report": report, "folder": str(folder), "inner": inner, "files": files}


def _predictions(folder: Path, name: str) -> dict[str, Any] | None:
    file = folder / PREDICTIONS
    rows: list[dict[str, Any]] = []
    try:
        with file.open(encoding="utf-8") as opened:
            for line in islice(opened, SHOWN_ROWS):
                rows.append(plain(json.loads(line)))
            total = len(rows) + sum(1 for _ in opened)
    except (OSError, ValueError):
        return None
    columns = list(dict.fromkeys(key for row in rows for key in row))
    own = f"api/queue/{name}/predictions"
    return {"columns": columns, "rows": rows, "total": total, "download": f"{own}.jsonl", "csv": f"{own}.csv"}


def table_of(folder: Path) -> Path:
    """Returns the predictions of an entry as CSV, made when they are asked for first."""
    table, rows = folder / TABLE, folder / PREDICTIONS
    if not rows.is_file():
        raise Refusal(404, "the entry has no predictions", "no_predictions")
    if not table.exists():
        with rows.open(encoding="utf-8") as opened:
            aside = folder / f"{os.getpid()}-{threading.get_ident()}-{TABLE}"
            written = PredictionFile(aside)
            written.begin({})
            written.write(json.loads(line) for line in opened)
        aside.replace(table)
    return table
