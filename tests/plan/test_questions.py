"""The path of questions and the page of a plan, on invented machines."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from rich.console import Console

from drivetrain.cli.plan_table import explained, line_of, render
from drivetrain.config.engines import SINGLE
from drivetrain.config.run import RunConfig
from drivetrain.plan import rows as rows_of
from drivetrain.plan.page import as_html, write_page
from drivetrain.plan.page_bars import bars
from drivetrain.plan.page_chart import chart
from drivetrain.plan.questions import QUESTIONS, general_chart, path_of
from drivetrain.plan.rows import Plan, chosen, in_order, refused
from drivetrain.plan.search import search
from drivetrain.plan.search_offers import offers
from drivetrain.plan.search_space import Space
from drivetrain.plan.step_costs import StepMemory
from drivetrain.plan.timeline import MemoryPart
from tests.plan.invented import Invented
from tests.plan.test_search import LARGE, SPACE, large, run

BOXES = [each.text for each in QUESTIONS]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def plan(base: RunConfig) -> Plan:
    return search(base, SPACE, large(), steps=1000, price=2.0)


def answers(plan: Plan) -> dict[str, str]:
    return {box.question.key: box.answer for box in path_of(plan).boxes if box.answer is not None}


def test_each_question_has_the_numbers_of_the_run(plan: Plan) -> None:
    boxes = {box.question.key: box for box in path_of(plan).boxes}
    assert boxes["one"].answer == "no"
    assert re.fullmatch(r"about 12\d\.\d GiB of 75\.5 GiB", boxes["one"].figures), boxes["one"].figures
    assert (boxes["optimizer"].answer, boxes["optimizer"].figures) == ("yes", "74.6 GiB of 75.5 GiB"), "a row has it"
    assert boxes["gradients"].answer is None
    assert path_of(plan).lines()[0].startswith(BOXES[0])


def test_the_first_yes_ends_the_questions_about_memory(base: RunConfig) -> None:
    plan = search(base, SPACE, large(memory=400 * 2**30))
    assert answers(plan) == {"one": "yes"}
    assert path_of(plan).leaf == QUESTIONS[0].leaf


def test_more_memory_is_never_led_further_down(base: RunConfig) -> None:
    asked = [len(answers(search(base, SPACE, large(memory=size * 2**30)))) for size in (24, 80, 160, 400)]
    assert asked == sorted(asked, reverse=True)
    assert len(set(asked)) > 1


class Shared(Invented):
    """Its ranks share the memory of their host, as those on a CPU do."""

    def capacity(self, run: RunConfig) -> int:
        return self.memory // (run.world_size // run.nodes)


def test_ranks_that_share_a_hosts_memory_are_each_compared_with_their_own_part(tmp_path: Path) -> None:
    """The run's own two ranks have half each, which is too little; one process has all, which is enough."""
    base = run(tmp_path, "engine=ddp", "processes=2")
    space = Space(("fp32",), engines=(SINGLE,))
    plan = search(base, space, Shared(LARGE, nodes=1, devices_per_node=2, memory=200 * 2**30))
    assert plan.choice is not None
    (box,) = [each for each in path_of(plan).boxes if each.question.key == "one"]
    assert box.answer == "yes"
    assert box.figures.endswith(" of 189.5 GiB")
    assert path_of(plan).leaf == QUESTIONS[0].leaf


def as_asked(folder: Path, memory: int, *ways: str) -> Plan:
    """Returns a plan of ways that were named, for which no process is traced alone."""
    machine = large(memory=memory * 2**30, devices_per_node=2)
    runs = [run(folder, way, "processes=2", "micro_batch_size=1") for way in ways]
    rows = in_order(rows_of.row(each, each, machine.costs(each), machine) for each in runs)
    return Plan("2 x A100", 2, tuple(rows), chosen(rows))


def test_devices_that_share_nothing_answer_the_first_question(tmp_path: Path) -> None:
    assert answers(as_asked(tmp_path, 400, "engine=ddp")) == {"one": "yes"}
    assert path_of(as_asked(tmp_path, 400, "engine=ddp", "engine=zero2")).leaf == QUESTIONS[0].leaf
    assert answers(as_asked(tmp_path, 110, "engine=ddp", "engine=zero2")) == {"one": "no", "gradients": "yes"}


def test_a_way_that_fits_and_belongs_to_no_question_is_not_followed_by_what_else_would_fit(tmp_path: Path) -> None:
    offloaded = "engine={name: fsdp, offload: true}"
    for ways in ([offloaded], ["engine=ddp", offloaded]):
        path = path_of(as_asked(tmp_path, 110, *ways))
        assert path.leaf == ""
        assert not any("more devices" in line or line == "-> " for line in path.lines())
    assert path_of(as_asked(tmp_path, 3, "engine=ddp", offloaded)).leaf == "more devices, 16 bits, an adapter"


@pytest.mark.parametrize(("state", "count"), [(130, 3), (110, None)])
def test_devices_that_are_offered_hold_what_the_allocator_does_and_are_more_than_there_are(
    base: RunConfig, state: int, count: int | None
) -> None:
    """Two have room for 65.5 GiB of state each beside 10 GiB, and for 56.2 at 1.14 bytes for each of a tensor."""
    machine = large(devices_per_node=2)
    parts: dict[MemoryPart, int] = {"parameters": state * 2**30, "activations": 10 * 2**30}
    one = replace(machine.costs(base), memory=StepMemory(sum(parts.values()), sum(parts.values()), parts))
    found = [each for each in offers(base, ("fp32",), None, one, machine, machine.costs) if "such devices" in each]
    assert [int(each.split()[0]) for each in found] == ([] if count is None else [count])


def test_where_nothing_fits_the_path_ends_with_offers(base: RunConfig) -> None:
    plan = search(base, SPACE, large(memory=16 * 2**30))
    assert plan.choice is None
    assert path_of(plan).leaf == "more devices, 16 bits, an adapter"
    assert "no way of those asked fits" in path_of(plan).lines()[-1]
    assert any("such devices" in each for each in plan.offers)


def test_on_a_machine_of_unknown_speed_what_fits_is_named_and_nothing_chosen(base: RunConfig) -> None:
    found = search(base, SPACE, large(memory=400 * 2**30)).rows[0]
    ways = [replace(found, timing=None), replace(found, timing=None, capacity=0)]
    assert chosen(ways) is None
    last = path_of(Plan("this machine", 1, tuple(ways), None)).lines()[-1]
    assert last == f"-> {found.run.engine.label}: fits; the time of a step is not known"


def test_where_nothing_could_be_planned_nothing_is_said_to_lack_memory(base: RunConfig) -> None:
    lines = path_of(Plan("2 x A100", 2, (refused(base, base, "it cannot be traced"),), None)).lines()
    assert lines == ["-> not known: nothing that was asked could be planned", "-> the reasons stand beside each way"]


def test_slow_links_are_named(base: RunConfig) -> None:
    plan = search(base, SPACE, large(link=10**8))
    links = path_of(plan).links
    if plan.choice is not None and plan.choice.timing is not None and plan.choice.timing.bound_by == "network":
        assert links is not None
        assert links.answer == "no"
    quick = path_of(search(base, SPACE, large(link=10**13))).links
    assert quick is not None
    assert quick.answer == "yes"


def test_another_precision_is_offered_and_not_taken(plan: Plan) -> None:
    assert plan.choice is not None
    assert plan.choice.run.precision == "fp32"
    (offer,) = plan.offers
    assert offer.startswith("precision=bf16-mixed: ")
    assert "changes the result" in offer


def test_an_engine_that_was_not_chosen_is_explained(plan: Plan) -> None:
    assert "short of at least" in next(explained(plan, "single"))
    assert plan.choice is not None
    assert next(explained(plan, "fsdp")) != ""
    assert "none of the ways" in next(explained(plan, "magic"))
    (chosen,) = [line for line in explained(plan, plan.choice.run.engine.label) if line.endswith("is the choice")]
    assert " ".join(plan.choice.overrides) in chosen


def test_the_line_to_type_is_quoted_for_a_shell(plan: Plan) -> None:
    assert plan.choice is not None
    row = replace(plan.choice, overrides=("engine={name: fsdp, reshard: false}", "micro_batch_size=4"))
    assert line_of(row, "drivetrain train run.yaml") == (
        'drivetrain train run.yaml "engine={name: fsdp, reshard: false}" micro_batch_size=4'
    )


def test_the_line_to_type_on_several_nodes_says_where_they_meet(plan: Plan) -> None:
    assert plan.choice is not None
    run = plan.choice.run.model_copy(update={"nodes": 2})
    row = replace(plan.choice, run=run, overrides=("engine=fsdp", "nodes=2"))
    line = line_of(row, "drivetrain train run.yaml")
    assert line == "drivetrain train run.yaml engine=fsdp nodes=2 --node-rank 0 --rendezvous HOST:PORT"
    console = Console(width=400, file=io.StringIO())
    console.print(render(replace(plan, choice=row), "drivetrain train run.yaml"))
    below = console.file.getvalue().partition(line)[2]  # type: ignore[attr-defined]
    assert "on each of the 2 nodes, with --node-rank 0 to 1" in below
    assert "drivetrain launch" in below
    console.print(render(plan, "drivetrain train run.yaml"))
    assert console.file.getvalue().count("drivetrain launch") == 1  # type: ignore[attr-defined]


def test_the_charts_are_well_formed_and_hold_every_question(plan: Plan) -> None:
    for path in (general_chart(), path_of(plan)):
        text = " ".join(ET.fromstring(chart(path)).itertext())
        for question in BOXES:
            assert all(word in text for word in question.split())
    taken = ET.fromstring(chart(path_of(plan))).iter("{http://www.w3.org/2000/svg}path")
    assert sum(each.get("class") == "taken" for each in taken) >= len(answers(plan))


def test_the_page_loads_nothing_and_holds_choice_table_bars_and_timeline(plan: Plan, tmp_path: Path) -> None:
    assert plan.choice is not None
    command = line_of(plan.choice, "drivetrain train run.yaml")
    write_page(plan, tmp_path / "plan", "<run>", command)
    page = (tmp_path / "plan/plan.html").read_text()
    assert command in unescape(page)
    assert "Plan: &lt;run&gt;" in page
    assert not re.findall(r'(?:src|href)="', page)
    assert "prefers-color-scheme: dark" in page
    for words in ("What memory is made of", "Memory over a step", "planned, none was measured"):
        assert words in page
    found = json.loads((tmp_path / "plan/plan.json").read_text())
    assert found["choice"]["overrides"] == list(plan.choice.overrides)
    assert found["choice"]["cost"] == pytest.approx(found["choice"]["total_seconds"] / 3600 * 2.0 * 8)
    assert len(found["rows"]) == len(plan.rows)


def test_the_legend_of_the_bars_has_the_parts_of_the_rows_alone(plan: Plan) -> None:
    (row,) = [row for row in plan.rows if row is plan.choice]
    assert row.costs is not None
    memory = replace(row.costs.memory, parts={"parameters": 2**30, "gradients": 0, "activations": 2**20})
    drawn = bars([replace(row, costs=replace(row.costs, memory=memory)), replace(row, costs=None)])
    assert re.findall(r'<rect class="(\w+)" x="\d+" y="6"', drawn) == ["parameters", "activations"]


def test_the_questions_say_what_their_bytes_are(plan: Plan) -> None:
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(render(plan, "drivetrain train run.yaml"))
    words = "bytes are tensors as the allocator reserves them, with the smallest micro-batch that was planned"
    assert words in console.export_text()
    assert words in as_html(plan, "run", "")


def test_the_page_of_a_plan_without_a_choice_can_be_written(base: RunConfig) -> None:
    page = as_html(search(base, SPACE, large(memory=16 * 2**30)), "run", "")
    assert "<strong>no way of those asked fits</strong>" in page


def test_the_page_of_a_machine_of_unknown_speed_says_what_fits(base: RunConfig) -> None:
    found = replace(search(base, SPACE, large(memory=400 * 2**30)).rows[0], timing=None, overrides=())
    plan = Plan("this machine", 1, (found,), None)
    page = as_html(plan, "run", "")
    assert f"<strong>{found.run.engine.label}: fits; the time of a step is not known</strong>" in page
    assert "Nothing" not in page
    assert "<td><code>as it is</code></td>" in page, "a way that no override leads to has a name as well"
    assert next(explained(plan, found.run.engine.label)) == "as it is: fits"


def test_the_chart_in_the_docs_is_the_general_one() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    assert (docs / "pictures/choosing.svg").read_text() == chart(general_chart()) + "\n"
    page = (docs / "background/choosing.md").read_text()
    assert all(question in page for question in BOXES)


def test_the_screen_names_ways_that_were_not_examined_below_the_table(plan: Plan) -> None:
    slow = [row for row in plan.rows if row.at_best is not None]
    assert slow, "the search examines all of them: give it a larger space"
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(render(plan, "drivetrain train run.yaml"))
    table, _, below = console.export_text().partition("Not examined, as a step takes ")
    assert below.startswith(f"{min(row.at_best or 0 for row in slow):.3g} s at best: ")
    assert {name.strip() for name in below.split(":")[1].split(".")[0].split(" and ")[0].split(",")} <= {
        row.run.engine.label for row in slow
    }
    for row in plan.rows:
        assert (row.at_best is None) or f"\n{' '.join(row.overrides)} " not in table
