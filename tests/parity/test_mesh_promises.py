"""The other promises on a mesh: the engine engaged, every sample counts once, exact resume, states that cross engines,
overflows skipped by all; and that the parity suite notices what it is there to notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.workloads.sample_scores import in_order
from tests.parity import mesh_promises as promises
from tests.parity.mesh_cases import MeshCase, plain
from tests.ranks import RankPool

Pools = Callable[[int], RankPool]
SINGLE = MeshCase({"name": "single"})
ON_FOUR = [{"pp": 2, "tp": 2}, {"dp": 2, "tp": 2, "shard": True}, {"pp": 2, "dp": 2, "shard": True}, {"dp": 2, "cp": 2}]


def meshes(*degrees: dict[str, Any], **options: Any) -> list[Any]:
    """Cases on two ranks, and slow ones on more."""
    cases = [MeshCase(given, **options) for given in [*degrees, *ON_FOUR]]
    return [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.world > 2 else []) for c in cases]


def on_ranks(case: MeshCase, pools: Pools, work: Callable[..., Any], *args: Any) -> list[Any]:
    return [work(case, *args)] if case.world == 1 else pools(case.world).run(work, case, *args)


# --- the engine engaged ----------------------------------------------------------------------------------------------


def test_each_degree_divides_what_a_rank_holds(ranks: Pools) -> None:
    total = promises.engaged(SINGLE)["global_parameters"]

    def held(**degrees: Any) -> list[int]:
        found = ranks(2).run(promises.engaged, MeshCase(degrees))
        assert {e["global_parameters"] for e in found} == {total}
        return [e["local_parameters"] for e in found]

    assert held(dp=2) == held(cp=2) == [total, total]
    assert sum(held(pp=2)) == sum(held(dp=2, shard=True)) == sum(held(cp=2, shard=True)) == total
    norms = 9 * 32  # nine vectors of 32, which are not split
    assert held(tp=2) == [(total - norms) // 2 + norms] * 2


# --- every sample counts once ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", meshes({"pp": 2}, {"tp": 2}, {"cp": 2}, {"dp": 2}, {"dp": 2, "shard": True}))
def test_metrics_and_predictions_are_those_of_one_process(ranks: Pools, case: MeshCase) -> None:
    metrics, rows, scores = promises.evaluated(SINGLE, 2)
    found = on_ranks(case, ranks, promises.evaluated, 2)
    for theirs, _, _ in found:
        assert theirs == pytest.approx(metrics, rel=1e-5)
    kept = in_order([dealt for _, _, dealt in found])
    if case.degrees.get("cp", 1) == 1:
        np.testing.assert_allclose(kept["loss"], in_order([scores])["loss"], rtol=1e-5)
    else:
        assert not kept, "no rank has a whole sample"
    assert [row["tokens"] for row in found[0][1]] == [row["tokens"] for row in rows]
    assert [row["loss"] for row in found[0][1]] == pytest.approx([row["loss"] for row in rows], rel=1e-5)
    assert all(not others for _, others, _ in found[1:])


@pytest.mark.parametrize("case", meshes({"dp": 2}))
def test_batches_that_do_not_come_out_even_over_the_ranks_count_once(ranks: Pools, case: MeshCase) -> None:
    """One rank repeats a batch, to run as many as the other: the loss would be another if it counted."""
    metrics, rows, _ = promises.evaluated(SINGLE, 1)
    assert len(rows) % 2
    for theirs, _, _ in on_ranks(case, ranks, promises.evaluated, 1):
        assert theirs == pytest.approx(metrics, rel=1e-5)


# --- exact resume ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    meshes({"pp": 2}, {"tp": 2}, {"cp": 2}, {"dp": 2, "shard": True}, optimizer="adamw", model="dropout"),
)
def test_a_resumed_run_has_the_same_bits(ranks: Pools, case: MeshCase, tmp_path: Path) -> None:
    through, resumed = on_ranks(case, ranks, promises.interrupted, tmp_path)[0]
    assert through.keys() == resumed.keys()
    for name, weight in through.items():
        assert torch.equal(weight, resumed[name]), name


@pytest.mark.slow  # test_crossing.py has each axis with a few others
@pytest.mark.parametrize(
    "saved",
    [
        SINGLE,
        MeshCase({"pp": 2}),
        MeshCase({"tp": 2}),
        MeshCase({"dp": 2, "shard": True}),
        MeshCase({"name": "fsdp"}),
        MeshCase({"pp": 2, "tp": 2}),
        MeshCase({"dp": 2, "tp": 2, "shard": True}),
    ],
    ids=lambda case: case.name,
)
def test_what_one_engine_saved_another_goes_on_from(ranks: Pools, saved: MeshCase, tmp_path: Path) -> None:
    def case(degrees: dict[str, Any]) -> MeshCase:
        return MeshCase(degrees, optimizer="adamw")

    expected = on_ranks(case(saved.degrees), ranks, promises.saved_after, tmp_path / "state.pt")[0]
    others: list[dict[str, Any]] = [
        {"name": "single"},
        {"pp": 2},
        {"tp": 2},
        {"dp": 2, "shard": True},
        {"name": "fsdp"},
    ]
    for degrees in others + (ON_FOUR if saved.world > 2 else []):
        found = on_ranks(case(degrees), ranks, promises.gone_on, tmp_path / "state.pt")[0]
        assert found == pytest.approx(expected, rel=1e-5), degrees


@pytest.mark.parametrize("saved", [{"name": "single"}, {"dp": 2}, {"tp": 2}], ids=str)
def test_tensor_ranks_draw_the_same_after_any_resume_and_data_ranks_do_not(
    ranks: Pools, saved: dict[str, Any], tmp_path: Path
) -> None:
    on_ranks(MeshCase(saved), ranks, promises.drawn, tmp_path, False)
    (first, reported), (second, _) = ranks(2).run(promises.drawn, MeshCase({"tp": 2}), tmp_path, True)
    assert first == second
    assert any("other masks" in message for message in reported) == (saved != {"tp": 2})
    first, second = (drawn for drawn, _ in ranks(2).run(promises.drawn, MeshCase({"dp": 2}), tmp_path, True))
    assert first != second


# --- overflow --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("degrees", [{"pp": 2}, {"tp": 2}, {"dp": 2, "shard": True}, {"cp": 2}], ids=str)
def test_an_overflow_on_one_stage_or_rank_is_skipped_by_all(ranks: Pools, degrees: dict[str, Any], bad: int) -> None:
    for reported in ranks(2).run(promises.overflowing, MeshCase(degrees, "fp16-mixed"), bad):
        assert [skipped for skipped, _, _ in reported] == [False, True, False, False]
        assert [scale for _, scale, _ in reported] == [128.0, 128.0, 64.0, 64.0]
        sums = [total for _, _, total in reported]
        assert sums[1] == sums[0] != sums[2], "weights and momentum stay as they were"


# --- the suite notices -----------------------------------------------------------------------------------------------


EVERYWHERE = {"halved on one rank", "a micro-batch lost"}
OF_COPIES = {"copies not reported apart", "losses reported by all"}


@pytest.mark.parametrize(
    ("degrees", "seen"),
    [
        pytest.param({"pp": 2}, EVERYWHERE, id="pp2"),
        pytest.param({"tp": 2}, EVERYWHERE | OF_COPIES, id="tp2", marks=pytest.mark.slow),
        pytest.param({"dp": 2, "shard": True}, EVERYWHERE, id="dp2-shard", marks=pytest.mark.slow),
        pytest.param(
            {"dp": 2, "tp": 2},
            EVERYWHERE | OF_COPIES | {"samples counted by all"},
            id="dp2-tp2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_mutations_of_the_mesh_break_the_curve(ranks: Pools, degrees: dict[str, Any], seen: set[str]) -> None:
    case = MeshCase(degrees)
    expected = plain(case)
    found = ranks(case.world).run(promises.mutated, case)[0]
    noticed = {
        name
        for name, curve in found.items()
        if curve.losses != pytest.approx(expected.losses, rel=1e-5)
        or curve.norms != pytest.approx(expected.norms, rel=1e-5)
    }
    assert noticed == seen
