"""Writes a checkpoint: aside, by all ranks at once, read back and compared, and only then renamed into place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from drivetrain.checkpoint.directory import (
    BLOCK,
    MANIFEST,
    FileRecord,
    Manifest,
    block_sum,
    hidden,
    newest_good,
    read_part,
)
from drivetrain.checkpoint.manifest import ManifestPart, Outline, Plan, plan_of
from drivetrain.checkpoint.state import Formless, State
from drivetrain.checkpoint.tensor_file import create, differing, fill
from drivetrain.distributed.communicator import Communicator
from drivetrain.errors import RunError
from drivetrain.runtime import storage
from drivetrain.runtime.atomic_file import sync
from drivetrain.runtime.heartbeat import WORKING

T = TypeVar("T")
U = TypeVar("U")
Assets = Callable[[Path, Mapping[str, Tensor]], None]


def save(
    root: Path,
    step: int,
    parts: Mapping[str, State],
    facts: Mapping[str, Any],
    assets: Assets | None = None,
    communicator: Communicator | None = None,
) -> Path:
    """Writes a checkpoint of `parts` ("model": {name: tensor}, others any state) and returns its folder.

    Every rank passes what it holds, tensors or pieces of them; no rank ever has more. assets: writes further files into
    the folder, from the weights read back; the first rank's is called. Raises RunError on all ranks, and leaves the
    earlier checkpoints as they were, if the disk is full, the folder cannot be written, or a part holds a value that
    has no form in a checkpoint.
    """
    communicator, target = communicator or Communicator(), root / f"step-{step:08d}"
    aside = communicator.on_first(lambda: hidden(target, "partial"))  # by the first rank's name
    saving = _Saving(root, communicator, aside)
    try:
        saving.begin(parts)
        saving.write()
        saving.first(lambda: saving.add(assets))
        checksums = saving.checksums()
        saving.first(lambda: saving.seal(target, step, facts, checksums))
    except (OSError, SafetensorError, Formless) as error:
        failure = error
        raise communicator.on_first(lambda: _save_failed(root, step, saving.needed, failure)) from error
    finally:
        if communicator.is_first:
            storage.discard(saving.aside)  # there only if the save failed or was interrupted
    return target


class _Saving:
    """One save, in steps that all ranks take together."""

    def __init__(self, root: Path, communicator: Communicator, aside: Path) -> None:
        self._root, self._ranks = root, communicator
        self.aside, self.needed = aside, 0

    def first(self, do: Callable[[], None]) -> None:
        self._ranks.on_each(lambda: do() if self._ranks.is_first else None)

    def begin(self, parts: Mapping[str, State]) -> None:
        """Makes the folder, and in it every file at its full size."""
        of_ranks = self._ranks.on_each(lambda: self._outlined(parts))
        names = list(dict.fromkeys(name for outlines in of_ranks for name in outlines))
        empty = Outline({}, {})
        self._plans = {name: plan_of([outlines.get(name, empty) for outlines in of_ranks]) for name in names}
        self.needed = sum(plan.layout.size for plan in self._plans.values())
        self.first(self._prepare)

    def _outlined(self, parts: Mapping[str, State]) -> dict[str, Outline]:
        self._parts = {name: ManifestPart.of(state) for name, state in parts.items()}
        return {name: part.outline() for name, part in self._parts.items()}

    def _prepare(self) -> None:
        storage.make(self._root)
        if self.needed > storage.free_bytes(self._root):
            raise OSError("no space left")
        storage.begin(self.aside)
        for name, plan in self._plans.items():
            create(self._file(name), plan.layout)
            storage.put(self.aside / f"{name}.json", json.dumps(plan.tree))

    def _file(self, name: str) -> Path:
        return self.aside / f"{name}.safetensors"

    def write(self) -> None:
        """Writes this rank's share, and proves that it can be read."""
        self._ranks.on_each(self._fill)
        self._ranks.on_each(self._prove)

    def _fill(self) -> None:
        for name, plan, own in self._own():
            fill(self._file(name), plan.layout, own)

    def _own(self) -> Iterator[tuple[str, Plan, dict[str, Any]]]:
        for name, plan in self._plans.items():
            writes = plan.writes[self._ranks.rank]
            if writes:
                yield name, plan, {key: self._parts[name].tensors[key] for key in writes}

    def _prove(self) -> None:
        pieces = [(name, plan, key, tensor) for name, plan, own in self._own() for key, tensor in own.items()]
        found = _at_once(lambda each: differing(self._file(each[0]), each[1].layout, {each[2]: each[3]}), pieces)
        wrong = [f"{key} of {each[0]}" for each, keys in zip(pieces, found, strict=True) for key in keys]
        if self._ranks.is_first:
            trees = {name: (self.aside / f"{name}.json").read_text(encoding="utf-8") for name in self._plans}
            wrong += [f"{name}.json" for name, text in trees.items() if text != json.dumps(self._plans[name].tree)]
        if wrong:
            raise OSError(f"{', '.join(wrong[:5])} read back different")

    def add(self, assets: Assets | None) -> None:
        if assets is not None:
            assets(self.aside, read_part(self.aside, "model"))

    def checksums(self) -> dict[str, FileRecord]:
        """Computes each file's checksums, block by block, which the ranks share out. All ranks sync them."""
        files = self._ranks.on_each(lambda: _sizes(self.aside) if self._ranks.is_first else {})[0]
        blocks = [(name, start) for name, size in files.items() for start in range(0, max(size, 1), BLOCK)]
        rank, world = self._ranks.rank, self._ranks.world
        found = self._ranks.on_each(lambda: _at_once(lambda b: block_sum(self.aside / b[0], b[1]), blocks[rank::world]))
        records = {name: FileRecord(bytes=size, sha256=[]) for name, size in files.items()}
        for number, (name, _) in enumerate(blocks):
            records[name].sha256.append(found[number % world][number // world])
        return records

    def seal(self, target: Path, step: int, facts: Mapping[str, Any], files: dict[str, FileRecord]) -> None:
        """Writes the manifest, last of all; then renames the folder."""
        for path in sorted(self.aside.rglob("*")):
            sync(path)
        manifest = Manifest(step=step, facts=dict(facts), parts=list(self._plans), files=files)
        text = manifest.model_dump_json(indent=1)
        storage.put(self.aside / MANIFEST, text)
        sync(self.aside / MANIFEST)
        sync(self.aside)
        if (self.aside / MANIFEST).read_text(encoding="utf-8") != text:
            raise OSError(f"{MANIFEST} reads back different")
        storage.publish(self.aside, target, hidden(target, "replaced"))  # a resumed run saves a step again


def _at_once(do: Callable[[T], U], items: Sequence[T]) -> list[U]:
    """Runs on as many threads as this rank computes with: reading, comparing and summing release the interpreter's
    lock."""
    with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix=WORKING) as threads:
        return list(threads.map(do, items))


def _sizes(folder: Path) -> dict[str, int]:
    """Returns the sizes of all files, by their names within the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _save_failed(root: Path, step: int, needed: int, error: Exception) -> RunError:
    reason = getattr(error, "strerror", None) or str(error)
    cure = "take it out of the state"
    if not isinstance(error, Formless):
        reason += f" ({needed / 2**20:,.1f} MiB needed, {_free(root)} free)"
        cure = "make room or make the folder writable"
    try:
        newest, _ = newest_good(root)
    except OSError:  # the folder may not even be listed
        newest = None
    kept = f"The last good checkpoint is {newest}" if newest else "No earlier checkpoint can be read there"
    return RunError(
        f"the checkpoint of step {step} could not be saved in {root}: {reason}. {kept}; {cure}, then go on with "
        f"{'--resume' if newest else '--overwrite'}"
    )


def _free(root: Path) -> str:
    for path in (root, *root.absolute().parents):
        try:
            return f"{storage.free_bytes(path) / 2**20:,.1f} MiB"
        except OSError:  # not there yet, or not ours to look at
            continue
    return "unknown"
