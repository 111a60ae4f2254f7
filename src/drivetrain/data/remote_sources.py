"""Fetches what a run names by addresses in stores, and returns the run with the paths of the copies in their place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

from drivetrain.config.base import Frozen, PathOrId
from drivetrain.config.location import Source as SourcePath
from drivetrain.config.location import store_address
from drivetrain.config.run import RunConfig
from drivetrain.data.shard_paths import names_of
from drivetrain.errors import Problem, UserError, last_line
from drivetrain.runtime.notices import Notify, notify
from drivetrain.runtime.object_store import StoreError
from drivetrain.runtime.store_cache import Source

B = TypeVar("B", bound=Frozen)
_KINDS = (get_args(PathOrId)[1], get_args(SourcePath)[1])  # what marks the fields that may hold an address
DATA = "workload.data"


def fetched(run: RunConfig, data: bool = True, notify: Notify = notify) -> RunConfig:
    """Returns the run with local copies of all that it reads from stores. Raises UserError with all that cannot be
    fetched.

    data: whether the data sets are needed too, or the models alone.
    """
    problems: list[Problem] = []

    def local(field: str, address: str) -> str:
        if field.startswith(DATA) and (not data or field in run.workload.streamed):
            return address
        try:
            return str(fetch(address, field, notify))
        except UserError as error:
            problems.extend(error.problems)
        except (StoreError, OSError) as error:
            fix = "look at the address, the credentials in the environment and the network, and start again"
            why = str(error) if isinstance(error, StoreError) else f"{address} cannot be kept here: {last_line(error)}"
            problems.append(Problem(field, why, fix))
        return address

    workload = with_sources(run.workload, "workload", local)
    adapters = None if run.adapter is None else [with_sources(each, "adapter", local) for each in run.adapter]
    if problems:
        raise UserError(problems)
    if workload is run.workload and all(a is b for a, b in zip(adapters or (), run.adapter or (), strict=True)):
        return run
    return run.model_copy(update={"workload": workload, "adapter": adapters})


def fetch(address: str, field: str, notify: Notify) -> Path:
    """Fetches one address, a pattern or a name with braces too. Raises UserError, StoreError and OSError."""
    return Source(address, names_of(address, field)).fetch(field, notify)


def with_sources(block: B, field: str, local: Callable[[str, str], str]) -> B:
    """Returns a block with local(field, address) in place of each address in it; the block itself if it has none."""
    changed = {}
    for name in type(block).model_fields:
        value = getattr(block, name)
        found = _replaced(value, f"{field}.{name}", local, name in _source_fields(type(block)))
        if found is not value:
            changed[name] = found
    return block.model_copy(update=changed) if changed else block


def _replaced(value: Any, field: str, local: Callable[[str, str], str], is_source: bool) -> Any:
    if isinstance(value, Frozen):
        return with_sources(value, field, local)
    if isinstance(value, list):
        found = [_replaced(each, field, local, is_source) for each in value]
        return found if any(a is not b for a, b in zip(found, value, strict=True)) else value
    if is_source and isinstance(value, str | Path) and (address := store_address(value)) is not None:
        return type(value)(local(field, address)) if isinstance(value, str) else Path(local(field, address))
    return value


@functools.cache
def _source_fields(block: type[Frozen]) -> frozenset[str]:
    """Returns the fields that may hold an address: those of the types PathOrId and Source."""
    return frozenset(
        name
        for name, field in block.model_fields.items()
        if any(each in _KINDS for each in (*field.metadata, *_marks(field.annotation)))
    )


def _marks(annotation: Any) -> Iterator[Any]:
    yield from getattr(annotation, "__metadata__", ())
    for each in get_args(annotation):
        if not isinstance(each, str):
            yield from _marks(each)
