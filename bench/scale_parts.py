"""The parts of rank 0's work that bench/scale.py measures: each prepares what fake ranks send, and returns the work."""

from __future__ import annotations

import copy
import json
import pickle
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drivetrain.checkpoint.manifest import Outline, plan_of
from drivetrain.checkpoint.state import split
from drivetrain.checkpoint.tensor_file import Kind
from drivetrain.config.load import load
from drivetrain.data.micro_batches import Lengths, Slice
from drivetrain.data.order import GlobalOrder
from drivetrain.distributed.communicator import Communicator
from drivetrain.distributed.rng import rng_state
from drivetrain.launch import agreement, kubernetes
from drivetrain.launch.cluster import checked_for_cluster
from drivetrain.launch.diagnostics.hang_report import Row, blame, in_full, table
from drivetrain.launch.diagnostics.process_state import PendingCollective, Standing
from drivetrain.launch.job import Node
from drivetrain.launch.rendezvous import Meeting
from drivetrain.launch.slurm import Allocation, sbatch_script
from drivetrain.measure.meters import RankSummary
from drivetrain.measure.utilisation import joined
from drivetrain.runtime.heartbeat import Pulse
from drivetrain.runtime.strict_json import dumps
from drivetrain.tracking.events import StepDone, Troubled
from drivetrain.tracking.jsonl import FILE_NAME, JsonlTracker
from drivetrain.training import preflight
from drivetrain.training.batching import check_shares

ROOT = Path(__file__).resolve().parents[1]
DIGITS = ROOT / "recipes/digits.yaml"
ON_A_NODE = 8  # ranks
SAMPLES, EACH = 1_000_000, 8  # of the data, and of the global batch for each rank
PATIENCE = 120
Work = Callable[[], int]  # does it, and returns the bytes that rank 0 received or wrote


@dataclass(frozen=True)
class Part:
    """make: prepares for so many ranks, with an empty folder. what: for the page."""

    make: Callable[[int, Path], Work]
    what: str


class FakeRanks(Communicator):
    """Rank 0 among ranks whose answers to each gathering call were made before. They arrive pickled, as they do through
    torch.distributed, and the time to unpickle them is part of the work."""

    def __init__(self, *answers: Sequence[Any]) -> None:
        super().__init__()
        self.world = len(answers[0])
        self._answers = [[pickle.dumps(each) for each in values] for values in answers]
        self.received = 0

    def all_gather(self, value: Any) -> list[Any]:
        del value
        arrived = self._answers.pop(0)
        self.received += sum(map(len, arrived))
        return [pickle.loads(each) for each in arrived]


# --- before the first step -------------------------------------------------------------------------------------------


def manifests(ranks: int, folder: Path) -> Work:
    del folder

    def work() -> int:
        nodes, words = ranks // ON_A_NODE, ["engine=fsdp", f"processes={ON_A_NODE}", f"batch_size={ranks}"]
        job = checked_for_cluster(DIGITS, words, nodes)
        asked = kubernetes.request("registry/image:1", ["runs:/runs"], None, None, 64, "200Gi", 10, None)
        texts = [
            kubernetes.as_yaml(kubernetes.trainjob(DIGITS, job.overrides, job.run, asked)),
            kubernetes.as_yaml(kubernetes.jobset(DIGITS, job.overrides, job.run, asked)),
            sbatch_script(DIGITS, job.overrides, job.run, Allocation("1:00:00", cpus=64)),
        ]
        return sum(len(text.encode()) for text in texts)

    return work


def software(ranks: int, folder: Path) -> Work:
    """Each rank has put its versions into the store; rank 0 reads and compares them, and answers."""
    del folder
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    own = {"torch": torch.__version__, "CUDA": "13.0", "NCCL": "2.28", "GPU": "H100", "driver": "580.1"}
    texts = torch.distributed.PrefixStore("software", store)
    for rank in range(1, ranks):
        texts.set(str(rank), json.dumps(own))

    def work() -> int:
        assert agreement.agree(store, 0, ranks, own) == []
        return ranks * len(json.dumps(own))

    return work


def run_files(ranks: int, folder: Path) -> Work:
    """The ranks' digests of versions and run file, one of which differs: then rank 0 gets all of them in full."""
    del folder
    run, _ = load(DIGITS, [])
    assert run is not None
    full = dict(preflight._flat(run.model_dump(mode="json")))
    other = {**full, "seed": 8}
    fake = FakeRanks(["a"] * (ranks - 1) + ["b"], [full] * (ranks - 1) + [other])

    def work() -> int:
        [problem] = preflight.differences(fake, "run file", full, "")
        assert "seed is 0 on rank" in problem.why or "seed is" in problem.why
        return fake.received

    return work


# --- data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CountsSamples:
    counts_samples: bool = True


def data_index(ranks: int, folder: Path) -> Work:
    """Ten steps: the global batch of each, and rank 0's micro-batches of it, by length."""
    del folder
    order = GlobalOrder(SAMPLES, EACH * ranks, seed=0)
    order.batch(0)  # an epoch's order depends on the number of samples alone
    tokens = np.random.default_rng(0).integers(50, 2000, SAMPLES)
    mine = Slice(0, ranks, 4, Lengths(tokens, 256))

    def work() -> int:
        return sum(order.batch(step)[1].nbytes for step in range(10) if mine.positions(order.batch(step)[1]))

    return work


def first_shares(ranks: int, folder: Path) -> Work:
    """Before the first step all ranks show which samples they take: each of the batch once."""
    del folder
    order, mine = GlobalOrder(SAMPLES, EACH * ranks, seed=0), Slice(0, ranks, 4)
    _, indices = order.batch(0)
    shares = [[int(each) for piece in Slice(rank, ranks, 4).pieces(indices) for each in piece] for rank in range(ranks)]
    fake = FakeRanks(shares)

    def work() -> int:
        engine: Any = CountsSamples()
        check_shares(order, mine, engine, fake)
        return fake.received

    return work


# --- while it runs ---------------------------------------------------------------------------------------------------


def heartbeats(ranks: int, folder: Path) -> Work:
    """One look of the watches of all nodes: each tells its ranks' progress and asks whether a rank has failed. The
    clients run in this process too."""
    del folder
    nodes = max(2, ranks // ON_A_NODE)
    run, _ = load(DIGITS, ["engine=fsdp", f"processes={ON_A_NODE}", f"nodes={nodes}", f"batch_size={ranks}"])
    assert run is not None
    first = Meeting(run, Node(0, f"127.0.0.1:{_free_port()}"))
    meetings = [first, *(_sharing(first, rank) for rank in range(1, nodes))]
    for each in meetings:
        each.progress(1)

    def work() -> int:
        for each in meetings:
            each.progress(2)
            assert not each.failure()
            assert not each.hang()
        assert meetings[0].progress(2) == 2 * nodes, "every node's progress has come"
        return nodes * len("drivetrain/moves-0" + "drivetrain/failed-in-0" + "drivetrain/hang-0" + "12345678" * 3)

    return work


def _sharing(first: Meeting, rank: int) -> Meeting:
    """Returns another node's meeting, which asks over the first one's connection."""
    found = copy.copy(first)
    found._node = Node(rank)
    return found


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def hang_rows(ranks: int) -> list[Row]:
    """All ranks but one wait in the 100th all-reduce; that one stands in its forward pass."""
    waits = PendingCollective("0", 100, "all_reduce of 1048576 Float")
    stacks = "".join(f'  File "/code/model.py", line {line}, in forward\n    x = layer(x)\n' for line in range(12))
    rows = []
    for rank in range(ranks):
        late = rank == ranks - 1
        found = Standing("model.py:7 forward", "model.py:7 forward", "" if late else "all_reduce", stacks)
        own = {"0": 99 if late else 100, str(1 + rank // ON_A_NODE): 50}
        found = Standing(found.inner, found.own, found.call, stacks, [] if late else [waits], own)
        pulse = Pulse(1000 + rank, rank, 60, 0.0, 60, 100, "forward", (1, 2, 3, 4, 5, 6), EACH * ranks)
        rows.append(Row(pulse, f"node-{rank // ON_A_NODE}", "waits", 300.0, found))
    return rows


def hang_sentence(ranks: int, folder: Path) -> Work:
    """Rows of all ranks arrive as JSON, a text a node; which rank do the others wait for?"""
    del folder
    rows = hang_rows(ranks)
    texts = [
        json.dumps([row.as_dict() for row in rows[start : start + ON_A_NODE]]) for start in range(0, ranks, ON_A_NODE)
    ]

    def work() -> int:
        arrived = [Row.of(row) for text in texts for row in json.loads(text)]
        assert blame(arrived).startswith(f"rank {ranks - 1} has not come to the all_reduce")
        return sum(map(len, texts))

    return work


def hang_without_culprit(ranks: int, folder: Path) -> Work:
    """Every rank waits in the same collective: nothing is late, which takes the longest to find."""
    del folder
    rows = hang_rows(ranks + 1)[:-1]

    def work() -> int:
        return len(blame(rows))

    return work


def hang_table(ranks: int, folder: Path) -> Work:
    rows = hang_rows(ranks)

    def work() -> int:
        text = in_full(rows) + table(rows)  # into the run's folder, and onto the screen
        (folder / "hang.txt").write_text(text)
        return len(text.encode())

    return work


def events(ranks: int, folder: Path) -> Work:
    """A hundred points of the curve and an anomaly, which names the samples of its global batch."""
    tracker = JsonlTracker(folder)
    point = StepDone(1, 0.1, 2.0, 1.0, 1e-4, None, 0, EACH * ranks, 1e5, 10.0)
    anomaly = Troubled(1, "spike", "told", "a spike", 9.0, 9.0, 1.0, 1.0, list(range(EACH * ranks)), None)

    def work() -> int:
        for _ in range(100):
            tracker.handle(point)
        tracker.handle(anomaly)
        return (folder / FILE_NAME).stat().st_size

    return work


def report(ranks: int, folder: Path) -> Work:
    """Every rank's memory, utilisation (a series of 256 points) and speed, joined and written."""
    series = [[float(second), 0.9] for second in range(256)]
    shares = {"mean": 0.9, "peak": 1.0, "samples": 256, "series": series}
    fake = FakeRanks([RankSummary({"allocated": 10**10}, shares, 1e12, {"all_reduce": 10**9}, 1e14)] * ranks)

    def work() -> int:
        everyone = fake.all_gather(None)
        together = joined([each.utilisation for each in everyone], shared=False)
        text = dumps({"utilisation": together, "ranks": [each.short(rank) for rank, each in enumerate(everyone)]})
        (folder / "report.json").write_text(text)
        return fake.received + len(text)

    return work


# --- checkpoints -----------------------------------------------------------------------------------------------------

LAYERS, WIDTH, INNER, VOCABULARY = 16, 2048, 8192, 128_256  # as in a Llama of 1B: 146 tensors


def weights() -> dict[str, tuple[int, ...]]:
    layer = {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (WIDTH, WIDTH)),
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (WIDTH // 4, WIDTH)),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (INNER, WIDTH)),
        "mlp.down_proj": (WIDTH, INNER),
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (WIDTH,)),
    }
    names = {f"model.layers.{n}.{name}.weight": shape for n in range(LAYERS) for name, shape in layer.items()}
    return {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,), **names}


def outline(rank: int, ranks: int) -> Outline:
    """Of a rank's shards, each a stretch of rows as FSDP cuts them."""
    held = {}
    for name, shape in weights().items():
        each = -(-shape[0] // ranks)
        start = min(rank * each, shape[0])
        rows = min(each, shape[0] - start)
        rest = (0,) * (len(shape) - 1)
        held[name] = Kind(torch.float32, shape), ((start, *rest), (rows, *shape[1:]))
    return Outline(held, {"kind": "weights"})


def checkpoint_plan(ranks: int, folder: Path) -> Work:
    """Every rank's outline arrives; who writes what?"""
    del folder
    fake = FakeRanks([outline(rank, ranks) for rank in range(ranks)])

    def work() -> int:
        plan = plan_of(fake.all_gather(None))
        assert sum(map(len, plan.writes)) >= len(weights())
        return fake.received

    return work


def generators(ranks: int, folder: Path) -> Work:
    """The random generators of every rank arrive, and go into the checkpoint."""
    fake = FakeRanks([(0, rng_state())] * ranks)

    def work() -> int:
        tensors, tree = split({"generators": [own for _, own in fake.all_gather(None)]})
        text = json.dumps(tree)
        (folder / "training.json").write_text(text)
        held = sum(each.numel() * each.element_size() for each in tensors.values() if isinstance(each, torch.Tensor))
        return fake.received + len(text) + held

    return work


PARTS = {
    "manifests": Part(manifests, "Rules, a TrainJob, a JobSet and a Slurm script: a node's description and a number."),
    "versions agree": Part(software, "One text a rank in the store where they meet, read one after the other."),
    "run files differ": Part(run_files, "Only if the digests differ do the ranks send their run files in full."),
    "data index": Part(data_index, f"Ten steps of {EACH} samples a rank, cut by length; every rank does the same."),
    "first shares": Part(first_shares, "Once: all ranks' samples of the first step, against the global batch."),
    "heartbeats": Part(heartbeats, "A second's look of all nodes, clients included: three calls a node to the store."),
    "hang, one late": Part(hang_sentence, "Rows with stacks as JSON from each node, and the sentence on who is late."),
    "hang, none late": Part(hang_without_culprit, "The sentence where all wait in the same collective."),
    "hang report": Part(hang_table, "The table and stacks, once a place, and each rank's process, as text."),
    "run events": Part(events, "100 points do not grow; an anomaly lists the samples of its global batch."),
    "report": Part(report, "Once, at the end: what every rank measured."),
    "checkpoint plan": Part(checkpoint_plan, "Each save: an outline a rank of 146 tensors (Llama 1B), per part."),
    "random generators": Part(generators, "Each save: every rank's generators, Python's and NumPy's in full."),
}
