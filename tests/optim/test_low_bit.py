"""Quantised moments: what they save, that they train and resume on every engine, and where they are refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain.checkpoint.directory import load
from drivetrain.checkpoint.saving import save
from drivetrain.checkpoint.state import join, split
from drivetrain.config.training import Optimizer
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.autograd import AutogradEngine
from drivetrain.engines.state import load_optimizer_state, optimizer_state, optimizer_tensors
from drivetrain.errors import UserError
from drivetrain.optim import optimizers
from drivetrain.optim.optimizers import optimizer_factory
from tests import tiny_workload
from tests.parity import promises
from tests.parity.cases import Case, workload
from tests.ranks import RankPool

pytest.importorskip("torchao")
pytest.importorskip("bitsandbytes")
Pools = Callable[[int], RankPool]
SINGLE = Case("single", 1, model="wide", optimizer="adamw8bit")
ON_RANKS = [
    Case("ddp", 2, model="wide", optimizer="adamw8bit"),
    Case("ddp", 2, model="wide", optimizer="adamw8bit", options={"shard_optimizer": True}),
    Case("ddp", 2, model="wide", optimizer="bitsandbytes"),
    Case("ddp", 2, model="wide", optimizer="bitsandbytes", options={"shard_optimizer": True}, precision="bf16"),
    Case("fsdp", 2, model="wide", optimizer="adamw8bit"),
    Case("fsdp", 2, model="uneven", optimizer="adamw8bit"),
    Case("fsdp", 2, model="wide", optimizer="adamw8bit", precision="bf16"),
    Case("accelerate", 2, model="wide", optimizer="adamw8bit", options={"driver": "fsdp"}),
]


def trained(case: Case) -> AutogradEngine:
    """After four steps."""
    work = workload(case.model)
    engine = promises.engine_of(case, work)
    promises.steps(engine, work, range(4))
    assert isinstance(engine, AutogradEngine)
    return engine


def optimizer_of(engine: AutogradEngine) -> torch.optim.Optimizer:
    assert engine._optimizer is not None
    return engine._optimizer


def bytes_of(engine: AutogradEngine) -> int:
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in optimizer_tensors(optimizer_of(engine))
    }
    return sum(storages.values())


# --- what it saves, what it costs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw8bit", "bitsandbytes"])
def test_moments_take_a_quarter_of_the_memory_and_the_curve_stays_close(optimizer: str) -> None:
    whole, low = (replace(SINGLE, optimizer=name) for name in ("adamw", optimizer))
    assert bytes_of(trained(low)) < 0.33 * bytes_of(trained(whole)), "vectors and small matrices keep theirs"
    curves = []
    for case in (whole, low):
        work = workload(case.model)
        curves.append(promises.steps(promises.engine_of(case, work), work, range(12)))
    assert curves[1] == pytest.approx(curves[0], rel=0.02)
    assert curves[1] != pytest.approx(curves[0], rel=1e-6), "they really are quantised"


def test_moments_that_are_small_or_that_blocks_do_not_fill_stay_whole() -> None:
    engine = trained(replace(SINGLE, model="uneven"))
    sizes = {p.shape: s["exp_avg"] for p, s in optimizer_of(engine).state.items()}
    quantised = {tuple(shape) for shape, moment in sizes.items() if type(moment) is not Tensor}
    assert quantised == {(33, 256)}, "129 x 128 is 64.5 blocks"


# --- saving and going on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer", ["adamw8bit", "bitsandbytes", "torchao.optim:AdamW4bit", "torchao.optim:AdamWFp8"]
)
def test_a_resumed_run_of_one_process_has_the_same_bits(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ":" in optimizer:
        from tests.parity.cases import OPTIMIZERS

        monkeypatch.setitem(OPTIMIZERS, optimizer, Optimizer(name=optimizer, lr=0.01))
    through, resumed = promises.interrupted(replace(SINGLE, optimizer=optimizer), tmp_path)
    assert all(torch.equal(through[name], resumed[name]) for name in through)


@pytest.mark.parametrize("case", ON_RANKS, ids=lambda case: case.name)
def test_a_resumed_run_has_the_same_bits(ranks: Pools, case: Case, tmp_path: Path) -> None:
    through, resumed = ranks(2).run(promises.interrupted, case, tmp_path)[0]
    assert through
    assert all(torch.equal(through[name], resumed[name]) for name in through)


def test_what_one_engine_saved_another_goes_on_from(ranks: Pools, tmp_path: Path) -> None:
    """Blocks that shards cut come as the numbers they stand for, and stay so."""
    one, fsdp = replace(SINGLE, model="uneven"), Case("fsdp", 2, model="uneven", optimizer="adamw8bit")
    expected = promises.saved_after(one, tmp_path / "of one")
    assert ranks(2).run(promises.gone_on, fsdp, tmp_path / "of one")[0] == pytest.approx(expected, rel=1e-4)
    assert ranks(2).run(promises.saved_after, fsdp, tmp_path / "of two")[0] == pytest.approx(expected, rel=1e-3)
    assert promises.gone_on(one, tmp_path / "of two") == pytest.approx(expected, rel=1e-3)


def shard_kinds(case: Case) -> dict[str, str]:
    """Weight → the type that this rank keeps its moment in."""
    optimizer, model = optimizer_of(engine := trained(case)), engine._model
    moments = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
    return {name: type(moment.to_local()).__name__ for name, moment in moments.items()}


def test_ranks_agree_on_which_moments_they_quantise(ranks: Pools) -> None:
    first, second = ranks(2).run(shard_kinds, Case("fsdp", 2, model="uneven", optimizer="adamw8bit"))
    assert first == second
    assert {name for name, kind in first.items() if kind == "OptimState8bit"} == {"1.weight"}


@pytest.mark.parametrize("optimizer", ["adamw8bit", "bitsandbytes"])
def test_a_checkpoint_holds_plain_tensors_and_codes_as_they_are(optimizer: str) -> None:
    engine = trained(replace(SINGLE, optimizer=optimizer))
    state = engine.state_dict()["optimizer"]
    tensors, tree = split(state)
    assert {type(tensor) for tensor in tensors.values()} == {Tensor}
    loaded = join({key: tensor.clone() for key, tensor in tensors.items()}, json.loads(json.dumps(tree)))
    moments = loaded["state"]["1.0.linear.weight"]
    codes = moments["exp_avg"]["codes"] if optimizer == "adamw8bit" else moments["state1"]
    assert codes.dtype == torch.uint8
    assert codes.shape == (128, 128)
    again = promises.engine_of(replace(SINGLE, optimizer=optimizer), workload("wide"))
    again.load_state_dict({**engine.state_dict(), "optimizer": loaded})
    kept, _ = split(again.state_dict()["optimizer"])
    assert kept.keys() == tensors.keys()
    assert all(torch.equal(kept[key], tensors[key]) for key in tensors)


def resumed_bytes(case: Case, folder: Path) -> tuple[int, int]:
    """Returns what the optimizer of this rank holds before saving, and after loading and a step; all that it can
    reach."""
    work, before = workload(case.model), trained(case)
    saved = save(folder, 4, before.state_dict(), {}, communicator=Communicator())
    after = promises.engine_of(case, work)
    after.load_state_dict(load(saved))
    promises.steps(after, work, range(4, 5))
    assert isinstance(after, AutogradEngine)
    outer = sum(t.nbytes for s in optimizer_of(after).state.values() for t in s.values() if isinstance(t, Tensor))
    return bytes_of(before), bytes_of(after) + outer


def test_a_resumed_shard_of_the_optimizer_is_kept_once(ranks: Pools, tmp_path: Path) -> None:
    case = Case("ddp", 2, model="wide", optimizer="bitsandbytes", options={"shard_optimizer": True})
    for before, after in ranks(2).run(resumed_bytes, case, tmp_path):
        assert after == before


def test_pages_become_pages_again() -> None:
    model = nn.Linear(128, 128, bias=False)
    codes = torch.arange(128 * 128).view(128, 128).to(torch.uint8)

    class Paged(torch.optim.SGD):
        is_paged = True

        def get_state_buffer(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
            buffer = torch.zeros(parameter.shape, dtype=dtype)
            buffer.is_page = True  # type: ignore[attr-defined]
            return buffer

    optimizer = Paged(model.parameters(), lr=0.1)
    state = {"state": {"weight": {"state1": codes, "absmax1": torch.ones(64)}}}
    load_optimizer_state(model, optimizer, {**state, "param_groups": [{"params": ["weight"], "lr": 0.1}]})
    held = optimizer.state[model.weight]
    assert held["state1"].is_page
    assert torch.equal(held["state1"], codes)
    assert not hasattr(held["absmax1"], "is_page")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="bitsandbytes pages between a GPU and main memory")
def test_a_paged_optimizer_resumes_to_the_same_bits_on_a_gpu() -> None:
    def model() -> nn.Linear:
        return nn.Linear(1024, 1024, bias=False, device="cuda")

    def steps(of: nn.Linear, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            of.weight.grad = torch.randn(of.weight.shape, generator=torch.Generator().manual_seed(number)).cuda()
            optimizer.step()

    build = optimizer_factory(Optimizer(name="bnb-paged-adamw8bit"))
    through, resumed = model(), model()
    first, second = build(through), build(resumed)
    steps(through, first, range(3))
    resumed.load_state_dict(through.state_dict())
    load_optimizer_state(resumed, second, optimizer_state(through, first, lambda tensor: tensor.clone()))
    assert second.state[resumed.weight]["state1"].is_paged
    for of, optimizer in ((through, first), (resumed, second)):
        steps(of, optimizer, range(3, 6))
    assert torch.equal(through.weight, resumed.weight)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_bitsandbytes_is_refused_where_parameters_are_sharded(ranks: Pools) -> None:
    case = Case("fsdp", 2, model="wide", optimizer="bitsandbytes")
    for words in ranks(2).run(refusal, case):
        assert words.startswith("optimizer.name: AdamW8bit of bitsandbytes updates whole tensors")


def refusal(case: Case) -> str:
    with pytest.raises(UserError) as caught:
        promises.engine_of(case, workload(case.model))
    return str(caught.value)


@pytest.mark.parametrize("optimizer", ["adamw8bit", "bitsandbytes"])
def test_deepspeeds_partitions_are_refused_before_anything_is_updated(ranks: Pools, optimizer: str) -> None:
    pytest.importorskip("deepspeed")
    for words in ranks(2).run(
        first_step, Case("deepspeed", 2, model="wide", optimizer=optimizer, options={"stage": 1})
    ):
        assert "optimizer.name: this engine updates flat pieces of many parameters" in words


def first_step(case: Case) -> str:
    engine = promises.engine_of(case, work := workload(case.model))
    with pytest.raises(UserError) as caught:
        promises.steps(engine, work, range(1))
    return str(caught.value)


@pytest.mark.parametrize("name", ["adamw8bit", "bitsandbytes.optim:AdamW8bit"])
def test_pieces_in_the_parameters_place_are_refused_in_the_first_step(name: str) -> None:
    model = nn.Linear(64, 64)
    optimizer = optimizer_factory(Optimizer(name=name))(model)
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.zeros(64 * 65))]
    with pytest.raises(UserError, match="flat pieces of many parameters"):
        optimizer.step()


def test_a_package_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "find_spec", lambda _: None)
    extras = {"adamw8bit": "lowbit", "adamw4bit": "lowbit", "bnb-adamw8bit": "bitsandbytes", "galore": "lowrank"}
    for name, extra in extras.items():
        with pytest.raises(UserError, match=rf"{name} is .* not installed\s+pip install 'drivetrain\[{extra}\]'"):
            optimizer_factory(Optimizer(name=name))


def test_betas_and_eps_of_the_run_file_are_read() -> None:
    optimizer = optimizer_factory(Optimizer(name="adamw8bit", betas=(0.8, 0.9), eps=1e-6))(nn.Linear(2, 2))
    assert (optimizer.defaults["betas"], optimizer.defaults["eps"]) == ((0.8, 0.9), 1e-6)
    with pytest.raises(UserError, match="block_sise"):
        optimizer_factory(Optimizer(name="adamw8bit", options={"block_sise": 64}))


@pytest.mark.parametrize("compiles", [False, True])
def test_on_a_cpu_the_update_is_compiled_where_the_model_is(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def as_written(function: Any, **_: Any) -> Any:
        def called(*args: Any) -> Any:
            asked.append(torch._dynamo.eval_frame._stance.stance)
            return function(*args)

        return called

    monkeypatch.setattr(torch, "compile", as_written)
    monkeypatch.setattr(tiny_workload, "optimizer_factory", partial(optimizer_factory, compiles=compiles))
    trained(SINGLE)
    assert set(asked) == {"default" if compiles else "force_eager"}


@pytest.mark.slow
def test_a_compiled_update_resumes_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_workload, "optimizer_factory", partial(optimizer_factory, compiles=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler about torchao's tensors
        through, resumed = promises.interrupted(SINGLE, tmp_path)
    assert all(torch.equal(through[name], resumed[name]) for name in through)
