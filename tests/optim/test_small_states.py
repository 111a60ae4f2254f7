"""Optimizers with small states: what they hold, that they update as their papers and packages do on every engine, and
that they go on to the same bits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from drivetrain.checkpoint.state import join, split
from drivetrain.config.training import Optimizer
from drivetrain.data.order import GlobalOrder
from drivetrain.engines.autograd import AutogradEngine
from drivetrain.engines.state import optimizer_tensors
from drivetrain.optim.optimizers import optimizer_factory
from tests.parity import mesh_cases, mesh_promises, promises
from tests.parity.cases import (
    BATCH,
    CLIP,
    IGNORED,
    OPTIMIZERS,
    SAMPLES,
    STEPS,
    Case,
    Curve,
    largest,
    run_cases,
    workload,
)
from tests.ranks import RankPool

pytest.importorskip("torchao")
pytest.importorskip("bitsandbytes")
pytest.importorskip("pytorch_optimizer")
Pools = Callable[[int], RankPool]
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "optimizers.md").read_text()
WHOLE = [Case("ddp", 2, model="wide", optimizer=name) for name in ("adafactor", "galore")]
SHARDED_UPDATE = [replace(case, options={"shard_optimizer": True}) for case in WHOLE]
IN_BITS = [
    Case(engine, 2, model="wide", optimizer=name)
    for engine in ("ddp", "fsdp")
    for name in ("adamw8bit", "adamw4bit", "adamw-fp8", "bitsandbytes")
    if (engine, name) != ("fsdp", "bitsandbytes")
]
DRIVEN = [replace(case, engine="deepspeed", options={"stage": 0}) for case in WHOLE] + [
    Case("accelerate", 2, model="wide", optimizer="adamw4bit", options={"driver": "fsdp"})
]
ON_RANKS = [*WHOLE, *SHARDED_UPDATE, *IN_BITS, *DRIVEN]
HYBRID = [Case("fsdp", 4, model="wide", optimizer=name, options={"hybrid": 2}) for name in ("adamw4bit", "adamw-fp8")]

# --- what they hold --------------------------------------------------------------------------------------------------

SIDE = 1024
NUMBERS = SIDE * SIDE
RANK = 128
# bytes of state of a square matrix: codes and scales of two moments; a row and a column; moments and vectors of a rank
CLOSED_FORM = {
    "sgd": 4 * NUMBERS,
    "adamw": 8 * NUMBERS,
    "adamw8bit": 2 * (NUMBERS + 4 * NUMBERS // 256),
    "adamw-fp8": 2 * (NUMBERS + 4 * NUMBERS // 256),
    "bnb-adamw8bit": 2 * (NUMBERS + 4 * NUMBERS // 256),
    "adamw4bit": 2 * (NUMBERS // 2 + 4 * NUMBERS // 128),
    "adafactor": 4 * (SIDE + SIDE),
    "galore": 4 * (2 * RANK * SIDE + RANK * SIDE),
}


def bytes_held(name: str) -> int:
    """After an update of one matrix; each memory once."""
    model = nn.Linear(SIDE, SIDE, bias=False)
    optimizer = optimizer_factory(Optimizer(name=name, momentum=0.9))(model)
    model.weight.grad = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    storages = [tensor.untyped_storage() for tensor in optimizer_tensors(optimizer)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("name", CLOSED_FORM)
def test_a_state_takes_the_bytes_of_its_closed_form_and_of_the_page(name: str) -> None:
    held = bytes_held(name)
    assert held == pytest.approx(CLOSED_FORM[name], rel=0.05)
    [words] = re.findall(rf"^\| `{name}`.*\| ([\d.]+) \|", PAGE, flags=re.M)
    assert held / NUMBERS == pytest.approx(float(words), rel=0.05)


# --- what they do: against one process of plain PyTorch --------------------------------------------------------------


class PlainGaLore:
    """Algorithm 2 of Zhao et al. 2024, written down for the matrices; AdamW for the vectors."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, rank: int, update_proj_gap: int) -> None:
        self.groups, self.lr, self.rank, self.gap = groups, lr, rank, update_proj_gap
        self.step_number = 0
        self.of: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        self.step_number += 1
        for group in self.groups:
            for parameter in group["params"]:
                self._update(parameter, group["weight_decay"])

    def _update(self, parameter: Tensor, weight_decay: float) -> None:
        grad, state, t = parameter.grad, self.of.setdefault(parameter, {}), self.step_number
        assert grad is not None
        if grad.ndim == 2 and ("basis" not in state or t % self.gap == 0):
            left, _, right = torch.linalg.svd(grad, full_matrices=False)
            state["basis"] = right[: self.rank].T if grad.shape[0] >= grad.shape[1] else left[:, : self.rank]
        tall = grad.ndim == 2 and grad.shape[0] >= grad.shape[1]
        low = grad if grad.ndim == 1 else grad @ state["basis"] if tall else state["basis"].T @ grad
        first = state["first"] = 0.9 * state.get("first", torch.zeros_like(low)) + 0.1 * low
        second = state["second"] = 0.999 * state.get("second", torch.zeros_like(low)) + 0.001 * low**2
        step = first / (1 - 0.9**t) / ((second / (1 - 0.999**t)).sqrt() + 1e-8)
        if grad.ndim == 2:
            step = 0.25 * (step @ state["basis"].T if tall else state["basis"] @ step)
        parameter.sub_(self.lr * step)
        parameter.mul_(1 - self.lr * weight_decay)

    def zero_grad(self) -> None:
        for group in self.groups:
            for parameter in group["params"]:
                parameter.grad = None


def of_the_package(name: str) -> Callable[[list[dict[str, Any]], Optimizer], Any]:
    def make(groups: list[dict[str, Any]], config: Optimizer) -> Any:
        from bitsandbytes import optim as bnb
        from torchao import optim as torchao

        classes = {"adamw8bit": torchao.AdamW8bit, "adamw4bit": torchao.AdamW4bit, "adamw-fp8": torchao.AdamWFp8}
        classes |= {"bitsandbytes": bnb.AdamW8bit, "adafactor": torch.optim.Adafactor}
        if name == "galore":
            return PlainGaLore(groups, config.lr, **config.options)
        return classes[name](groups, lr=config.lr)

    return make


def in_one_process(name: str, shares: int = 1) -> Curve:
    """A plain loop around the package's class (or the paper's algorithm). shares: of a batch, whose gradients are
    added: the first of two has each other sample, as the first of two ranks does."""
    work, config = workload("wide"), OPTIMIZERS[name]
    model = work.build_model()
    matrices, vectors = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = of_the_package(name)(groups, config)
    order, curve = GlobalOrder(SAMPLES, BATCH, seed=1), Curve([], [], {}, {})
    for step in range(STEPS):
        indices = order.batch(step)[1]
        batches = [work.collate([work.train.load(int(i), 0) for i in indices[n::shares]]) for n in range(shares)]
        count = sum((batch["labels"] != IGNORED).sum() for batch in batches)
        loss = 0.0
        for batch in batches:
            logits = model(batch["features"])
            own = F.cross_entropy(logits, batch["labels"], ignore_index=IGNORED, reduction="sum") / count
            own.backward()
            loss += own.item()
        curve.norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
        optimizer.zero_grad()
        curve.losses.append(loss)
    curve.weights = model.state_dict()
    return curve


ROUNDING = {"adafactor": 1e-5, "galore": 1e-3}  # where codes turn over at a border: 1e-4


@pytest.fixture(scope="module")
def curves(ranks: Pools) -> dict[str, Curve]:
    """Of every case, in one go."""
    return {case.name: curve for case, curve in zip(ON_RANKS, ranks(2).run(run_cases, ON_RANKS)[0], strict=True)}


def shares_of(case: Case) -> int:
    """Returns how a plain loop cuts the batch: as the ranks do for codes of eight bits, which turn over by the order in
    which gradients are added, on some processors by more than is allowed."""
    return case.world if case.optimizer == "adamw-fp8" else 1


@pytest.mark.long
@pytest.mark.parametrize("case", ON_RANKS, ids=lambda case: case.name)
def test_two_ranks_train_as_one_process_of_the_package(case: Case, curves: dict[str, Curve]) -> None:
    ours, theirs = curves[case.name], in_one_process(case.optimizer, shares_of(case))
    near = ROUNDING.get(case.optimizer, 1e-4)
    assert ours.losses[-1] < 0.5 * ours.losses[0]
    assert largest(ours.losses, theirs.losses) < near
    assert largest(ours.norms, theirs.norms) < near


@pytest.mark.slow
def test_hybrid_shards_train_as_one_process_and_resume_to_the_same_bits(ranks: Pools, tmp_path: Path) -> None:
    for case, ours in zip(HYBRID, ranks(4).run(run_cases, HYBRID)[0], strict=True):
        assert largest(ours.losses, in_one_process(case.optimizer, shares_of(case)).losses) < 1e-4
    assert ranks(4).run(resumed_alike, HYBRID, tmp_path)[0] == [True] * len(HYBRID)


def on_a_mesh(degrees: dict[str, Any], optimizer: str, folder: Path) -> tuple[list[float], bool]:
    """The losses of one run, and whether a resumed one has the same bits."""
    mesh_cases.OPTIMIZERS[optimizer] = Optimizer(name=optimizer, lr=0.01, options=OPTIMIZERS[optimizer].options)
    case = mesh_cases.MeshCase(degrees, optimizer=optimizer)
    through, resumed = mesh_promises.interrupted(case, folder)
    return mesh_cases.run_case(case).losses, all(torch.equal(through[name], resumed[name]) for name in through)


@pytest.mark.parametrize("optimizer", [pytest.param("adafactor", marks=pytest.mark.slow), "galore"])
def test_a_mesh_whose_ranks_hold_whole_matrices_trains_as_one_process(
    ranks: Pools, optimizer: str, tmp_path: Path
) -> None:
    [(whole, _)] = ranks(1).run(on_a_mesh, {"name": "single"}, optimizer, tmp_path)
    for degrees in ({"dp": 2}, {"pp": 2}):
        losses, same_bits = ranks(2).run(on_a_mesh, degrees, optimizer, tmp_path)[0]
        assert losses == pytest.approx(whole, rel=1e-3)
        assert same_bits


# --- saving and going on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adafactor", "galore", "adamw4bit", "adamw-fp8"])
def test_a_resumed_run_of_one_process_has_the_same_bits(optimizer: str, tmp_path: Path) -> None:
    through, resumed = promises.interrupted(Case("single", 1, model="wide", optimizer=optimizer), tmp_path)
    assert through
    assert all(torch.equal(through[name], resumed[name]) for name in through)


def resumed_alike(cases: Sequence[Case], folder: Path) -> list[bool]:
    """Returns whether all weights of a resumed run are those of the uninterrupted one, by case."""
    found = []
    for case in cases:
        through, resumed = promises.interrupted(case, folder)
        found.append(all(torch.equal(through[name], resumed[name]) for name in through))
    return found


@pytest.mark.long
def test_resumed_runs_of_two_ranks_have_the_same_bits(ranks: Pools, tmp_path: Path) -> None:
    in_bf16 = [replace(case, precision="bf16") for case in (*WHOLE, *SHARDED_UPDATE)]
    uneven = [Case("fsdp", 2, model="uneven", optimizer=name) for name in ("adamw4bit", "adamw-fp8")]
    cases = [*ON_RANKS, *in_bf16, *uneven]
    alike = ranks(2).run(resumed_alike, cases, tmp_path)[0]
    assert [case.name for case, same in zip(cases, alike, strict=True) if not same] == []


@pytest.mark.parametrize("optimizer", ["adafactor", "galore"])
def test_a_checkpoint_holds_plain_tensors_and_is_saved_again_as_it_was(optimizer: str) -> None:
    work, case = workload("wide"), Case("single", 1, model="wide", optimizer=optimizer)
    engine, again = promises.engine_of(case, work), promises.engine_of(case, work)
    promises.steps(engine, work, range(4))
    state = engine.state_dict()
    tensors, tree = split(state["optimizer"])
    assert {type(tensor) for tensor in tensors.values()} == {Tensor}
    loaded = join({key: tensor.clone() for key, tensor in tensors.items()}, json.loads(json.dumps(tree)))
    again.load_state_dict({**state, "optimizer": loaded})
    assert bytes_of(again) == bytes_of(engine)
    kept, _ = split(again.state_dict()["optimizer"])
    assert kept.keys() == tensors.keys()
    assert all(torch.equal(kept[key], tensors[key]) for key in tensors)


def bytes_of(engine: Any) -> int:
    assert isinstance(engine, AutogradEngine)
    assert engine._optimizer is not None
    return sum(tensor.nbytes for tensor in optimizer_tensors(engine._optimizer))


# --- what is refused -------------------------------------------------------------------------------------------------


def sharded_step() -> str:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (2,)))
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        torch.optim.Adafactor(model.parameters()).step()
    return str(caught.value)


def test_torchs_adafactor_still_stops_at_a_sharded_matrix(ranks: Pools) -> None:
    """When this fails, torch has mended it: see whether it equals one process, and let fsdp have it."""
    for reported in ranks(2).run(sharded_step):
        assert "in-place operations that require placement changes are not supported" in reported
