"""Measures how long training stands still for a save, beside torch.save and PyTorch's distributed checkpoint.

    python bench/checkpoint.py
    python bench/checkpoint.py --megabytes 100 400 --pairs 1

One process steps (products of matrices) and saves once in the middle: weights and Adam's two moments in fp32. Stands
still: the time that the call takes. Write: from the call until the checkpoint is in place; ours is read back, compared
and summed (SHA-256) by then, the others' are not. Beside it: how much slower steps are while a save is under way, and
the resident memory that it takes on top. Folders are on one disk; each is a process of its own, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from interleaved import child_environment
from tables import machine_line, markdown_table, write

RESULTS = Path(__file__).resolve().parent / "results"
WAYS = ("drivetrain", "drivetrain, asynchronous", "torch.save", "DCP", "DCP, asynchronous")
CHILD = """
import json, sys, threading, time
from pathlib import Path
import torch

way, folder, megabytes = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
count = 8
size = megabytes * 2**20 // (3 * 4 * count)
weights = {f"layers.{n}.weight": torch.randn(size // 1024, 1024) for n in range(count)}
moments = {n: {"exp_avg": torch.zeros_like(w), "exp_avg_sq": torch.zeros_like(w), "step": torch.tensor(7.0)}
           for n, w in weights.items()}
groups = [{"params": list(weights), "lr": 0.1}]
state = {"model": weights, "optimizer": {"state": moments, "param_groups": groups}}
factor = torch.randn(1024, 1024)

def memory(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024

def steps(until):
    times = []
    while not until(len(times)):
        start = time.perf_counter()
        for _ in range(2):
            factor @ factor
        times.append(time.perf_counter() - start)
    return times

if way.startswith("drivetrain"):
    from drivetrain.training.run_checkpoints import RunCheckpoints
    from drivetrain.config.load import validate
    from drivetrain.training.progress import Progress
    from drivetrain.distributed.communicator import Communicator
    from drivetrain.workloads.base import BestMetric

    class Engine:
        random_stream = 0
        def state_dict(self):
            return {**state, "engine": {}}
        def save_assets(self, folder, weights):
            pass

    raw = {"workload": {"type": "module", "path": "x.py"}, "batch_size": 1, "loop": {"steps": 9}}
    run, _ = validate({**raw, "checkpoints": {"asynchronous": "asynchronous" in way}}, [])
    said = []
    metric = BestMetric("loss", False)
    checkpoints = RunCheckpoints(folder, run, Engine(), Communicator(), metric, range(1), said.append)
    save, done, finish = lambda: checkpoints.save(Progress(step=7)), lambda: bool(said), checkpoints.finish
elif way == "torch.save":
    def save():
        torch.save(state, folder / "state.pt")
    done, finish = lambda: True, lambda: None
else:
    import torch.distributed.checkpoint as dcp
    import warnings
    warnings.filterwarnings("ignore")
    if "asynchronous" in way:
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        under_way = []
        def save():
            under_way.append(dcp.async_save(state, checkpoint_id=folder / "dcp"))
        done, finish = lambda: under_way[0].done(), lambda: under_way[0].result()
    else:
        def save():
            dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
        done, finish = lambda: True, lambda: None

alone = steps(lambda n: n == 60)[20:]
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
start = time.perf_counter()
save()
still = time.perf_counter() - start
beside = steps(lambda n: done())
finish()
whole = time.perf_counter() - start
slower = (sum(beside) / len(beside)) / (sum(alone) / len(alone)) if len(beside) > 3 else 1.0
print(json.dumps({"still": still, "write": whole, "slower": slower, "extra": memory("VmHWM") - before}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="how long training stands still for a save")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 400, 1024, 4096])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "checkpoint.md")
    options = parser.parse_args()
    rows = []
    for megabytes in options.megabytes:
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for turn in range(options.pairs):
            for way in WAYS if turn % 2 == 0 else reversed(WAYS):
                found[way].append(measured(way, megabytes))
                print(megabytes, way, found[way][-1], flush=True)
        base = statistics.median(each["write"] for each in found["torch.save"])
        rows += [row(megabytes, way, several, base) for way, several in found.items()]
    write(options.output, page(rows))


def measured(way: str, megabytes: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as folder:
        command = [sys.executable, "-c", CHILD, way, folder, str(megabytes)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=child_environment())
    if done.returncode:
        raise RuntimeError(done.stderr)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def row(megabytes: int, way: str, several: list[dict[str, float]], base: float) -> list[str]:
    def middle(name: str) -> float:
        return statistics.median(each[name] for each in several)

    share = statistics.median(each["still"] / each["write"] for each in several)
    return [
        f"{megabytes:,}",
        way,
        f"{middle('still'):.2f}",
        f"{middle('write'):.2f}",
        f"{share:.0%}",
        f"{middle('still') / base:.2f}",
        f"{middle('slower'):.2f}",
        f"{middle('extra') / 2**20:,.0f}",
    ]


def page(rows: list[list[str]]) -> str:
    head = ["MiB", "way", "stands still, s", "write, s", "share", "stands still / torch.save", "steps beside it take"]
    return (
        f"# Saving: how long training stands still\n\n{__doc__.split(chr(10) * 2, 2)[2]}\n{machine_line()}\n\n"
        f"{markdown_table([*head, 'extra memory, MiB'], rows)}\n"
    )


if __name__ == "__main__":
    main()
