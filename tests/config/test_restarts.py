"""Runs on fewer ranks than they ask for: which can, with what batch, and what is said of those that cannot."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain.config.engines.mesh import MeshEngine
from drivetrain.config.load import validate
from drivetrain.config.restarts import restart_problems, shrunk
from drivetrain.config.run import RunConfig
from drivetrain.errors import UserError


def run_of(engine: Any, processes: int, **settings: Any) -> RunConfig:
    given = {
        "workload": {"type": "module", "path": "mine.py"},
        "engine": engine,
        "processes": processes,
        "loop": {"steps": 1},
        **({} if "batch_size_per_device" in settings else {"batch_size": 16}),
        **settings,
    }
    run, problems = validate(given, [])
    assert run is not None, problems
    return run


def test_a_run_with_all_its_ranks_is_left_as_it_is() -> None:
    run = run_of("ddp", 4)
    assert shrunk(run, 4) is run


@pytest.mark.parametrize("batch", [{"batch_size": 16}, {"batch_size_per_device": 4}])
def test_the_global_batch_stays(batch: dict[str, int]) -> None:
    run = shrunk(run_of("fsdp", 4, **batch), 3)
    assert (run.world_size, run.global_batch, run.data_parallel_size) == (3, 16, 3)


def test_nodes_that_are_left_keep_their_ranks() -> None:
    run = shrunk(run_of("ddp", 4, nodes=3), 8)
    assert (run.processes, run.nodes, run.global_batch) == (4, 2, 16)


@pytest.mark.parametrize("dp", [None, 4])
def test_of_a_mesh_only_the_data_axis_shrinks(dp: int | None) -> None:
    run = shrunk(run_of({"name": "mesh", "tp": 2, "dp": dp, "shard": True}, 8), 4)
    assert isinstance(run.engine, MeshEngine)
    assert (run.engine.tp, run.data_parallel_size, run.engine.shard, run.global_batch) == (2, 2, True, 16)


def test_a_mesh_whose_data_axis_is_gone_has_no_rank_to_share_weights_with() -> None:
    run = shrunk(run_of({"name": "mesh", "tp": 2, "dp": 2, "shard": True}, 4), 2)
    assert isinstance(run.engine, MeshEngine)
    assert (run.engine.dp, run.engine.shard) == (1, False)


@pytest.mark.parametrize(
    ("engine", "world", "least"),
    [
        ({"name": "mesh", "pp": 2, "tp": 2, "dp": 2}, 6, 4),
        ({"name": "mesh", "cp": 2, "tp": 4}, 4, 8),
        ({"name": "fsdp", "hybrid": 4}, 6, 4),
    ],
)
def test_too_few_ranks_name_the_smallest_world_that_works(engine: Any, world: int, least: int) -> None:
    with pytest.raises(UserError, match=f"{world} of 8 ranks are left.*\n.*smallest world that works is {least}:"):
        shrunk(run_of(engine, 8), world)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine": "ddp", "processes": 1, "nodes": 2, "min_nodes": 3}, "3 were given, but nodes is 2"),
        ({"engine": {"name": "mesh", "tp": 4}, "processes": 2, "nodes": 4, "min_nodes": 1}, "needs a multiple of 4"),
        ({"engine": {"name": "mesh", "tp": 4}, "processes": 2, "nodes": 4, "min_nodes": 2}, None),
        ({"engine": "ddp", "processes": 1, "nodes": 2, "min_nodes": 1}, None),
    ],
)
def test_machines_that_could_never_go_on_are_reported_before(settings: dict[str, Any], words: str | None) -> None:
    problems = list(restart_problems(run_of(**settings)))
    assert [problem.field for problem in problems] == ([] if words is None else ["min_nodes"])
    assert all(words in problem.why for problem in problems if words is not None)


@pytest.mark.parametrize(("world", "shape"), [(15, (15, 1)), (12, (12, 1)), (8, (8, 1)), (16, (8, 2))])
def test_nodes_that_lost_devices_come_to_the_same_run_by_its_ranks_alone(world: int, shape: tuple[int, int]) -> None:
    """One node may have 8 of 12 ranks and the other 4, so that neither may divide by its own number."""
    run = shrunk(run_of("ddp", 8, nodes=2), world)
    assert (run.processes, run.nodes) == shape
