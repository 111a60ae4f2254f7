"""Each sample of a stream comes once an epoch, in an order that is a function of the seed and the position alone.

The numbers of ranks and of loader workers change on the way, and processes are killed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest

from tests.data.streams.consumer import taken
from tests.data.streams.shard_files import ENDINGS, plain_order, write_shards

ROOT = Path(__file__).parents[3]


def merged(parts: list[list[int]]) -> list[int]:
    """A step's global batch from what its ranks took: rank r has every world-th sample from the r-th on."""
    whole: list[int] = [0] * sum(map(len, parts))
    for rank, part in enumerate(parts):
        whole[rank :: len(parts)] = part
    return whole


def test_ranks_and_workers_that_change_take_the_order_that_is_written_out(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", [3 + place % 5 for place in range(40)])
    rows = sum(map(len, shards))
    wanted = [number for turn in range(3) for number in plain_order(shards, 32, 0, turn)]
    found: list[int] = []
    for first, last, world, workers in ((0, 9, 3, 0), (9, 20, 2, 2), (20, 30, 4, 1), (30, 40, 1, 0)):
        given = (tmp_path / "shards", tmp_path / "cache", 32, 10, range(first, last))
        ranks = [list(taken(*given, rank, world, workers)) for rank in range(world)]
        found += chain(*(merged([rank[step] for rank in ranks]) for step in range(last - first)))
    assert found == wanted[:400]
    assert sorted(found[:rows]) == list(range(rows))


@pytest.mark.slow
def test_a_thousand_shards_through_kills_of_changing_ranks_and_workers(tmp_path: Path) -> None:
    """3 → 2 → 4 ranks and 0 → 2 → 1 workers, each killed with SIGKILL somewhere on the way, and gone on from the last
    step that all ranks had taken, as from a checkpoint; the cache of row counts is kept, and deleted once."""
    choice, batch, buffer = random.Random(0), 48, 500
    shards = write_shards(tmp_path / "shards", [8 + place % 9 for place in range(1000)], ENDINGS)
    rows = sum(map(len, shards))
    wanted = [number for turn in range(3) for number in plain_order(shards, buffer, 0, turn)]
    last = 2 * rows // batch
    layouts = [(3, 0), (2, 2), (4, 1), (3, 2), (2, 0), (4, 0)]
    found: list[int] = []
    step = kills = 0
    while step < last:
        world, workers = layouts[kills % len(layouts)]
        if kills == 3:
            for file in (tmp_path / "cache").glob("stream-*"):
                file.unlink()
        stop = min(last, step + choice.randrange(40, 120))
        ranks = _killed_after(tmp_path, (buffer, batch, step, last), stop, world, workers)
        common = min(map(len, ranks))
        found += chain(*(merged([rank[place] for rank in ranks]) for place in range(common)))
        step += common
        kills += 1
    assert kills > 5
    assert found == wanted[: last * batch]
    assert sorted(found[:rows]) == list(range(rows))


def _killed_after(
    folder: Path, given: tuple[int, int, int, int], stop: int, world: int, workers: int
) -> list[list[list[int]]]:
    """Returns what each rank took from its first step on, killed when all had written the step before `stop`."""
    outputs = [folder / f"rank-{rank}.txt" for rank in range(world)]
    for output in outputs:
        output.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    shared = [sys.executable, "-m", "tests.data.streams.consumer", str(folder / "shards"), str(folder / "cache")]
    processes = [
        subprocess.Popen(
            [*shared, *map(str, given), str(rank), str(world), str(workers), str(output)],
            env=environment,
            start_new_session=True,
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        limit = time.monotonic() + 300
        while time.monotonic() < limit and not all(_steps(output) >= stop - given[2] for output in outputs):
            time.sleep(0.05)
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)  # the rank and its loader workers
            process.wait()
    return [[list(map(int, line.split()[1:])) for line in _lines(output)] for output in outputs]


def _steps(output: Path) -> int:
    return len(_lines(output)) if output.exists() else 0


def _lines(output: Path) -> list[str]:
    """Those that were written whole."""
    return [line for line in output.read_text().splitlines(keepends=True) if line.endswith("\n")]
