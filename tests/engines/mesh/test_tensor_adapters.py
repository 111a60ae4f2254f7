"""Adapters on a mesh beside their curves (tests/parity/test_adapters.py): what is saved, dropped, and refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from drivetrain.checkpoint.directory import load
from drivetrain.checkpoint.saving import save
from drivetrain.config.adapter import Adapter, rate_factors
from drivetrain.config.quantised import QuantisedBase
from drivetrain.data.loader import MicroBatch
from drivetrain.distributed.communicator import Communicator
from drivetrain.engines.base import Engine
from drivetrain.engines.mesh import tensor_adapters
from drivetrain.errors import UserError
from drivetrain.models.adapters import AdapterSet
from drivetrain.optim.optimizers import optimizer_factory
from drivetrain.workloads.base import Workload, few
from tests.parity.mesh_cases import TARGETS, MeshCase, _workload, engine_of
from tests.parity.mesh_promises import steps
from tests.ranks import RankPool

Pools = Callable[[int], RankPool]
SINGLE: dict[str, Any] = {"name": "single"}
AXES: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2}, {"dp": 2, "shard": True}]


def adapted(block: Mapping[str, Any], base: QuantisedBase | None = None, model: str = "sft-padded") -> Workload:
    work = _workload(MeshCase(SINGLE, model=model))
    work.adapters = AdapterSet([Adapter.model_validate({"rank": 4, **block})], None, base)
    return work


def set_up(degrees: Mapping[str, Any], work: Workload, **options: Any) -> Any:
    return engine_of(MeshCase(dict(degrees), **options), work)


# --- what is saved ---------------------------------------------------------------------------------------------------


def trained(degrees: Mapping[str, Any], folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps with LoRA+ and a save; the losses of three more, and the weights as they were saved."""
    work = adapted({"lr_ratio": 4})
    engine = plus(degrees, work)
    steps(engine, work, range(3))
    save(folder / name(degrees), 3, engine.state_dict(), {}, communicator=Communicator())
    weights = {key: weight.clone() for key, weight in engine.weights().items()}
    if weights:
        (folder / name(degrees) / "peft").mkdir()
        engine.save_assets(folder / name(degrees) / "peft", weights)
    return steps(engine, work, range(3, 6)), weights


def plus(degrees: Mapping[str, Any], work: Workload) -> Engine:
    """With another rate for B."""
    factor = rate_factors([Adapter(lr_ratio=4)])
    with mock.patch(
        "tests.tiny_workload.optimizer_factory", lambda config: optimizer_factory(config, rate_factor=factor)
    ):
        return set_up(degrees, work, optimizer="adamw")


def gone_on(degrees: Mapping[str, Any], folder: Path, others: list[dict[str, Any]]) -> dict[str, list[float]]:
    found = {}
    for other in others:
        work = adapted({"lr_ratio": 4})
        engine = plus(degrees, work)
        engine.load_state_dict(load(folder / name(other) / "step-00000003"))
        found[name(other)] = steps(engine, work, range(3, 6))
    return found


def name(degrees: Mapping[str, Any]) -> str:
    return "-".join(f"{key}{value}" for key, value in degrees.items())


def on_each(work: Callable[..., Any], every: list[dict[str, Any]], *args: Any) -> dict[str, list[Any]]:
    return {name(degrees): work(degrees, *args) for degrees in every}


@pytest.mark.long
def test_what_one_mesh_saved_of_adapters_others_and_one_process_go_on_from(ranks: Pools, tmp_path: Path) -> None:
    losses, weights = trained(SINGLE, tmp_path)
    [found, _] = ranks(2).run(on_each, trained, AXES, tmp_path)
    assert all(".lora_" in key for key in weights)
    for degrees in AXES:
        theirs, own = found[name(degrees)]
        assert theirs == pytest.approx(losses, rel=1e-5)
        assert list(own) == list(weights)
        torch.testing.assert_close(own, weights, rtol=1e-4, atol=1e-6)
    on_meshes = ranks(2).run(on_each, gone_on, AXES, tmp_path, [SINGLE])[0]
    for of_engine in [gone_on(SINGLE, tmp_path, AXES), *on_meshes.values()]:
        for resumed in of_engine.values():
            assert resumed == pytest.approx(losses, rel=1e-5)
    for degrees in AXES:
        loads_into_peft(tmp_path / name(degrees) / "peft", weights)


def loads_into_peft(folder: Path, weights: Mapping[str, Tensor]) -> None:
    plain: Any = _workload(MeshCase(SINGLE, model="sft-padded")).build_model()
    theirs = peft.PeftModel.from_pretrained(plain, str(folder))
    state = theirs.state_dict()
    for key, weight in weights.items():
        torch.testing.assert_close(state[f"base_model.model.{key}"], weight, rtol=1e-4, atol=1e-6)


# --- what a rank holds -----------------------------------------------------------------------------------------------


def held(degrees: Mapping[str, Any], model: str) -> dict[str, int]:
    engine = set_up(degrees, adapted({}, QuantisedBase(format="nf4"), model))
    words = engine.engaged()
    sizes = engine.measured()["held_bytes"]
    return {"local": words.local_parameters, "global": words.global_parameters, "trained": sizes["trained"], **sizes}


def test_tensor_ranks_share_codes_and_adapters(ranks: Pools) -> None:
    model = "sft-padded-wide"
    whole, [mine, theirs] = held(SINGLE, model), ranks(2).run(held, {"tp": 2}, model)
    assert mine == theirs
    assert mine["global"] == whole["global"]
    linear = 4 * (4 * 128 * 128 + 3 * 128 * 256)  # weights of four blocks
    others = 2 * 260 * 128 // 2  # embedding and head, in fp32, of which each rank has half
    assert whole["frozen"] - mine["frozen"] == pytest.approx((linear * 0.516 / 2) + 4 * others, rel=0.01)
    copies = 4 * 4 * (5 * 128 + 2 * 128)  # numbers of A where the inputs are whole, of B where the outputs are
    assert mine["trained"] == (whole["trained"] - 4 * copies) // 2 + 4 * copies


# --- dropout ---------------------------------------------------------------------------------------------------------


def drawn(recompute: Any) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
    """Returns where adapters dropped what, each time that they ran, and their weights after some steps."""
    work = adapted({"dropout": 0.5})
    engine = set_up({"tp": 2}, work, recompute=recompute)
    masks: dict[str, list[Tensor]] = {}
    hooks = [
        module.register_forward_hook(
            lambda _m, args, out, key=key: masks.setdefault(key, []).append((out == 0) & (args[0] != 0))
        )
        for key, module in engine._model.named_modules()
        if isinstance(module, nn.Dropout)
    ]
    torch.manual_seed(3)
    engine.forward_backward([MicroBatch(few(work))])
    for hook in hooks:
        hook.remove()
    engine.optimizer_step(1.0)
    steps(engine, work, range(3))
    return masks, {key: p.detach().clone() for key, p in engine._held.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_adapters_drop_the_same_of_copies_and_other_parts_of_what_is_shared_out(ranks: Pools, recompute: bool) -> None:
    (first, weights), (second, others) = ranks(2).run(drawn, recompute)
    assert len(first) == 4 * len(TARGETS)
    for key, masks in first.items():
        same = "o_proj" not in key and "down_proj" not in key
        for mine, theirs in zip(masks, second[key], strict=True):
            assert mine.any()
            assert torch.equal(mine, theirs) == same, key
        assert all(torch.equal(mask, masks[0]) for mask in masks), "drawn again by recompute"
    for key, weight in weights.items():
        rowwise = "o_proj" in key or "down_proj" in key
        if rowwise == ("lora_B" in key):
            assert torch.equal(weight, others[key]), key


# --- what the trial notices ------------------------------------------------------------------------------------------


@contextmanager
def summed_twice() -> Iterator[None]:
    """B of a rowwise layer, added to each rank's part."""

    def rowwise(self: Any, down: nn.Module, up: nn.Module, mesh: Any) -> None:
        given(self, down, up, mesh)
        up.register_forward_hook(lambda _m, _a, y: y * dist.get_world_size())

    given = tensor_adapters._Lora._rowwise
    with mock.patch.object(tensor_adapters._Lora, "_rowwise", rowwise):
        yield


@contextmanager
def another_share() -> Iterator[None]:
    """B of colwise layers, split as if the ranks were in another order."""
    whole = parallelize_module

    def swapped(module: Any, mesh: Any, style: Any) -> Any:
        if isinstance(module, nn.Linear) and isinstance(style, ColwiseParallel) and module.in_features == 4:
            module.weight.data = module.weight.data.roll(module.out_features // 2, 0)
        return whole(module, mesh, style)

    with mock.patch.object(tensor_adapters, "parallelize_module", swapped):
        yield


WRONG: dict[str, Callable[[], Any]] = {"summed twice": summed_twice, "another share": another_share}


def reported(attempts: Mapping[str, tuple[dict[str, Any], dict[str, Any], str | None]]) -> dict[str, str]:
    """attempts: name → degrees, adapter, format of the base. What set-up says to each."""
    found = {}
    for key, (degrees, block, form) in attempts.items():
        base = None if form is None else QuantisedBase.model_validate({"format": form})
        try:
            with WRONG.get(key, nullcontext)():
                set_up(degrees, adapted(block, base))
            found[key] = "engaged"
        except UserError as error:
            found[key] = str(error)
    return found


TP: dict[str, Any] = {"tp": 2}
ATTEMPTS: dict[str, tuple[dict[str, Any], dict[str, Any], str | None, str]] = {
    "summed twice": (TP, {}, None, "engine.tp: the loss of the model spread over tp=2"),
    "another share": (TP, {}, None, "engine.tp: the loss of the model spread over tp=2"),
    "dora": (TP, {"dora": True}, None, "engine.tp: Dora computes with whole weights"),
    "blocks cut": (TP, {}, "nf4", "o_proj cannot be split over tp (2): each 64 weights have one scale, and 16 lie"),
    "sequences of an embedding": (
        {"tp": 2, "sequence_parallel": True},
        {"targets": ["embed_tokens", "q_proj"]},
        None,
        "engine.sequence_parallel: model.embed_tokens has an adapter",
    ),
    "dropout of sequences": (
        {"tp": 2, "sequence_parallel": True},
        {"dropout": 0.1},
        None,
        "engine.sequence_parallel: with sequence_parallel each rank draws for itself",
    ),
    "an embedding": (TP, {"targets": ["embed_tokens", "lm_head"]}, None, "engaged"),
    "virtual tokens": ({"pp": 2}, {"method": "prefix", "virtual_tokens": 2}, None, "virtual tokens are put before"),
}


def test_what_adapters_would_compute_in_another_way_is_refused_on_all_ranks(ranks: Pools) -> None:
    given = {key: attempt[:3] for key, attempt in ATTEMPTS.items()}
    for of_rank in ranks(2).run(reported, given):
        for key, words in of_rank.items():
            assert ATTEMPTS[key][3] in words, key
