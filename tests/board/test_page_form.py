"""A new run in a real browser, by clicks alone: form, YAML, plan and data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.board.browsing import begin, until, write_yaml, yaml_of


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
    page.wait_for_selector("dt:has-text('Parameters') + dd:has-text('20,346 in all')", timeout=300_000)
    assert page.inner_text("dt:has-text('Memory') + dd").endswith("a device")
    assert "free" in page.inner_text("dt:has-text('Checkpoints') + dd")


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


def test_a_plain_field_is_there_where_the_editor_cannot_be_loaded(page: Any) -> None:
    page.route("**/vendor/codemirror.js", lambda route: route.abort())
    begin(page)
    page.click("[data-tab=yaml]")
    page.fill("textarea#yaml", page.input_value("textarea#yaml").replace("batch_size: 64", "batch_size: 16"))
    page.click("[data-tab=form]")
    until(page, lambda: page.input_value("#field-batch_size") == "16")
