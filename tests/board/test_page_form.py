"""A new run in a real browser, by clicks alone: form, YAML, plan and data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.board.browsing import begin, until, write_yaml, yaml_of

CURSOR = "document.querySelector('[data-editor]').view.state.selection.main.from"


def test_an_error_is_shown_at_its_field_and_start_waits_for_it(page: Any) -> None:
    begin(page)
    page.fill("#field-optimizer-lr", "fast")
    page.wait_for_selector("#field-optimizer-lr-error")
    assert page.get_attribute("#field-optimizer-lr", "aria-invalid") == "true"
    assert page.is_disabled("[data-start]")
    page.fill("#field-optimizer-lr", "0.05")
    page.wait_for_selector("[data-ready]")
    assert page.locator(".field .error").count() == 0
    assert page.is_enabled("[data-start]")


def test_form_and_yaml_are_one_and_comments_stay(page: Any) -> None:
    begin(page)
    page.click("[data-tab=yaml]")
    text = yaml_of(page)
    write_yaml(page, text.replace("batch_size: 64", "batch_size: 32  # small"))
    page.click("[data-tab=form]")
    until(page, lambda: page.input_value("#field-batch_size") == "32")
    page.fill("#field-seed", "7")
    page.click("[data-tab=yaml]")
    until(page, lambda: "seed: 7" in yaml_of(page))
    text = yaml_of(page)
    assert "batch_size: 32  # small" in text
    write_yaml(page, f"{text}\nbatchsize: 3\n")
    page.wait_for_selector("#problems .note.bad:has-text('batchsize')")  # an unknown key is an error


def test_a_block_is_switched_on_and_off_while_another_field_has_an_error(page: Any) -> None:
    begin(page)
    page.fill("#field-optimizer-lr", "fast")
    page.wait_for_selector("#field-optimizer-lr-error")
    page.check("#field-adapter")  # a switch that goes back by itself fails here
    page.wait_for_selector("#field-adapter-rank")
    page.uncheck("#field-adapter")
    page.wait_for_selector("#field-adapter-rank", state="detached")
    page.click("[data-tab=yaml]")
    until(page, lambda: "adapter" not in yaml_of(page))


def test_every_field_is_found_by_search(page: Any) -> None:
    begin(page)
    page.fill("#search-fields", "log_every")
    page.fill("#field-tracking-log_every", "3")
    page.wait_for_selector("[data-field='tracking.log_every'].set")
    page.fill("#search-fields", "no such thing")
    page.wait_for_selector("text=Fields found: 0")


def test_a_reload_keeps_what_was_typed(page: Any) -> None:
    begin(page)
    page.fill("#field-batch_size", "48")
    page.wait_for_selector("[data-ready]")
    page.reload()
    until(page, lambda: page.input_value("#field-batch_size") == "48")


@pytest.mark.slow
def test_the_plan_stands_beside_start(page: Any) -> None:
    begin(page)
    page.click("[data-check]")
    page.wait_for_selector("[data-next]:has-text('Loading PyTorch')")
    page.wait_for_selector("dt:has-text('Parameters')", timeout=300_000)
    assert "Planning" in page.inner_text("[data-next]"), "data and model are shown before the plan"
    page.wait_for_selector("dt:has-text('Parameters') + dd:has-text('20,346 in all')", timeout=300_000)
    assert page.inner_text("dt:has-text('Memory') + dd").endswith("a device")
    assert "free" in page.inner_text("dt:has-text('Checkpoints') + dd")


def test_what_does_not_fit_offers_changes_that_make_it_fit(page: Any) -> None:
    """The answers are those of the server, whose own tests make them; a click puts one into the form."""
    plan = {"fits": "no", "verdict": "it does not fit", "allocated_bytes": 2**34, "capacity_bytes": 2**33}
    ways = [{"set": {"micro_batch_size": 8, "recompute": True}, "says": "micro_batch_size=8 recompute=true",
             "step_seconds": 0.25}]  # fmt: skip
    found = {"ready": True, "problems": [], "notices": [], "steps": 10, "plan": plan, "seconds": 3.0}
    page.route("**/api/check/full", lambda route: route.fulfill(json=found if route.request.method == "POST" else {}))
    page.route("**/api/plan", lambda route: route.fulfill(json={"rows": [], "fixes": ways}))
    begin(page)
    page.click("[data-check]")
    page.wait_for_selector(".note.bad:has-text('it does not fit')")
    page.click("[data-fixes]")
    page.wait_for_selector(".fixes li:has-text('0.25 s a step')")
    page.click(".fixes button")
    page.click("[data-tab=yaml]")
    until(page, lambda: "micro_batch_size: 8" in yaml_of(page) and "recompute: true" in yaml_of(page))


def test_a_run_is_given_the_devices_that_were_ticked(page: Any) -> None:
    """This machine has no GPU: the page is shown the queue of one that has two."""
    gpus = [{"id": str(n), "name": "a GPU", "memory_bytes": 2**34, "used_bytes": 2**30, "utilisation": 0.1,
             "entries": [], "others": n == 1, "places": 1} for n in range(2)]  # fmt: skip
    queue = {"entries": [], "devices": gpus, "settings": {"paused": False}}
    snapshot = f"event: snapshot\ndata: {json.dumps({'runs': [], 'queue': queue})}\n\n"
    page.route("**/api/events", lambda route: route.fulfill(content_type="text/event-stream", body=snapshot))
    sent: list[Any] = []

    def refuse(route: Any) -> None:
        sent.append(route.request.post_data_json)
        route.fulfill(status=409, json={"error": {"message": "not here", "code": "x"}})

    page.route("**/api/queue", refuse)
    page.reload()
    begin(page)
    page.wait_for_selector("label:has([data-device='1']):has-text('used by another program')")
    page.click("[data-start]")
    page.wait_for_selector(".note.bad:has-text('not here')")
    page.check("[data-device='0']")
    page.click("[data-start]")
    until(page, lambda: len(sent) == 2)
    assert [each["devices"] for each in sent] == [None, ["0"]]
    assert sent[0]["key"] != sent[1]["key"], "it is another form"


@pytest.mark.slow
def test_data_are_shown_as_the_run_sees_them(page: Any) -> None:
    begin(page)
    page.click("[data-tab=data]")
    page.wait_for_selector(".pictures img", timeout=300_000)
    assert page.locator(".pictures img").count() == 20
    assert page.locator(".classes [role=progressbar]").count() == 10
    assert page.locator("img").last.evaluate("image => image.naturalWidth") > 0


def test_data_are_chosen_by_clicks(page: Any, folder: Path) -> None:
    (folder / "pictures" / "cat").mkdir(parents=True)
    begin(page)
    page.click("[data-field='workload.data.train'] button:has-text('Choose')")
    page.click("dialog li button:has-text('pictures')")
    page.wait_for_selector("dialog li button:has-text('cat')")
    page.click("dialog button:has-text('Use this folder')")
    until(page, lambda: page.input_value("#field-workload-data-train") == str(folder / "pictures"))


def test_edits_are_kept_while_the_server_cannot_be_reached(page: Any) -> None:
    begin(page)
    page.context.set_offline(True)
    page.fill("#field-batch_size", "48")
    page.wait_for_selector("#problems .note.bad:has-text('cannot be reached')")
    page.fill("#field-seed", "9")
    page.wait_for_timeout(600)
    assert page.is_disabled("[data-start]")
    page.context.set_offline(False)
    page.wait_for_selector("[data-ready]")
    page.click("[data-tab=yaml]")
    text = yaml_of(page)
    assert "batch_size: 48" in text
    assert "seed: 9" in text


def test_a_configuration_of_other_software_is_imported_by_upload(page: Any, tmp_path: Path) -> None:
    given = tmp_path / "llama.yaml"
    given.write_text(
        "stage: sft\nfinetuning_type: lora\nmodel_name_or_path: models/mine\ndataset: alpaca\ntemplate: alpaca\n"
        "learning_rate: 1.0e-4\nmixture_of_depths: convert\nlogging_steps: 3\n"
    )
    page.click("summary:has-text('Import a configuration')")
    page.set_input_files("#import", given)
    page.wait_for_selector(".note.bad:has-text('mixture_of_depths')")
    page.click("[data-accept]")
    page.wait_for_selector("[data-imported]")
    page.wait_for_selector("tr:has-text('mixture_of_depths') .badge:has-text('left out')")
    until(page, lambda: page.input_value("#field-name") == "llama")
    assert float(page.input_value("#field-optimizer-lr")) == 1e-4
    page.click("[data-tab=yaml]")
    assert "# Imported from llama.yaml" in yaml_of(page)
    page.reload()
    until(page, lambda: "# Imported from llama.yaml" in yaml_of(page))


def test_the_editor_is_loaded_with_its_tab_alone_and_keeps_the_cursor(page: Any) -> None:
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url))
    begin(page)
    assert not any("codemirror" in url for url in loaded)
    page.click("[data-tab=yaml]")
    text = yaml_of(page)
    assert sum(url.endswith("/codemirror.js") for url in loaded) == 1
    assert page.locator(".cm-lineNumbers .cm-gutterElement:visible").count() >= text.count("\n")
    page.click("#yaml")
    page.keyboard.press("Control+Home")
    page.keyboard.type("# mine ", delay=40)  # slower than a check: its answers come in between
    page.wait_for_timeout(1500)
    page.keyboard.type("and yours\n")
    assert yaml_of(page) == f"# mine and yours\n{text}"
    page.keyboard.press("Control+z")
    assert yaml_of(page) != f"# mine and yours\n{text}"


def test_problems_are_marked_at_their_lines_and_reached_by_keys(page: Any) -> None:
    """The marks are found by sight, by F8, by a click in the list, and by a screen reader."""
    begin(page)
    page.click("[data-tab=yaml]")
    text = yaml_of(page)
    wrong = text.replace("batch_size: 64", "batch_size: 0").replace("lr: 0.1", "lr: fast")
    write_yaml(page, wrong)
    page.wait_for_selector(".problem:has-text('lr: fast')")
    assert page.locator(".problem").count() == page.locator(".problem-number").count() == 2
    assert page.get_attribute("#yaml", "aria-invalid") == "true"
    assert "valid number" in (page.get_attribute(".problem:has-text('lr: fast')", "title") or "")
    page.click("#yaml")
    page.keyboard.press("Control+Home")
    for part in ("batch_size: 0", "lr: fast"):
        page.keyboard.press("F8")
        line = wrong[: wrong.index(part)].count("\n") + 1
        page.wait_for_selector(f".cm-announced:has-text('line {line}:')", state="attached")
        assert page.evaluate(CURSOR) == wrong.index(part)
    page.keyboard.press("Control+Home")
    page.click("#problems button:has-text('batch_size')")
    assert page.evaluate(CURSOR) == wrong.index("batch_size: 0")
    write_yaml(page, "a: [\n")
    page.wait_for_selector("#problems button:has-text('line 2')")
    page.wait_for_selector(".problem-line")  # an empty line, which has no part to be marked
    write_yaml(page, text)
    page.wait_for_selector("[data-ready]")
    assert page.locator(".problem, .problem-line, .problem-number").count() == 0
    assert page.get_attribute("#yaml", "aria-invalid") == "false"


def test_a_plain_field_is_there_where_the_editor_cannot_be_loaded(page: Any) -> None:
    page.route("**/vendor/codemirror.js", lambda route: route.abort())
    begin(page)
    page.click("[data-tab=yaml]")
    text = page.input_value("textarea#yaml")
    page.fill("textarea#yaml", text.replace("batch_size: 64", "batch_size: 0"))
    page.click("#problems button:has-text('batch_size, line')")
    start = page.locator("textarea#yaml").evaluate("area => area.selectionStart")
    assert start == text.index("batch_size: 64")
    page.fill("textarea#yaml", text.replace("batch_size: 64", "batch_size: 16"))
    page.click("[data-tab=form]")
    until(page, lambda: page.input_value("#field-batch_size") == "16")


def test_data_of_ones_own_are_uploaded_where_files_are_chosen(page: Any, folder: Path) -> None:
    begin(page)
    page.click("[data-field='workload.data.train'] .with button")
    file = {"name": "酒店.csv", "mimeType": "text/csv", "buffer": b"text,label\nGood.,1\n"}
    page.set_input_files("dialog #add", file)
    until(page, lambda: page.input_value("#field-workload-data-train") == str(folder / "酒店.csv"))
    page.click("[data-field='workload.data.train'] .with button")
    page.set_input_files("dialog #add", file)
    page.wait_for_selector("dialog .note.bad:has-text('a file of that name')")
    assert (folder / "酒店.csv").read_bytes() == file["buffer"]
