"""Copies runs, checkpoints and models that are named by an address in a store, and names the copies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from drivetrain.checkpoint.mirror.index import NAME
from drivetrain.checkpoint.mirror.restoring import fetch_run
from drivetrain.config.location import store_address, why_not_readable, without_secrets
from drivetrain.data.remote_sources import fetch
from drivetrain.errors import last_line, problem
from drivetrain.runtime.notices import notify
from drivetrain.runtime.object_store import StoreError
from drivetrain.runtime.store_cache import bucket_of, local_path, store_of


def here(place: str | Path, checkpoints: Sequence[str] = ("best",), field: str = "RUN") -> Path:
    """Returns a place of this machine: the copy of what an address names, or the path itself. Raises UserError.

    checkpoints: of a run that was mirrored there: best, last, all, before-STEP, or names. They are copied beside the
    run file, report, events, samples and scores, which is all that is copied where there are none.
    """
    address = store_address(place)
    if address is None:
        return Path(place)
    if (why := why_not_readable(address)) is not None:
        raise problem(field, f"{without_secrets(address)}: {why}", "correct the address")
    try:
        store, bucket = store_of(bucket_of(address)), bucket_of(address)
        key = address.removeprefix(bucket).strip("/")
        if store.entry(f"{key}/{NAME}".lstrip("/")) is None:
            return fetch(address, field, notify)
        fetch_run(address, local_path(address), checkpoints, notify)
        return local_path(address)
    except StoreError as error:
        fix = "look at the address, the credentials in the environment and the network"
        raise problem(field, str(error), fix) from None
    except OSError as error:
        raise problem(field, f"{address} cannot be kept here: {last_line(error)}", "make room") from None


def run_file_here(place: str | Path, field: str) -> Path:
    """Does the same for a run file. The address of a run that was mirrored there stands for its run.yaml."""
    found = here(place, (), field)
    return found / "run.yaml" if store_address(place) is not None and found.is_dir() else found


def checkpoint_here(checkpoint: str) -> str:
    """Returns best, last or a folder of this machine: the copy of a checkpoint that is named by its address."""
    return checkpoint if store_address(checkpoint) is None else str(here(checkpoint, field="--checkpoint"))
