"""Checks before the first step: the ranks hold the same software, run and data, the disk has room, the network
answers."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.config.run import RunConfig
from drivetrain.data.streams.endless import known_length, order_key
from drivetrain.distributed.communicator import Communicator
from drivetrain.distributed.rng import restore_rng_state, rng_state
from drivetrain.errors import Problem, UserError
from drivetrain.runtime import environment
from drivetrain.runtime.store_cache import with_addresses
from drivetrain.workloads.base import Samples, Workload
from drivetrain.workloads.generating import MakesSamples

MOST_REPORTED = 8  # differences of one kind
REDUCED_BYTES = 2**20
# values of the optimizer's state for each trained one, where it is known to keep at least these
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def agree(config: RunConfig, communicator: Communicator) -> None:
    """Raises UserError unless all ranks have the same versions and the same run; called before anything is built."""
    if communicator.world == 1:
        return
    install = "install the same everywhere; drivetrain doctor shows what is there"
    problems = differences(communicator, "versions", environment.versions(), install)
    run = dict(_flat(with_addresses(config.model_dump(mode="json"))))  # caches lie elsewhere on each machine
    problems += differences(communicator, "run file", run, "give every machine the same run file and overrides")
    if problems:
        raise UserError(problems)


def same_data(workload: Workload, communicator: Communicator) -> None:
    """Raises UserError unless all ranks have as many samples, and the first, middle and last ones look the same."""
    if communicator.world == 1:
        return
    found = {f"train {name}": value for name, value in fingerprint(workload.train).items()}
    if workload.evaluation is not None:
        found |= {f"evaluation {name}": value for name, value in fingerprint(workload.evaluation).items()}
    problems = differences(
        communicator, "workload.data", found, "give every machine the same files, and no chance in reading"
    )
    if problems:
        raise UserError(problems)


def start_processes(workload: Workload, keep: bool) -> None:
    """Starts the processes that samples are made with, such as those of rewards. Raises UserError for a function that
    cannot be called. keep: whether they go on once they are ready."""
    if isinstance(workload, MakesSamples):
        workload.start_processes(keep)


def workload_notes(config: RunConfig, workload: Workload) -> list[str]:
    """Returns the workload's warnings; for own code with BatchNorm also that a cut batch changes its statistics.
    (Image classification says so itself, with a remedy of its own.)"""
    cut = config.data_parallel_size > 1 or config.micro_batch < config.global_batch
    if not (cut and workload.has_batch_norm and config.workload.described_model is None):
        return list(workload.warnings)
    pieces = f"the batch of {config.global_batch} is cut into pieces of {_piece(config)}"
    why = f"the model has BatchNorm, and {pieces}: its statistics in training are those of a piece, and each rank's own"
    return [*workload.warnings, f"{why}; GroupNorm or LayerNorm do not depend on the cut"]


def _piece(config: RunConfig) -> int:
    """Returns the samples that one device runs at once, at the most."""
    return min(config.micro_batch, -(-config.global_batch // config.data_parallel_size))


def differences(communicator: Communicator, field: str, own: Mapping[str, Any], fix: str) -> list[Problem]:
    """Returns a problem for each value that is not the same on all ranks, with the ranks that have it. Equal on all
    ranks."""
    if len(set(communicator.all_gather(_digest(json.dumps(own, sort_keys=True, default=str).encode())))) == 1:
        return []
    differing = holders(communicator.all_gather(dict(own))).values()
    return [Problem(field, why, fix) for why in differing][:MOST_REPORTED]


def holders(everyone: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns for each name whose value is not the same on all ranks, a sentence with the values and the ranks that
    have them.

    everyone: the values of each rank, in the order of the ranks.
    """
    found = {}
    for name in dict.fromkeys(name for each in everyone for name in each):
        ranks_of: dict[str, list[int]] = {}
        for rank, each in enumerate(everyone):
            ranks_of.setdefault(str(each.get(name, "not there")), []).append(rank)
        if len(ranks_of) > 1:
            found[name] = f"{name} is {' and '.join(f'{value} on {_ranks(who)}' for value, who in ranks_of.items())}"
    return found


def fingerprint(samples: Samples) -> dict[str, Any]:
    """Returns the number of samples, and a digest of the first, middle and last one.

    One that is not the same when it is read again, or that cannot be read (the loader reports that), is left out.
    """
    count = known_length(samples)
    found: dict[str, Any] = {"samples": count} if count is not None else {"stream": order_key(samples)["stream"]}
    before = rng_state()
    for index in (0,) if count is None else sorted({0, count // 2, count - 1}) if count else ():
        try:
            once, again = (_digest(b"".join(_bytes(samples.load(index, 0)))) for _ in range(2))
        except Exception:
            continue
        if once == again:
            found[f"sample {index}"] = once
    restore_rng_state(before)
    return found


def disk(config: RunConfig, one: int, root: Path, is_replaced: bool) -> list[str]:
    """Returns warnings for a disk that will be full before the run has kept all its checkpoints.

    Raises UserError if not even one fits. one: bytes of a checkpoint. is_replaced: an existing one is deleted before.
    """
    there = next(path for path in (root, *root.absolute().parents) if path.exists())
    held = sum(file.stat().st_size for file in root.rglob("*") if file.is_file()) if root.exists() else 0
    free = shutil.disk_usage(there).free + (held if is_replaced else 0)
    if one > free:
        why = f"a checkpoint takes at least {_mib(one)}, and {there} has {_mib(free)} free"
        fix = "make room (older checkpoints may go, if there are any), or give a folder on another disk"
        raise UserError([Problem("output", why, fix)])
    kept = config.checkpoints.keep_last + config.checkpoints.keep_best
    wanted = one * (kept + 1) - (0 if is_replaced else held)  # the one that is being written is there beside those
    if wanted <= free:
        return []
    return [
        f"{kept} checkpoints are to be kept, which takes {_mib(wanted)} more with the next one, and {there} has "
        f"{_mib(free)} free: make room, or give checkpoints.keep_last=1 or checkpoints.keep_best=0"
    ]


def checkpoint_bytes(config: RunConfig, shapes: Mapping[str, torch.Size], trained: int) -> int:
    """Returns the bytes of weights and optimizer state, as far as known before the first step: rather too few.

    shapes: of the weights that a checkpoint holds. trained: the number of parameters with optimizer state.
    """
    weights = sum(shape.numel() for shape in shapes.values())
    states = config.optimizer.kind.states or (1 if config.optimizer.momentum else 0)
    return (weights + states * trained) * BYTES[config.precision_spec.parameters]


def timed_all_reduce(communicator: Communicator, device: torch.device) -> dict[str, float]:
    """Returns seconds for the smallest all-reduce, and bytes a second of a larger one; the best of some."""
    if communicator.world == 1:
        return {}
    small, large = (torch.zeros(count, device=device) for count in (1, REDUCED_BYTES // 4))
    return {
        "all_reduce_latency_seconds": min(_seconds(communicator, small) for _ in range(6)),
        "all_reduce_bytes_per_second": REDUCED_BYTES / min(_seconds(communicator, large) for _ in range(4)),
    }


def _seconds(communicator: Communicator, tensor: Tensor) -> float:
    start = time.perf_counter()
    communicator.sum(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - start


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def _bytes(value: Any) -> Iterator[bytes]:
    """Yields the bytes of a sample; for values of an unknown kind only the kind."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield str(name).encode()
            yield from _bytes(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _bytes(inner)
    elif isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray | np.generic):
        yield f"{value.dtype} {value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, str | bytes | int | float | None):
        yield value if isinstance(value, bytes) else repr(value).encode()
    else:
        yield type(value).__qualname__.encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:4])) + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
