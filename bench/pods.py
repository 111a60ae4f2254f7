"""The pods of a manifest, each in a network namespace of its own: they train together, are preempted, and go on.

    sudo python -m bench.pods          # ip and unshare, as root

`drivetrain launch --jobset` and `--kubernetes` write a job of two nodes. Here each pod's command runs with a network
and a host name of its own, the names that the job's service answers to, and the variables that the controller puts into
its environment. The job runs once undisturbed; once both pods get SIGTERM on the way, as from a node that is to be
freed, and are started again. Both have to end with the same curve and the same bits, and the second start has to go on
from the step that the first one saved.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from bench.tables import machine_line, markdown_table, write
from drivetrain.tracking.jsonl import read_events
from tests.launch.test_start import command, losses, prepared, report

RESULTS = Path(__file__).resolve().parent / "results" / "pods.md"
WAYS = ("--jobset", "--kubernetes")
SPACES = {"pod-a": "10.99.0.1", "pod-b": "10.99.0.2"}  # name of the network namespace → address
STEPS, PREEMPTED = 60, 25
PATIENCE = 300.0  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pods-") as folder, networks():
        rows = [row(way, Path(folder) / way.strip("-")) for way in WAYS]
    head = ["manifest", "ranks", "steps", "SIGTERM at step", "saved at step", "ended after", "grace", "exit codes"]
    about = "\n".join((__doc__ or "").splitlines()[4:]).strip()
    same = "Curve and weights of each were, to the bit, those of its undisturbed run."
    parts = ("# Pods in two networks", about, machine_line(), markdown_table(head, rows), same)
    write(options.output, "\n\n".join(parts) + "\n")


@contextmanager
def networks() -> Iterator[None]:
    """While the block runs, there are two network namespaces with a wire between them, and files of host names that
    `ip netns exec` shows to what runs there."""
    names = [f"{address} run-node-0-{number}.run run-node-0-{number}" for number, address in enumerate(SPACES.values())]
    hosts = [Path("/etc/netns") / space / "hosts" for space in SPACES]
    made: list[str] = []
    try:
        for space, file in zip(SPACES, hosts, strict=True):
            call("ip", "netns", "add", space)
            made.append(space)
            file.parent.mkdir(parents=True)
            file.write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")
        call(
            "ip", "link", "add", "wire-a", "netns", "pod-a", "type", "veth", "peer", "name", "wire-b", "netns", "pod-b"
        )
        for (space, address), wire in zip(SPACES.items(), ("wire-a", "wire-b"), strict=True):
            within = ("ip", "netns", "exec", space, "ip")
            call(*within, "addr", "add", f"{address}/24", "dev", wire)
            for each in (wire, "lo"):
                call(*within, "link", "set", each, "up")
        yield
    finally:
        for space in made:
            call("ip", "netns", "del", space)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)


def call(*words: str) -> None:
    subprocess.run(words, check=True)


def row(way: str, folder: Path) -> list[str]:
    whole, preempted = (Job(way, folder / name) for name in ("whole", "preempted"))
    codes = whole.ended(whole.start())
    assert codes == [0, 0], whole.log
    pods = preempted.start()
    until = time.monotonic() + PATIENCE
    while preempted.step < PREEMPTED:
        assert time.monotonic() < until, preempted.log
        assert all(each.poll() is None for each in pods), preempted.log
        time.sleep(0.1)
    at, began = preempted.step, time.monotonic()
    for each in pods:
        os.kill(each.pid, signal.SIGTERM)
    codes = preempted.ended(pods)
    seconds = time.monotonic() - began
    assert preempted.ended(preempted.start()) == [0, 0], preempted.log
    saved = preempted.first_steps[-1]
    assert at <= saved < STEPS, preempted.first_steps
    assert losses(preempted.run) == losses(whole.run), "the curves differ"
    assert preempted.weights == whole.weights, "the weights differ"
    ranks = report(preempted.run)["engaged"]["world_size"]
    found = [way, f"{ranks}", f"{STEPS}", f"{at}", f"{saved}", f"{seconds:.1f} s", f"{preempted.grace} s"]
    print(*found, *codes, flush=True)
    return [*found, " and ".join(map(str, codes))]


class Job:
    """A job's folder, and the command of its pods."""

    def __init__(self, way: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder, self.run = folder, folder / "run"
        prepared(folder, "time.sleep(0.1)")
        line = command(
            "launch", way, str(folder / "run.yaml"), "engine=ddp", "processes=1", "device=cpu", "--nodes", "2",
            f"output={self.run}", f"workload.path={folder / 'workload.py'}", f"loop.steps={STEPS}",
            "checkpoints.every_steps=10", "--image", "example/drivetrain", "--volume", f"work:{folder}",
        )  # fmt: skip
        text = subprocess.run(line, cwd=folder, check=True, capture_output=True, text=True).stdout
        documents: list[Any] = list(YAML(typ="safe", pure=True).load_all(text))
        config = folder / "config"
        config.mkdir()
        for name, content in documents[0]["data"].items():
            (config / name).write_text(content)
        [job] = [each for each in documents if each["kind"] in ("JobSet", "TrainingRuntime")]
        spec = job["spec"] if job["kind"] == "JobSet" else job["spec"]["template"]["spec"]
        pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        self.grace: int = pod["terminationGracePeriodSeconds"]
        self._line: str = pod["containers"][0]["command"][2].replace("/etc/drivetrain", str(config))
        programs = folder / "bin"
        programs.mkdir()
        (programs / "drivetrain").write_text(f'#!/bin/sh\nexec {sys.executable} -m drivetrain "$@"\n')
        (programs / "drivetrain").chmod(0o755)

    def start(self) -> list[subprocess.Popen[bytes]]:
        """Starts both pods; the process of each becomes the run's own, as a container's first one does."""
        pods = []
        for number, space in enumerate(SPACES):
            injected = {
                "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
                "PET_NNODES": "2",
                "PET_NPROC_PER_NODE": "1",
                "PET_NODE_RANK": f"{number}",
                "PET_MASTER_ADDR": "run-node-0-0.run",
                "PET_MASTER_PORT": "29500",
                "JOB_COMPLETION_INDEX": f"{number}",
            }
            line = f"hostname run-node-0-{number}; {self._line}"
            words = ["ip", "netns", "exec", space, "unshare", "--uts", "sh", "-c", line]
            with (self.folder / f"log.{number}").open("ab") as log:
                environment = {**os.environ, **injected}
                pods.append(subprocess.Popen(words, cwd=self.folder, env=environment, stdout=log, stderr=log))
        return pods

    def ended(self, pods: list[subprocess.Popen[bytes]]) -> list[int]:
        """Waits for the pods; those that do not end are killed. Returns their exit codes."""
        try:
            return [each.wait(PATIENCE) for each in pods]
        finally:
            for each in pods:
                each.kill()

    @property
    def log(self) -> str:
        return "\n".join((self.folder / f"log.{number}").read_text(errors="replace")[-2000:] for number in range(2))

    @property
    def step(self) -> int:
        return max(losses(self.run), default=0) if (self.run / "events.jsonl").exists() else 0

    @property
    def first_steps(self) -> list[int]:
        events = read_events(self.run / "events.jsonl")
        return [each["first_step"] for each in events if each["event"] == "run_started"]

    @property
    def weights(self) -> bytes:
        return (self.run / "checkpoints" / f"step-{STEPS:08}" / "model.safetensors").read_bytes()


if __name__ == "__main__":
    main()
