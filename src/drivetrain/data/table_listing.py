"""Keeps a large table of picture names and labels as arrays in the cache, which ranks, workers and later runs map.

A table of a million names would take 300 MB of Python strings in each rank, and a second start would look for each of
its files. The list is found again by the table's content and the times of change of all folders that it names: a file
that is removed or renamed moves its folder's time.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from drivetrain.config.workload import ImageData
from drivetrain.data.array_store import Writer, replaced_when_whole, stored
from drivetrain.data.mapped_texts import MappedTexts
from drivetrain.data.source_files import SourceFile

FORMAT = 1
SETTLED = 2 * 10**9  # nanoseconds: a later change within a tick of the file system's clock would move no time
LEAST = 1 << 19  # bytes of a table, from which on its list is kept


@dataclass(frozen=True)
class TableList:
    """N images: their paths, and their names as in the table. numbers: (N,), of their labels among `label_names`."""

    files: Sequence[str]
    names: Sequence[str]
    numbers: np.ndarray
    label_names: Sequence[str]
    warning: str | None = None


def table_list(
    config: ImageData, path: str, field: str, suffixes: frozenset[str], cache: Path, labelled: bool = True
) -> TableList:
    """Reads a table of images as `listed_images` does, a large one once a machine. warning: where the cache cannot be
    used."""
    file, begun = Path(path), time.time_ns()

    def read() -> TableList:
        from drivetrain.data.image_lists import listed_images  # imports pandas, which a second start need not

        found = listed_images(config, path, field, suffixes, labelled)
        label_names, numbers = np.unique(found.labels, return_inverse=True)
        return TableList(found.files, found.names, numbers.astype(np.int32), label_names.tolist())

    if not file.is_file() or file.stat().st_size < LEAST:
        return read()
    source = SourceFile(file, field)
    given = config.image_column, config.label_column, str(config.image_folder), labelled, sorted(suffixes)
    described = repr((FORMAT, source.digest(cache), str(file.resolve()), os.getcwd(), given))
    known = cache / f"folders-{_digest(described)}.json"
    folders, held = _known_folders(known), None
    if folders is None:
        held = read()
        folders = sorted({os.path.dirname(each) for each in held.files})
    times = [(each, os.stat(each).st_mtime_ns if os.path.isdir(each) else 0) for each in folders]

    def build(folder: Path) -> None:
        found = held or read()
        source.check_unchanged()
        _write(folder, found)

    store, warning = stored(cache, f"listing-{_digest(described + repr(times))}", build)
    if warning is None and max(changed for _, changed in times) < begun - SETTLED:
        with suppress(OSError), replaced_when_whole(known) as aside:
            aside.write_text(json.dumps(folders), encoding="utf-8")
    files, names = (MappedTexts(store.array(name), store.array(f"{name}_ends")) for name in ("files", "names"))
    return TableList(files, names, store.array("numbers"), store.facts["labels"], warning)


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()


def _known_folders(known: Path) -> list[str] | None:
    """Returns the folders of the table's files, as an earlier start found them; None if there was none."""
    with suppress(OSError, ValueError, TypeError):
        return [str(each) for each in json.loads(known.read_text(encoding="utf-8"))]
    return None


def _write(folder: Path, found: TableList) -> None:
    with Writer(folder) as writer:
        for name, texts in (("files", found.files), ("names", found.names)):
            encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
            writer.append(name, np.frombuffer(b"".join(encoded), np.uint8))
            writer.append_ends(f"{name}_ends", [len(each) for each in encoded])
        writer.append("numbers", found.numbers)
        writer.finish({"labels": list(found.label_names)})
