"""The report of one run as a single file: everything of it, from its folder, for a browser without a network."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from drivetrain.cli.app import app_of
from drivetrain.errors import UserError
from drivetrain.run_page.charts import Line as Curved
from drivetrain.run_page.charts import drawn, figure, smoothed, ticks
from drivetrain.run_page.page import as_html
from drivetrain.run_page.record import KILLED, in_sentences, read
from tests.board.boards import append, write_run

FAILED = "RunError: step 20: the loss is nan. Nothing was saved. Try a lower learning rate, or <b>precision=fp32</b>"


class Read(HTMLParser):
    """Collects what a browser would load, and the text that it shows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def evaluated(folder: Path, step: int, **metrics: float) -> None:
    append(folder, "evaluation", step=step, metrics=metrics, seconds=0.1, best=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "mine", steps=60, finished=None)
    evaluated(folder, 60, loss=0.25, accuracy=0.875)
    (folder / "environment.json").write_text(
        json.dumps({"device_name": "a CPU", "memory_bytes": 1 << 34, "versions": {"torch": "2.11"}})
    )
    return folder


def failed(folder: Path, message: str = FAILED) -> Path:
    append(folder, "run_finished", status="failed", step=-1, message=message)
    return folder


def test_a_page_needs_nothing_beside_it_and_runs_nothing(run: Path) -> None:
    page = as_html(read(run))
    found = Read(page)
    assert {tag for tag, _ in found.tags} & {"script", "link", "img", "iframe", "object", "form", "base"} == set()
    assert not re.search(r"url\(|@import|https?://|\son\w+=", page)
    policy = next(named["content"] for tag, named in found.tags if tag == "meta" and "http-equiv" in named)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_a_page_has_curves_evaluations_settings_and_machine(run: Path) -> None:
    append(run, "run_finished", status="completed", step=60, message="")
    page = as_html(read(run))
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert titles == ["Loss", "Accuracy", "Learning rate", "Gradient norm", "Samples a second"]
    text = Read(page).text
    for shown in ("completed", "60 of 100 steps", "0.8750", "a CPU", "16.0 GiB", "2.11", "precision"):
        assert shown in text
    assert 'class="failure"' not in page


def test_a_run_that_learns_from_rewards_has_their_curve_without_evaluations(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine", steps=3, finished=None)
    for step, reward in enumerate((0.125, 0.25, 0.5)):
        append(run, "rollout", step=step, metrics={"reward": reward, "entropy": 1.0, "groups_without_signal": 0.0})
    page = as_html(read(run))
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert titles[:3] == ["Loss", "Reward", "Groups without signal"]
    drawing = page.split("<figcaption>Reward</figcaption>")[1].split("</figure>")[0]
    assert len(re.findall(r"[ML]", re.findall(r'class="l0" d="(.*?)"', drawing)[0])) == 3


def test_a_failure_shows_cause_remedies_and_the_end_of_its_log(run: Path) -> None:
    failed(run)
    log = "".join(f"line {number}\n" for number in range(200))
    page = as_html(replace(read(run), log=log))
    text = Read(page).text
    assert "<strong>step 20: the loss is nan.</strong>" in page
    assert "Try a lower learning rate, or <b>precision=fp32</b>" in text  # shown as text, not as bold
    assert "drivetrain check" in text
    assert "line 199" in text
    assert "line 139\n" not in text


@pytest.mark.parametrize(
    ("arrange", "command"),
    [
        ("trouble", "replay {run} --step 20"),
        ("checkpoint", "train {run}/run.yaml --resume"),
        ("memory", "plan {run}/run.yaml"),
        ("killed", "plan {run}/run.yaml"),
    ],
)
def test_remedies_are_for_the_case_at_hand(run: Path, arrange: str, command: str) -> None:
    cured = f"drivetrain {command.format(run=run)}"
    if arrange == "killed":
        assert cured not in as_html(read(failed(run)))
        (run / "events.jsonl").write_text("".join((run / "events.jsonl").read_text().splitlines(keepends=True)[:-1]))
        record = read(run)
        assert (record.status, record.message) == ("lost", KILLED)
        assert cured in as_html(record)
        return
    assert cured not in as_html(read(failed(run, "RunError: something else. Try again")))
    if arrange == "trouble":
        fields: dict[str, Any] = {"loss": None, "grad_norm": None, "usual_loss": None, "usual_grad_norm": None}
        append(run, "trouble", step=20, trouble="not_finite", action="stopped", message="m", samples=[1], kept="k",
               not_finite={"loss": "nan", "grad_norm": "nan"}, **fields)  # fmt: skip
    elif arrange == "checkpoint":
        (run / "checkpoints" / "step-00000020").mkdir(parents=True)
    failed(run, "OutOfMemory: out of memory in step 20" if arrange == "memory" else FAILED)
    assert cured in as_html(read(run))


def test_texts_of_a_run_are_no_html(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<img src=x onerror=alert(1)>", finished=None)
    evaluated(folder, 30, **{"<script>alert(2)</script>": 0.5})
    append(folder, "warning", message="<script>alert(3)</script>")
    failed(folder, "</pre><script>alert(4)</script>")
    (folder / "run.yaml").write_text("name: </pre><script>alert(5)</script>\n")
    (folder / "environment.json").write_text(json.dumps({"<svg onload=alert(6)>": "<script>alert(7)</script>"}))
    page = as_html(replace(read(folder), log="<script>alert(8)</script>", note="<script>", command="<script>"))
    found = Read(page)
    assert {tag for tag, _ in found.tags} & {"script", "img"} == set()
    assert not [name for _, named in found.tags for name in named if name.startswith("on")]
    assert all(f"alert({number})" in found.text for number in range(1, 9))


def test_secrets_are_left_out(run: Path) -> None:
    (run / "run.yaml").write_text("name: mine\napi_key: hunter2\nmirror: s3://me:hunter3@bucket/x\n")
    failed(run, "RunError: hf_abcdefghijklmnopqrst is refused")
    page = as_html(replace(read(run), sent="token: hunter4\n", log="Authorization hf_abcdefghijklmnopqrst"))
    assert "(left out)" in page
    assert not re.search("hunter|hf_abc", page)


def test_settings_at_their_defaults_are_left_out_of_the_first_list(tmp_path: Path) -> None:
    workload = {
        "type": "image_classification",
        "model": {"config": {"model_type": "resnet"}},
        "data": {"source": "digits"},
    }
    folder = write_run(
        tmp_path / "mine", workload=workload, seed=7, optimizer={"name": "sgd", "lr": 0.1}, loop={"epochs": 3}
    )
    listed = re.search(r"<h2>Settings</h2>\s*<dl>(.*?)</dl>", as_html(read(folder)), re.DOTALL)
    assert listed is not None
    keys = re.findall(r"<dt><code>(.*?)</code>", listed[1])
    assert {"seed", "optimizer.lr", "loop.epochs"} <= set(keys)
    assert not {"hang_seconds", "loader.workers", "name"} & set(keys)


def test_a_run_that_left_nothing_but_a_start_has_a_page(tmp_path: Path) -> None:
    page = as_html(read(write_run(tmp_path / "mine", steps=0, finished=None)))
    assert "no point of a curve" in page


def test_a_folder_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        read(tmp_path)


def test_the_command_writes_the_page_of_one_run(run: Path, tmp_path: Path) -> None:
    failed(run)
    to = tmp_path / "new" / "mine.html"
    done = CliRunner().invoke(app_of(["report"]), ["report", str(run), "--output", str(to)])
    assert done.exit_code == 0, done.output
    assert "the loss is nan" in to.read_text(encoding="utf-8")
    with pytest.raises(UserError, match="holds one run, and 2 folders"):
        CliRunner().invoke(app_of(["report"]), ["report", str(run), str(run), "-o", str(to)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.1, 2.3), (69, 69), (-3, 0), (1e-7, 9e-7), (10, 123456), (1e30, 2e30), (0, 0)]
)
def test_ticks_are_round_and_around_both_ends(low: float, high: float) -> None:
    found = ticks(low, high, 5)
    assert found[0] <= low <= high <= found[-1] * (1 + 1e-12)
    assert 2 <= len(found) <= 7
    distances = [b - a for a, b in itertools.pairwise(found)]
    assert all(math.isclose(each, distances[0], rel_tol=1e-6) for each in distances)
    assert float(f"{distances[0]:.0e}") == pytest.approx(distances[0])
    assert len({figure(value, found) for value in found}) == len(found)


def test_a_smoothed_line_begins_at_the_first_value_and_has_gaps_where_values_are_not_finite() -> None:
    found = smoothed([2.0, math.nan, 2.0, 4.0])
    assert found[0] == pytest.approx(2.0)
    assert math.isnan(found[1])
    assert found[2] == pytest.approx(2.0)
    # weights of 0.9, corrected: (0.81 * 0.2 + 0.9 * 0.2 + 0.4) / (1 - 0.9 ** 3)
    assert found[3] == pytest.approx((0.81 * 0.2 + 0.9 * 0.2 + 0.4) / 0.271)


def test_a_line_breaks_where_a_value_is_not_finite() -> None:
    line = Curved("training", "l0", [(1, 1.0), (2, 2.0), (3, math.nan), (4, 1.0), (5, math.inf)])
    path = re.search(r'<path class="l0" d="(.*?)"', drawn("Loss", [line]))
    assert path is not None
    assert re.sub(r"[\d. ]", "", path[1]) == "MLM"


def test_the_first_sentence_of_an_error_is_its_cause() -> None:
    assert in_sentences("RunError: step 2: 0.5 is odd. Try 1.5. Or 2") == ("step 2: 0.5 is odd.", "Try 1.5. Or 2")
    assert in_sentences("no dot at all") == ("no dot at all", "")


def test_the_newest_answers_are_shown_with_their_rewards_and_without_their_markup(run: Path) -> None:
    assert "Answers" not in Read(as_html(read(run))).text
    samples = [
        {"step": step, "prompt": f"question {step}", "answer": "<script>" * 400 if step == 30 else f"answer {step}"}
        | {"reward": step / 8, "rewards": {"short": step / 4}, "advantage": -0.5, "reference_model": "another"}
        for step in range(1, 31)
    ]
    lines = [json.dumps(each) for each in samples]
    (run / "samples.jsonl").write_text("\n".join([*lines, '{"step": 31, "prom']), encoding="utf-8")
    page = Read(as_html(read(run)))
    assert "question 30" in page.text
    assert "step 30 · reward 3.75 · advantage -0.5 · short 7.5" in page.text
    assert "question 18" not in page.text, "twelve are shown"
    assert "answer of the reference model" in page.text
    assert "(3,200 characters)" in page.text, "long texts are cut"
    assert all(tag != "script" for tag, _ in page.tags)
    assert page.text.index("question 30") < page.text.index("question 29")


def test_a_resumed_run_began_where_it_was_first_started(run: Path) -> None:
    first = as_html(read(run))
    assert len(re.findall(r"started \d{4}-", first)) == 1
    assert not re.findall(r"resumed \d{4}-", first)
    again = {"name": "mine", "output": "x", "total_steps": 60, "first_step": 40, "samples_per_epoch": 10}
    append(run, "run_started", **again, time="2031-01-02T03:04:05.000+00:00")
    text = as_html(read(run))
    assert "resumed 2031-01-02 03:04:05 UTC" in text
    assert "started 2031" not in text
    assert len(re.findall(r"started \d{4}-", text)) == 1
