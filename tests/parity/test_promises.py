"""The other promises, on several ranks: the engine engaged, every sample counts once, exact resume; and that the
parity suite notices what it is there to notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.config.engines import SHORT
from drivetrain.workloads.sample_scores import in_order
from tests.parity import promises
from tests.parity.cases import CLIP, Case, Curve, plain, run_case
from tests.ranks import RankPool

Pools = Callable[[int], RankPool]


def on_ranks(case: Case, pools: Pools, work: Callable[..., object], *args: object) -> list:  # type: ignore[type-arg]
    return [work(case, *args)] if case.engine in {"single", "dp"} else pools(case.world).run(work, case, *args)


def named(engine: str) -> Case:
    """By the short name of a run file, on two devices."""
    block = SHORT.get(engine, {"name": engine})
    options = {key: value for key, value in block.items() if key != "name"}
    return Case(block["name"], 1 if engine == "single" else 2, options=options)


def zero(stage: int, optimizer: str, world: int = 2, precision: str = "fp32", **options: Any) -> Case:
    return Case("deepspeed", world, precision, 1, optimizer, "dropout", {"stage": stage, **options})


# --- the engine engaged ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_engines_show_what_they_did(ranks: Pools, world: int) -> None:
    single = promises.engaged(Case("single", 1, model="blocks"))
    total = single["global_parameters"]
    ddp = ranks(world).run(promises.engaged, Case("ddp", world, model="blocks"))
    assert {e["wrapper"] for e in ddp} == {"DistributedDataParallel"}
    assert {(e["world_size"], e["local_parameters"], e["global_parameters"]) for e in ddp} == {(world, total, total)}
    fsdp = ranks(world).run(promises.engaged, Case("fsdp", world, model="blocks"))
    assert {e["global_parameters"] for e in fsdp} == {total}
    assert sum(e["local_parameters"] for e in fsdp) == total
    assert max(e["local_parameters"] for e in fsdp) < 1.4 * total / world
    dp = promises.engaged(Case("dp", world, model="blocks"))
    assert (dp["wrapper"], dp["emulated"], dp["world_size"]) == ("ThreadReplicas", True, 1)


# --- every sample counts once ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    # 15 makes three batches, the last of them smaller, for two ranks
    "batch_size",
    [15, *(pytest.param(size, marks=pytest.mark.slow) for size in (37, 10, 4))],
)
@pytest.mark.parametrize("engine", ["dp", "ddp", "fsdp", "zero2", "zero3", "accelerate-ddp", "accelerate-fsdp"])
def test_metrics_and_predictions_are_those_of_one_process(ranks: Pools, engine: str, batch_size: int) -> None:
    metrics, rows, scores = promises.evaluated(Case("single", 1), batch_size)
    found = on_ranks(named(engine), ranks, promises.evaluated, batch_size)
    for theirs, _, _ in found:
        assert theirs == pytest.approx(metrics, rel=1e-6)
    kept, alone = in_order([dealt for _, _, dealt in found]), in_order([scores])
    assert kept.keys() == alone.keys() == {"loss", "right", "targets"}
    for name, values in alone.items():
        np.testing.assert_allclose(kept[name], values, rtol=1e-5)
    assert found[0][1] == rows, "in order, on the first rank"
    assert all(not others for _, others, _ in found[1:])


# --- exact resume ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case("dp", 2, model="blocks"),
        Case("ddp", 1, model="blocks"),
        Case("ddp", 2, model="blocks"),
        Case("ddp", 2, model="blocks", optimizer="adamw", options={"shard_optimizer": True}),
        Case("fsdp", 2, model="blocks", optimizer="adamw"),
        pytest.param(Case("ddp", 4, model="blocks", optimizer="adamw"), marks=pytest.mark.slow),
        # its first step exchanges gradients in another way; in sums of two the order makes no difference
        pytest.param(
            Case("ddp", 4, model="blocks", options={"static_graph": True, "bucket_mb": 0.0005}), marks=pytest.mark.slow
        ),
        pytest.param(Case("fsdp", 4, model="blocks"), marks=pytest.mark.slow),
        pytest.param(Case("fsdp", 4, model="blocks", options={"hybrid": 2}), marks=pytest.mark.slow),
        pytest.param(Case("fsdp", 4, model="dropout"), marks=pytest.mark.slow),
        Case("ddp", 2, model="dropout", precision="bf16-mixed"),
        *(zero(stage, "sgd" if stage else "adamw") for stage in (0, 1, 2, 3)),
        pytest.param(zero(1, "adamw", precision="bf16-master"), marks=pytest.mark.slow),
        pytest.param(
            zero(
                2,
                "adamw",
                precision="bf16-mixed",
                config={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            ),
            marks=pytest.mark.slow,
        ),
        zero(3, "adamw", precision="bf16-master"),
        *(Case("accelerate", 2, model="dropout", options={"driver": driver}) for driver in ("ddp", "fsdp", "zero3")),
        *(pytest.param(zero(stage, "adamw", world=4), marks=pytest.mark.slow) for stage in (1, 2, 3)),
    ],
    ids=lambda case: case.name,
)
def test_a_resumed_run_has_the_same_bits(ranks: Pools, case: Case, tmp_path: Path) -> None:
    through, resumed = on_ranks(case, ranks, promises.interrupted, tmp_path)[0]
    assert through.keys() == resumed.keys()
    for name, weight in through.items():
        assert torch.equal(weight, resumed[name]), name


# make test has AdamW's in test_crossing.py, on all engines but Accelerate's first two stages of ZeRO
@pytest.mark.slow
@pytest.mark.parametrize(
    "saved", ["single", "ddp", "fsdp", "zero1", "zero2", "zero3", "accelerate-fsdp", "accelerate-zero2"]
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_what_one_engine_saved_another_goes_on_from(ranks: Pools, saved: str, optimizer: str, tmp_path: Path) -> None:
    def case(engine: str) -> Case:
        return replace(named(engine), model="blocks", optimizer=optimizer)

    expected = on_ranks(case(saved), ranks, promises.saved_after, tmp_path / "state.pt")[0]
    for engine in ("single", "dp", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero3", "accelerate-zero2"):
        found = on_ranks(case(engine), ranks, promises.gone_on, tmp_path / "state.pt")[0]
        assert found == pytest.approx(expected, rel=1e-5), engine


# --- models that not every rank can train alike ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "model", "reported"),
    [
        (
            "fsdp",
            "routed",
            "RunError: first.weight, first.bias, second.weight, second.bias got a gradient",
        ),
        ("ddp", "unused", "UserError: engine.find_unused: idle.weight, idle.bias got no gradient"),
        ("fsdp", "unused", "trained"),
        ("fsdp", "scaled", "UserError: engine: fsdp cannot shard parameters without a dimension: temperature"),
        ("ddp", "scaled", "trained"),
        ("zero2", "unused", "trained; idle.weight, idle.bias got no gradient in the first step"),
        ("zero3", "unused", "trained; idle.weight, idle.bias got no gradient in the first step"),
    ],
)
def test_what_an_engine_cannot_train_is_reported_and_never_trained_wrongly(
    ranks: Pools, engine: str, model: str, reported: str
) -> None:
    first, second = ranks(2).run(promises.odd, replace(named(engine), model=model))
    assert first.startswith(reported)
    assert second.startswith(reported.partition(";")[0]), "what is only a warning is reported once"


def test_ddp_trains_routed_models_if_asked_to_look_for_unused_parameters(ranks: Pools) -> None:
    case = Case("ddp", 2, model="routed", options={"find_unused": True})
    assert ranks(2).run(promises.odd, case) == ["trained", "trained"]


def test_compressed_gradients_keep_the_curve_within_their_rounding(ranks: Pools) -> None:
    case = Case("ddp", 2, accumulation=3, optimizer="adamw", options={"gradient_compression": "fp16"})
    found, expected = ranks(2).run(run_case, case)[0], plain(case)
    assert found.losses == pytest.approx(expected.losses, rel=1e-2)
    assert found.norms == pytest.approx(expected.norms, rel=1e-2)
    assert found.norms != pytest.approx(expected.norms, rel=1e-5), "they really are compressed"


# --- overflow --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "engine", ["dp", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero3", "accelerate-ddp", "accelerate-zero2"]
)
def test_an_overflow_on_one_rank_is_skipped_by_all(ranks: Pools, engine: str) -> None:
    for reported in on_ranks(named(engine), ranks, promises.overflowing):
        assert [skipped for skipped, _ in reported] == [False, True, False, False]
        assert [scale for _, scale in reported] == [128.0, 128.0, 64.0, 64.0]


# --- the suite notices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "engine",
    [
        "fsdp",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero1", "zero2", "zero3", "accelerate-ddp")),
    ],
)
def test_mutations_of_the_engine_break_the_curve(ranks: Pools, engine: str) -> None:
    def differs(curve: Curve, expected: Curve) -> bool:
        return curve.losses != pytest.approx(expected.losses, rel=1e-2) or curve.norms != pytest.approx(
            expected.norms, rel=1e-2
        )

    case = replace(named(engine), precision="fp16-mixed", accumulation=3)
    expected = plain(case)
    assert max(expected.norms) > CLIP
    found = ranks(2).run(promises.mutated, case)[0]
    noticed = {name for name, curve in found.items() if differs(curve, expected)}
    assert noticed == set(promises.MUTATIONS) - {"nothing wrong"}
