"""Packs what a maintainer needs to see of a machine and a run into one .tar.gz file, without secrets and without data.

From a run: run.yaml, environment.json, report.json, the end of the events, logs and reports of hangs, and the list of
its files. Checkpoints, samples and links are never packed.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from drivetrain.doctor.secrets import masked, masked_settings, shown_variables
from drivetrain.errors import problem
from drivetrain.runtime.atomic_file import replacing, writing
from drivetrain.runtime.run_folder import RunFolder

TAIL_BYTES = 2**20  # of a file's end
MOST_LISTED = 2000  # files of a run that are listed
ROOT = "drivetrain-bundle"
SETTINGS = ("run.yaml", "environment.json", "report.json")
COMMANDS = {"nvidia-smi.txt": ["nvidia-smi"], "nvidia-topology.txt": ["nvidia-smi", "topo", "-m"]}


def pack(findings: dict[str, Any], run: Path | None, to: Path) -> dict[str, int]:
    """Writes the bundle. Returns the name and bytes of each file in it.

    findings: the doctor's. run: the folder of a run, or None. Raises UserError for a folder of no run, or if `to`
    exists already, and RunError if it cannot be written.
    """
    if os.path.lexists(to):
        raise problem("--output", f"{to} is there already", "give another name, or take it away")
    files = dict(_of_the_machine(findings))
    if run is not None:
        files |= _of_the_run(run)
    with writing(to, "pack it again"), replacing(to) as aside, tarfile.open(aside, "w:gz") as archive:
        for name, text in files.items():
            content = text.encode("utf-8", errors="replace")
            entry = tarfile.TarInfo(f"{ROOT}/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return {name: len(text.encode("utf-8", errors="replace")) for name, text in files.items()}


def _of_the_machine(findings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "doctor.json", masked(json.dumps(findings, indent=2, default=str))
    yield "packages.txt", "".join(f"{line}\n" for line in sorted(set(_packages())))
    yield "environment.txt", shown_variables(os.environ)
    for name, command in COMMANDS.items():
        if shutil.which(command[0]):
            yield name, masked(_printed(command))


def _packages() -> Iterator[str]:
    """Lists packages like `pip freeze`, which is not installed everywhere."""
    for found in distributions():
        if found.metadata["Name"]:
            yield f"{found.metadata['Name']}=={found.version}"


def _printed(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error}\n"
    return done.stdout + done.stderr


def _of_the_run(run: Path) -> Iterator[tuple[str, str]]:
    folder = RunFolder(run)
    if not folder.run_file.is_file():
        why = f"{run} is no run's folder: it holds no run.yaml"
        raise problem("FOLDER", why, "give the folder that a run named as its output")
    for name in SETTINGS:
        if _is_plain(run / name):
            yield f"run/{name}", masked_settings(_tail(run / name))
    for path in (run / "events.jsonl", *sorted(run.glob("*.log")), *_inside(folder.hangs)):
        if _is_plain(path):
            yield f"run/{path.relative_to(run).as_posix()}", masked(_tail(path))
    yield "run/files.txt", "".join(_listed(run))


def _inside(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _tail(path: Path) -> str:
    """Returns the file's end, from the beginning of a line."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        content = file.read()
    if size > TAIL_BYTES:
        content = content.partition(b"\n")[2]
    return content.decode("utf-8", errors="replace")


def _listed(run: Path) -> Iterator[str]:
    for number, path in enumerate(sorted(run.rglob("*"))):
        if number == MOST_LISTED:
            yield "...\n"
            return
        if _is_plain(path):
            yield f"{path.stat().st_size:>15,} {path.relative_to(run).as_posix()}\n"
