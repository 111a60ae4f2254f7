"""Tests that a row judges the memory of a host beside that of its GPUs, and says what it does not know."""

from __future__ import annotations

from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from drivetrain.cli.plan_table import render
from drivetrain.config.run import RunConfig
from drivetrain.plan.columns import COST, columns, held_beside
from drivetrain.plan.rows import Plan, Row, chosen, in_order, row
from drivetrain.plan.step_costs import StepCosts, StepMemory
from tests.plan.costs import costs
from tests.plan.invented import Invented, machine

GIB = 2**30


@dataclass
class WithHost(Invented):
    """An invented machine whose nodes have 64 GiB of their own."""

    host_memory: Any = 64 * GIB


LARGE = WithHost(machine(0).model, nodes=2, devices_per_node=4, memory=80 * GIB)


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    (tmp_path / "own.py").write_text("def build(): ...")
    given = {"workload": {"type": "module", "path": tmp_path / "own.py"}, "batch_size": 8, "loop": {"steps": 1}}
    engine = {"name": "fsdp", "offload": True}
    return RunConfig.model_validate({**given, "engine": engine, "processes": 4, "nodes": 2})


def holding(host: float, device: float = 10) -> StepCosts:
    """Returns costs of a step of which each rank holds so many GiB on its host and on its device."""
    size = round(device * GIB)
    return replace(costs(), memory=StepMemory(size, size, {"activations": size}, host=round(host * GIB)))


@pytest.mark.parametrize(
    ("host", "fits", "words"),
    [
        (15, "yes", "fits"),
        (15.5, "tight", "fits with 2.0 GiB of the host's memory free, less than 5%"),
        (17, "no", "short of 4.0 GiB of the host's memory"),
    ],
)
def test_the_ranks_of_a_node_share_its_hosts_memory(run: RunConfig, host: float, fits: str, words: str) -> None:
    found = row(run, run, holding(host), LARGE)
    assert (found.host_bytes, found.fits, found.verdict) == (4 * host * GIB, fits, words)


def test_a_device_that_is_short_is_the_first_reason(run: RunConfig) -> None:
    assert row(run, run, holding(17, device=100), LARGE).verdict.endswith("most of it activations")


def test_a_host_whose_memory_is_not_known_is_not_judged(run: RunConfig) -> None:
    unknown = Invented(LARGE.model, 2, 4, 80 * GIB)
    found = row(run, run, holding(1000), unknown)
    assert (found.fits, found.verdict, found.host_capacity) == ("yes", "fits", None)


@dataclass(frozen=True)
class Took:
    """The planned time of a step."""

    seconds: float
    bound_by: str = "compute"


@pytest.mark.parametrize(("saved", "precision"), [(-0.1, "fp32"), (0.004, "fp32"), (0.08, "fp32"), (0.2, "bf16-mixed")])
def test_a_precision_that_rounds_more_is_chosen_where_it_saves_more_than_plans_err(
    run: RunConfig, saved: float, precision: str
) -> None:
    seconds = {"fp32": 1.0, "bf16-mixed": 1 - saved}
    rows = [
        replace(row(own, run, holding(1), LARGE), timing=Took(seconds[name]))
        for name in seconds
        for own in [run.model_copy(update={"precision": name})]
    ]
    choice = chosen(rows)
    assert choice is not None
    assert choice.run.precision == precision


def shown(rows: list[Row]) -> dict[str, str]:
    plan = Plan("x", 8, tuple(rows), None)
    return {column.name: column.text(plan, rows[0]) for column in columns(plan)}


def test_the_figure_stands_in_the_table_only_where_something_lies_there(run: RunConfig) -> None:
    assert shown([row(run, run, holding(15), LARGE)])["host memory a node"] == "60.0 GiB of 64.0 GiB"
    assert "host memory a node" not in shown([row(run, run, holding(0), LARGE)])


@pytest.mark.parametrize(
    ("seconds", "rate", "cost"),
    [(8 / 11_900, "11,900 samples", "0.00075"), (8 / 1234.5, "1,234 samples", "0.0072"), (0.25, "32 samples", "0.28")],
)
def test_rates_and_costs_are_written_without_exponents_and_never_as_nothing(
    run: RunConfig, seconds: float, rate: str, cost: str
) -> None:
    timed = replace(row(run, run, holding(1), LARGE), timing=Took(seconds))
    plan = Plan("x", 8, (timed,), None, steps=1000, price=0.5)
    texts = {column.name: column.text(plan, timed) for column in columns(plan)}
    assert (texts["a second"], texts["cost"]) == (rate, cost)
    whole = replace(plan, steps=1_000_000_000)
    assert COST.text(whole, timed) == f"{whole.cost(timed):,.2f}"
    assert COST.text(replace(plan, price=0.0), timed) == "0.00"


def test_with_a_disk_the_time_is_not_known_and_the_row_says_so(run: RunConfig) -> None:
    engine = {"name": "deepspeed", "stage": 3, "offload_optimizer": "nvme", "nvme_path": "disk"}
    on_disk = RunConfig.model_validate({**run.model_dump(exclude={"engine"}), "engine": engine})
    found = row(on_disk, on_disk, holding(1000), LARGE)
    assert (found.fits, found.seconds) == ("yes", None)
    assert "time is not known" in found.verdict
    assert shown([found])["host memory a node"] == "4,000.0 GiB, and disk"
    plan = Plan("x", 8, (found,), None).as_object()["rows"][0]
    assert (plan["host_bytes"], plan["reason"]) == (4000 * GIB, found.verdict)
    timed = row(run, run, holding(1), LARGE)
    assert in_order([found, timed]) == [timed, found]


def test_the_table_states_what_stands_between_the_tensors_and_the_verdict(run: RunConfig) -> None:
    """68 of 80 GiB and still short: the room between is what the allocator holds, and what no trace sees."""
    known = replace(costs(), memory=StepMemory(68 * 2**30, round(1.14 * 68 * 2**30), {"activations": 68 * 2**30}))
    short = Row(run, (), known, capacity=78 * 2**30, unseen=(2**29, 3 * 2**29))
    assert short.verdict.startswith("short of 1.0 GiB")  # 68 x 1.14 + 1.5 - 78
    console = Console(width=400, file=StringIO())
    console.print(render(Plan("made up", 1, (short,), None), "drivetrain train run.yaml"))
    below = console.file.getvalue().partition("short of 1.0 GiB")[2]  # type: ignore[attr-defined]
    assert "the plan adds 14% of them, which the allocator holds" in below
    assert "and 1.5 GiB that no trace sees" in below
    whole = replace(known, memory=replace(known.memory, reserved=round(1.02 * 68 * 2**30)))
    assert "adds 2 to 14% of them" in held_beside(Plan("made up", 1, (short, replace(short, costs=whole)), None))
    assert held_beside(Plan("made up", 1, (Row(run, (), reason="no"),), None)) == ""
