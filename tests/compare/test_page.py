"""The page: nothing from outside, every row, bounded size; and the plots it holds."""

from __future__ import annotations

import json
import random
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.compare.figures import Figures
from drivetrain.compare.files import as_csv
from drivetrain.compare.page import as_html
from drivetrain.compare.plots import COLOURS, MOST_POINTS, PART_COLOURS, as_png, as_svg, plots, thinned
from drivetrain.compare.result_rows import Comparison, Row
from drivetrain.compare.subject import subject
from tests.compare.made import comparison, report, result


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.rows = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.rows += tag == "tr"
        for name, value in attributes:
            if name in {"src", "href", "xlink:href", "action"} and value and not value.startswith("#"):
                self.addresses.append(value)


def large(folder: Path, rows: int, points: int) -> Comparison:
    """Rows with noisy curves of so many points."""
    dice = random.Random(0)
    series = [[round(i / 2, 2), round(dice.random(), 4)] for i in range(points)]
    made = []
    for number in range(rows):
        losses = {step: 2 / (1 + step / 100) + 0.1 * dice.random() for step in range(points)}
        utilisation = {"mean": 0.5, "peak": 1.0, "samples": points, "series": series}
        label = f"bf16-mixed, {number}"
        one = result(folder / str(number), report(100 + number, utilisation=utilisation), losses)
        made.append(Row(label, ("bf16-mixed", str(number)), (one,)))
    return Comparison("large", "train", ("precision", "batch_size"), tuple(made))


def test_an_accuracy_that_always_answering_one_class_has_is_marked(tmp_path: Path) -> None:
    largest = {"largest_class": {"class": "a", "share": 2 / 3}}
    found = comparison(tmp_path, fp32=[report(accuracy=2 / 3, data=largest)], bf16=[report(accuracy=0.9, data=largest)])
    page = as_html(found, plots(found))
    assert "0.6667 (chance)" in page
    assert page.count("(chance)") == 1


def test_the_page_asks_no_server_for_anything_and_escapes_what_it_shows(tmp_path: Path) -> None:
    found = comparison(tmp_path, fp32=[report()], bf16=[report(200)], broken=[None])
    page = as_html(found, plots(found))
    reader = Reader()
    reader.feed(page)
    assert reader.addresses == []
    assert not re.search(r"@import|url\((?!#)", page)
    assert reader.rows == 2 * (1 + 3), "a table of what decides, and one of the rest"
    assert "it broke &lt;b&gt;badly&lt;/b&gt;" in page
    assert page.count("<svg") == 5
    assert "#010203" not in page, "plots follow the page's text colour"


def test_the_page_names_data_model_date_and_machine(tmp_path: Path) -> None:
    data = {"train_samples": 1438, "evaluation_samples": 359}
    made = report(data=data, engaged={"global_parameters": 20346})
    found = comparison(tmp_path, fp32=[made], bf16=[made])
    for row in found.rows:
        model = {"config": {"model_type": "resnet"}}
        config = {"workload": {"type": "image_classification", "model": model, "data": {"train": "my/digits.csv"}}}
        (row.results[0].folder / "run.yaml").write_text(json.dumps(config))
        events = row.results[0].folder / "events.jsonl"
        lines = [json.loads(line) for line in events.read_text().splitlines()]
        events.write_text("".join(json.dumps({"time": "2026-11-25T10:10:05", **line}) + "\n" for line in lines))
    found = replace(found, machine={"device_name": "a CPU", "cpu_cores": 2, "memory_bytes": 2**34, "versions": {}})
    assert subject(found) == {
        "Data": "digits.csv (1,438 to train on, 359 to evaluate on)",
        "Model": "resnet (20,346 parameters)",
        "Date": "2026-11-25",
        "Machine": "a CPU, 2 processor cores, 16 GiB",
    }
    page = as_html(found, plots(found))
    assert "<h1>made: training by precision</h1>" in page
    for text in subject(found).values():
        assert f"<dd>{text}</dd>" in page
    for column in Figures(found).columns:
        assert f"<dt>{column.name}</dt><dd>{column.about.replace(chr(39), '&#39;')}</dd>" in page


def test_plots_take_lighter_colours_in_dark_mode(tmp_path: Path) -> None:
    found = comparison(tmp_path, fp32=[report()], bf16=[report(200)])
    page = as_html(found, plots(found))
    dark = page.split("prefers-color-scheme: dark", 1)[1].split("@media", 1)[0].split("}\n}", 1)[0]
    for number, colour in enumerate((*COLOURS, *PART_COLOURS)):
        assert f"--c{number}: #" in dark, f"{colour} has a lighter one"
    assert f"var(--c0, {COLOURS[0]})" in page
    assert page.count(COLOURS[0]) == page.count(f"var(--c0, {COLOURS[0]})")


def test_sixteen_cells_of_two_thousand_points_stay_under_a_megabyte(tmp_path: Path) -> None:
    found = large(tmp_path, rows=16, points=2000)
    assert len(as_html(found, plots(found)).encode()) < 2**20


@pytest.mark.parametrize("points", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_two_hundred_cells_stay_usable(points: int, tmp_path: Path) -> None:
    found = large(tmp_path, rows=200, points=points)
    page = as_html(found, plots(found))
    assert len(page.encode()) < 2 * 2**20
    assert page.count("<tr>") == 2 * 201
    assert "the first 16 of 200" in page
    assert len(as_csv(found).splitlines()) == 201


def test_plots_are_pictures_and_the_same_each_time(tmp_path: Path) -> None:
    found = comparison(tmp_path, fp32=[report()], bf16=[report(200)])
    drawn, again = plots(found), plots(found)
    assert set(drawn) == {"loss", "time", "memory", "utilisation", "breakdown"}
    for name, figure in drawn.items():
        svg = as_svg(figure)
        ElementTree.fromstring(svg)
        assert as_svg(again[name]) == svg
        assert as_png(figure)[:8] == b"\x89PNG\r\n\x1a\n"


def test_shares_of_a_device_are_drawn_against_the_whole_of_it(tmp_path: Path) -> None:
    (axes,) = plots(comparison(tmp_path, fp32=[report()]))["utilisation"].axes
    least, most = axes.get_ylim()
    assert least == 0
    assert 1 <= most < 1.1


@pytest.mark.parametrize("name", ["time", "memory", "breakdown"])
def test_bars_are_named_by_their_rows(name: str, tmp_path: Path) -> None:
    (axes, *_) = plots(comparison(tmp_path, fp32=[report()], bf16=[report(200)]))[name].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["fp32", "bf16"]


def test_what_has_nothing_to_show_is_not_drawn(tmp_path: Path) -> None:
    assert plots(comparison(tmp_path, broken=[None])) == {}
    bare = report(utilisation={"mean": 0, "peak": 0, "samples": 0, "series": []}, seconds_by_part={})
    assert set(plots(comparison(tmp_path / "bare", fp32=[bare]))) == {"loss", "time", "memory"}


@given(st.lists(st.floats(-1e6, 1e6), max_size=2000))
def test_a_thinned_curve_keeps_its_extremes_and_its_order(values: list[float]) -> None:
    points = list(enumerate(values))
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS + 1
    assert kept == sorted(kept)
    assert set(kept) <= set(points)
    if values:
        heights = [y for _, y in kept]
        assert (max(heights), min(heights)) == (max(values), min(values))
