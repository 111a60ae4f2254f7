"""Verifies that data files hold what runs of this machine recorded: all bytes are read, and compared with the kept
digest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from drivetrain.config.workload_block import WorkloadBlock
from drivetrain.data.array_store import default_root
from drivetrain.data.data_files import data_files, is_there
from drivetrain.data.language.registry import find, read_registry
from drivetrain.data.row_blocks import ENDINGS
from drivetrain.data.source_files import SourceFile
from drivetrain.data.table_blocks import IN_BLOCKS

READ = {"rows": ENDINGS, "tables": IN_BLOCKS}  # the endings of files, by how the workload reads them


@dataclass(frozen=True)
class Verified:
    """The result. same: as the next start expects; changed: other bytes, which the next start now reads anew; not
    known: no digest of the present file is kept, so that the next start reads it anyway."""

    path: str
    state: Literal["same", "changed", "not known"]


def verified(workload: WorkloadBlock) -> Iterator[Verified]:
    """Reads all files of a workload's data. Raises UserError for files that cannot be found or change meanwhile.

    The digest of a changed file is removed, so that nothing is trained on its earlier content.
    """
    assert workload.digested is not None, "no digests are kept of its data"
    root = workload.cache_folder or default_root()
    for path, field in _paths(workload):
        for file in data_files(path, field, READ[workload.digested]).values() if is_there(path) else ():
            source = SourceFile(file, field)
            kept = source.kept_digest(root)
            if kept is None:
                yield Verified(str(file), "not known")
            elif kept == source.read_digest():
                yield Verified(str(file), "same")
            else:
                source.forget(root)
                yield Verified(str(file), "changed")


def _paths(workload: WorkloadBlock) -> Iterator[tuple[str, str]]:
    """Yields each path and its field; for registered names the registered path."""
    given = workload.registry
    registry = {} if given is None else read_registry(str(given), "workload.data.registry")
    for path, field in workload.sources:
        is_name = path in registry and not is_there(path)
        yield find(registry, path, field).path if is_name else path, field
