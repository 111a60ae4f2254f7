"""Kills a first start again and again while it reads and tokenises, and compares what it comes to in the end.

    python bench/data_made.py conversations made.jsonl --rows 40000
    PYTHONPATH=src:. python bench/killed_tokenising.py made.jsonl --kills 20

All processes of a start are killed (SIGKILL) at a random moment: after its first trace on the disk and a random number
of finished blocks; the next start goes on. Each time that a start comes to its end, its arrays are compared, byte by
byte, with those of one that was left alone, and the next begins with an empty folder, until there were so many kills.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.first_start import OURS, tokenizer_folder

# Several processes tokenise from the beginning: a kill meets the builder and its helpers in the middle of blocks.
PREPARED = """
from drivetrain.data import block_work
block_work.MEASURED, block_work.BLOCK_BYTES = 0.0, 1 << 17
"""
MOST_BLOCKS = 60  # that a start finishes before it is killed, less one; 40,000 conversations are 270


def started(path: Path, cache: Path, tokenizer: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PREPARED + OURS, str(path), str(cache), str(tokenizer)]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def left_on_disk(cache: Path) -> int:
    return sum(1 for file in cache.rglob("*") if file.is_file()) if cache.exists() else 0


def blocks_in(cache: Path) -> int:
    return len(list(cache.glob("*/block-*.npz")))


def arrays(cache: Path) -> dict[str, bytes]:
    """Content of all finished stores, by name."""
    return {
        file.relative_to(cache).as_posix(): file.read_bytes()
        for contents in cache.glob("*/contents.json")
        for file in contents.parent.iterdir()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--within", type=float, default=0.5, help="seconds after what is waited for")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tokenizer_folder(given.path, Path(folder) / "tokenizer")
        alone, killed = Path(folder) / "alone", Path(folder) / "killed"
        assert started(given.path, alone, tokenizer).wait() == 0
        wanted = arrays(alone)
        blocks: list[int] = []  # that each killed start left for the next
        same: list[bool] = []  # of each start that came to its end
        while len(blocks) < given.kills:
            before, most = left_on_disk(killed), blocks_in(killed) + rng.randrange(MOST_BLOCKS)
            running = started(given.path, killed, tokenizer)
            while running.poll() is None and (left_on_disk(killed) == before or blocks_in(killed) < most):
                time.sleep(0.01)
            time.sleep(rng.uniform(0, given.within))
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()
                blocks.append(blocks_in(killed))
            else:
                assert running.returncode == 0
                same.append(arrays(killed) == wanted)
                shutil.rmtree(killed)
        assert started(given.path, killed, tokenizer).wait() == 0
        same.append(arrays(killed) == wanted)
        print(json.dumps({"kills": len(blocks), "blocks_found_by_the_next": blocks, "same_arrays": same}))
    raise SystemExit(0 if all(same) else 1)


if __name__ == "__main__":
    main()
