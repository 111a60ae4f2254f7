"""The request that an unfinished file of predictions answers: what decides its rows, and what another one changes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.config.files import path_exists
from drivetrain.config.location import without_secrets
from drivetrain.config.run import RunConfig
from drivetrain.config.texts import texts as texts_in
from drivetrain.errors import clipped, counted

MOST_NAMED = 4  # changes that a message lists


def request_of(run: RunConfig, checkpoint: Path, data: str | None, texts: Sequence[str]) -> dict[str, Any]:
    """Returns all that decides the rows of a prediction, as JSON has it, to recognise the same request again."""
    read = [] if texts else _evaluation_data(run) if data is None else [Path(data)]
    files = [checkpoint, *sorted(checkpoint.glob("*.json")), *(each for each in read if each.exists())]
    request = {
        "run": run.model_dump(mode="json"),
        "checkpoint": str(checkpoint),
        "files": {str(file): [file.stat().st_mtime_ns, file.stat().st_size] for file in files if file.exists()},
        "folders": {str(each): _digest_of_names(each) for each in read if each.is_dir()},
        "data": data,
        "texts": list(texts),
    }
    return dict(json.loads(json.dumps(request)))


def changes(earlier: Any, now: Mapping[str, Any]) -> str:
    """Describes what differs between two requests: "checkpoint was a/step-1, now a/step-2; ...". earlier: what a file
    held, in whatever form."""
    if not isinstance(earlier, dict) or earlier.keys() != now.keys() or not isinstance(earlier["run"], dict):
        return "what they answer is not known"
    found = [_changed(name, earlier[name], now[name]) for name in ("checkpoint", "data") if earlier[name] != now[name]]
    if earlier["texts"] != now["texts"]:
        found.append(f"{_of_texts(earlier['texts'])} given then, {_of_texts(now['texts'])} now")
    before, after = dict(_settings(earlier["run"])), dict(_settings(now["run"]))
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    found += [_changed(name, before.get(name), after.get(name)) for name in names]
    for kind in ("files", "folders"):
        both = [name for name in earlier[kind] if name in now[kind]]
        found += [f"{name} was written anew since" for name in both if earlier[kind][name] != now[kind][name]]
    more = len(found) - MOST_NAMED
    found[MOST_NAMED:] = [f"and {more} more"] if more > 0 else []
    return "; ".join(found) or "other files are read now"


def _changed(name: str, before: Any, now: Any) -> str:
    texts = (clipped(without_secrets(json.dumps(value, ensure_ascii=False)), 100) for value in (before, now))
    return "{} was {}, now {}".format(name, *texts)


def _of_texts(texts: Sequence[str]) -> str:
    return counted(len(texts), "text") if texts else "no texts"


def _settings(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _evaluation_data(run: RunConfig) -> list[Path]:
    """Returns the files and folders of the run's own evaluation data; of all its data where the evaluation data are a
    part of the others, or the workload is the user's."""
    workload = run.workload.model_dump(mode="json")
    data = workload.get("data") or workload
    named = (data.get("evaluation") if isinstance(data, dict) else None) or data
    return [path for text in dict.fromkeys(texts_in(named)) if text and path_exists(path := Path(text).expanduser())]


def _digest_of_names(folder: Path) -> str:
    """Returns a digest of the names, times and sizes of all files in a folder."""
    found = hashlib.sha256()
    for place, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            with contextlib.suppress(OSError):  # a link to nothing
                known = os.stat(os.path.join(place, name))
                found.update(
                    f"{os.path.join(place, name)}\0{known.st_mtime_ns}\0{known.st_size}\0".encode(
                        errors="surrogateescape"
                    )
                )
    return found.hexdigest()
