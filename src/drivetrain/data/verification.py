"""Verifies that data files hold what runs of this machine recorded: all bytes are read, and compared with the kept
digest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from drivetrain.config.language import LanguageData
from drivetrain.config.workload import TextData
from drivetrain.data.array_store import default_root
from drivetrain.data.data_files import data_files, is_there
from drivetrain.data.language.registry import find, read_registry
from drivetrain.data.row_blocks import ENDINGS
from drivetrain.data.source_files import SourceFile
from drivetrain.data.table_blocks import IN_BLOCKS


@dataclass(frozen=True)
class Verified:
    """The result. same: as the next start expects; changed: other bytes, which the next start now reads anew; not
    known: no digest of the present file is kept, so that the next start reads it anyway."""

    path: str
    state: Literal["same", "changed", "not known"]


def verified(data: LanguageData | TextData) -> Iterator[Verified]:
    """Reads all files of a run's data. Raises UserError for files that cannot be found or change meanwhile.

    The digest of a changed file is removed, so that nothing is trained on its earlier content.
    """
    root = data.cache or default_root()
    for path, field in _paths(data):
        endings = ENDINGS if isinstance(data, LanguageData) else IN_BLOCKS
        for file in data_files(path, field, endings).values() if is_there(path) else ():
            source = SourceFile(file, field)
            kept = source.kept_digest(root)
            if kept is None:
                yield Verified(str(file), "not known")
            elif kept == source.read_digest():
                yield Verified(str(file), "same")
            else:
                source.forget(root)
                yield Verified(str(file), "changed")


def _paths(data: LanguageData | TextData) -> Iterator[tuple[str, str]]:
    """Returns each path and its field; for registered names the registered path."""
    for name in ("train", "evaluation"):
        given, field = getattr(data, name), f"workload.data.{name}"
        if given is None:
            continue
        if isinstance(data, TextData):
            yield given, field
            continue
        registry = {} if data.registry is None else read_registry(str(data.registry), "workload.data.registry")
        for source in given:
            is_name = source.path in registry and not is_there(source.path)
            yield find(registry, source.path, field).path if is_name else source.path, field
