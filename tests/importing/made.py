"""What the tests of importing share: the files, a run file to import onto, and an import of a text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from drivetrain.config.translation import Note
from drivetrain.importing.verb import Imported, import_files

FOLDER = Path(__file__).parent / "files"
FILES = sorted(path for path in FOLDER.rglob("*") if path.suffix in {".yaml", ".json", ".py"})
SMALL = """
workload:
  type: image_classification
  model:
    norm: group
    config: {model_type: resnet, layer_type: basic, embedding_size: 8, hidden_sizes: [8, 8], depths: [2, 2]}
  data: {source: digits, image_size: 16, limit_train: 128, limit_evaluation: 40}
batch_size: 16
loop: {steps: 2}
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
"""


def file_name(path: Path) -> str:
    return path.relative_to(FOLDER).as_posix()


def small(folder: Path) -> Path:
    path = folder / "small.yaml"
    path.write_text(SMALL)
    return path


def read(path: Path) -> dict[str, Any]:
    return YAML(typ="safe", pure=True).load(path.read_text())


def imported(folder: Path, *files: Path, onto: Path | None = None) -> tuple[Imported, dict[str, Any]]:
    """The import and the run file it wrote."""
    output = folder / "new.yaml"
    return import_files(files, onto, output, overwrite=True), read(output)


numbers = itertools.count()


def of_text(folder: Path, text: str, ending: str = ".yaml") -> Path:
    path = folder / f"given-{next(numbers)}{ending}"
    path.write_text(text)
    return path


def run_of(folder: Path, *texts: str, ending: str = ".yaml", onto: Path | None = None) -> dict[str, Any]:
    """The run file that comes of files with these texts."""
    return imported(folder, *(of_text(folder, text, ending) for text in texts), onto=onto)[1]


def notes_of(folder: Path, text: str, ending: str = ".yaml") -> dict[str, Note]:
    """Key → its note."""
    return {note.key: note for _, note in imported(folder, of_text(folder, text, ending))[0].notes}


def keys_of(value: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Every key of a file that holds a value of its own, dotted."""
    if isinstance(value, dict) and value:
        for name in value:
            yield from keys_of(value[name], (*path, str(name)))
    elif isinstance(value, list) and any(type(part) is dict for part in value):
        for position in range(len(value)):
            yield from keys_of(value[position], (*path, str(position)))
    else:
        yield ".".join(path)
