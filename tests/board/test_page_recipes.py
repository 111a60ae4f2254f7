"""Trainings of each kind in a real browser, by clicks alone: texts, adapters on a quantised base, preferences, two
ranks, stopped and gone on, and a chat with the result."""

from __future__ import annotations

import csv
import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.board.browsing import SECONDS, begin, until, visit
from tests.conftest import SHARED_DATA
from tests.small_tokenizers import made
from tests.tiny_language import LLAMA, ROWS

TRAINED = 120_000  # milliseconds until a training has ended on a busy machine
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
GOOD, BAD = "房间干净，服务很好", "房间太脏，服务很差"


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
    """A language model of next to nothing with its tokenizer, where the recipes look for one."""
    tokenizer = made("bytes")
    tokenizer.chat_template = TEMPLATE
    place = folder / "models" / "my-model"
    sizes = {name: value for name, value in LLAMA.items() if name != "model_type"} | {"max_position_embeddings": 512}
    torch.manual_seed(0)  # of which no answer below ends by itself
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tokenizer))).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def registry(folder: Path) -> Path:
    """Data sets in LLaMA-Factory's form: a few rows of its own where they are beside the checkout, else made ones."""
    place = folder / "llama-factory"
    place.mkdir()
    pairs = [
        {"conversations": [{"from": "human", "value": f"say {n}"}], "chosen": {"from": "gpt", "value": f"it is {n}"},
         "rejected": {"from": "gpt", "value": "no"}} for n in range(24)
    ]  # fmt: skip
    for name, made_rows in (("alpaca_en_demo", ROWS), ("alpaca_zh_demo", ROWS), ("dpo_en_demo", pairs)):
        real = SHARED_DATA / "sft" / f"{name}.json"
        rows = json.loads(real.read_text(encoding="utf-8"))[:24] if real.is_file() else made_rows
        (place / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
    ranked = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    sets: dict[str, Any] = {name: {"file_name": f"{name}.json"} for name in ("alpaca_en_demo", "alpaca_zh_demo")}
    sets["dpo_en_demo"] = {
        "file_name": "dpo_en_demo.json",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": ranked,
    }
    (place / "dataset_info.json").write_text(json.dumps(sets))
    return place


@pytest.fixture(scope="module")
def reviews(folder: Path) -> Path:
    """Hotel reviews, good and bad: some of the real ones where they are beside the checkout, else made ones. Beside
    them the characters that they consist of, as a vocabulary."""
    real = SHARED_DATA / "ChnSentiCorp_htl_all.csv"
    rows = [{"label": str(n % 2), "review": (BAD, GOOD)[n % 2] + "！" * (n % 5)} for n in range(160)]
    if real.is_file():
        with real.open(encoding="utf-8-sig") as opened:
            every = list(csv.DictReader(opened))
            rows = [*islice(every, 80), *every[-80:]]
    place = folder / "hotels"
    place.mkdir()
    with (place / "reviews.csv").open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, ["label", "review"])
        writer.writeheader()
        writer.writerows(rows)
    letters = sorted({letter for row in rows for letter in row["review"] if not letter.isspace()})
    (place / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]), "utf-8")
    return place


def begin_without_data(page: Any, recipe: str) -> None:
    """Begins with a recipe whose data are not where it looks for them, as the page then says."""
    page.click(f"[data-recipe={recipe}]")
    page.wait_for_selector("#problems .note.bad")
    assert page.is_disabled("[data-start]")


def choose(page: Any, field: str, *names: str) -> None:
    """Chooses a file, or a folder, by the file picker of a field."""
    page.click(f"[data-field='{field}'] button:has-text('Choose')")
    for name in names:
        page.click(f"dialog li button:has-text('{name}')")
    if "." not in names[-1]:
        page.click("dialog button:has-text('Use this folder')")


def start(page: Any, name: str) -> None:
    """Names the run and starts it."""
    page.fill("#field-name", name)
    page.wait_for_selector("[data-ready]")
    page.click("[data-start]")
    page.wait_for_url(f"**/#/runs/{name}")


def ended(page: Any, state: str = "completed") -> None:
    page.wait_for_selector(f"main .badge:text-is('{state}'), main .badge.bad", timeout=TRAINED)
    shown = page.inner_text("main .badge >> nth=0")
    assert shown == state, page.inner_text("main")


def find(page: Any, field: str) -> str:
    """Searches a field that is not among the common ones; returns its selector."""
    page.fill("#search-fields", field)
    return f"#field-{field.replace('.', '-')}"


@pytest.mark.long
def test_hotel_reviews_are_learned_by_clicks_alone(page: Any, reviews: Path) -> None:  # noqa: ARG001
    begin_without_data(page, "hotel-bert")
    choose(page, "workload.data.train", "hotels", "reviews.csv")
    choose(page, "workload.model.tokenizer", "hotels", "vocab.txt")
    page.fill("#field-workload-data-max_length", "32")
    page.fill("#field-loop-epochs", "2")
    start(page, "hotels")
    ended(page)
    page.wait_for_selector("[data-chart=accuracy] canvas")


@pytest.mark.long
def test_an_adapter_on_a_quantised_base_is_trained_and_chatted_with(page: Any, base: Path, registry: Path) -> None:  # noqa: ARG001
    begin_without_data(page, "alpaca-qlora")
    page.uncheck("#field-quantised_base")
    page.wait_for_selector("#field-quantised_base-format", state="detached")
    page.check("#field-quantised_base")
    page.select_option("#field-quantised_base-format", "nf4")
    choose(page, "workload.data.registry", "llama-factory")
    page.fill("#field-workload-data-length", "256")
    page.fill("#field-loop-epochs", "1")
    page.fill("#field-batch_size", "8")
    start(page, "qlora")
    ended(page)
    visit(page, "#/chat")
    page.select_option("#model-0", "qlora")
    page.click("[data-load]")
    page.wait_for_selector("text=Ready", timeout=TRAINED)
    page.click("summary:has-text('ampling')")
    page.fill("#s-max_tokens", "8")
    page.fill("#s-temperature", "0")
    late: list[Any] = []  # questions after the chat's state, answered once it is unloaded

    def hold(asked: Any) -> None:
        late.append(asked) if asked.request.method == "GET" else asked.continue_()

    page.route(re.compile(r"/api/chat/[^/]+$"), hold)
    page.fill("#message", "Who are you?")
    page.click("button:has-text('Send')")
    page.wait_for_selector(".message.assistant span.quiet", timeout=TRAINED)
    assert page.inner_text(".message.assistant span.quiet").startswith("8 tokens")
    page.click("button:has-text('Unload')")
    page.wait_for_selector("[data-load]:not(:disabled)")
    assert late
    for asked in late:
        with page.expect_response(asked.request.url):
            asked.continue_()
    page.wait_for_timeout(300)
    assert page.is_visible("[data-load]")
    page.unroute(re.compile(r"/api/chat/[^/]+$"))
    ask_beside_its_base(page)


def ask_beside_its_base(page: Any) -> None:
    """Asks a run and its base one question: one load of the weights, and two answers at once."""
    page.select_option("#model-1", label="its base, without the adapter")
    with page.expect_response(lambda answer: answer.url.endswith("/api/chat")) as loaded:
        page.click("[data-load]")
    assert loaded.value.json()["command"].endswith(" --with-base")
    page.wait_for_selector("[data-column='1'] [role=status]:has-text('adapter switched off')", timeout=TRAINED)
    assert page.locator("[data-load]").count() == 0
    asked: list[Any] = []
    page.on("request", lambda each: asked.append(each.post_data_json) if each.url.endswith("/reply") else None)
    page.fill("#message", "Who are you?")
    page.click("button:has-text('Send')")
    for column in (0, 1):
        page.wait_for_selector(f"[data-column='{column}'] .message.assistant span.quiet", timeout=TRAINED)
        assert "8" in page.inner_text(f"[data-column='{column}'] .message.assistant span.quiet")
    assert sorted(each["of_base"] for each in asked) == [False, True]
    assert {each["messages"][0]["content"] for each in asked} == {"Who are you?"}
    page.click("header button[lang=zh-CN]")
    page.wait_for_selector("h2:text-is('qlora 的基座')")
    page.select_option("#model-1", "")
    page.wait_for_selector("[data-column='1']", state="detached")
    page.click("button:has-text('卸载')")
    page.wait_for_selector("[data-load]")


@pytest.mark.long
def test_preferences_are_learned_by_clicks_alone(page: Any, base: Path, registry: Path) -> None:  # noqa: ARG001
    begin_without_data(page, "preferences-dpo")
    choose(page, "workload.data.registry", "llama-factory")
    page.fill("#field-workload-data-length", "512")
    page.select_option("#field-workload-stage", "dpo")
    page.fill("#field-batch_size", "8")
    start(page, "dpo")
    ended(page)
    page.wait_for_selector("[data-chart=reward_accuracy] canvas")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero2"])
def test_a_run_on_two_ranks_is_started_by_clicks_alone(page: Any, folder: Path, engine: str) -> None:
    begin(page)
    page.select_option("#field-engine", engine)
    page.fill("#field-processes", "2")
    page.fill("#field-loop-epochs", "1")
    start(page, f"two-{engine}")
    ended(page)
    report = json.loads((folder / "runs" / f"two-{engine}" / "report.json").read_text())
    assert (report["engine"], len(report["ranks"])) == (engine, 2)


@pytest.mark.long
def test_a_run_is_stopped_saved_and_goes_on(page: Any, folder: Path) -> None:
    begin(page)
    page.fill("#field-loop-epochs", "12")
    start(page, "stopped")
    events = folder / "runs" / "stopped" / "events.jsonl"
    until(page, lambda: events.is_file() and '"step"' in events.read_text())
    page.click("[data-action=stop]")
    assert "Saves a checkpoint" in page.inner_text("dialog p")
    page.click("dialog button.main")
    ended(page, "interrupted, resumable")
    page.click("[data-action=resume]")
    page.click("dialog button.main")
    page.wait_for_selector("main .badge:text-is('running'), main .badge:text-is('starting')", timeout=SECONDS * 1000)
    ended(page)
    steps = [
        found["step"] for line in events.read_text().splitlines() if (found := json.loads(line))["event"] == "step"
    ]
    assert steps == sorted(set(steps))
    report = json.loads((folder / "runs" / "stopped" / "report.json").read_text())
    assert report["steps"] == steps[-1] == 12 * 23


@pytest.mark.slow
def test_a_comparison_is_started_from_the_form_and_shown(page: Any, folder: Path) -> None:
    begin(page)
    page.fill("#field-loop-epochs", "1")
    page.fill("#field-name", "settings")
    page.wait_for_selector("[data-ready]")
    page.click("summary:has-text('Compare settings instead')")
    assert page.is_disabled("[data-start-matrix]")
    page.check("[data-axis='precision=fp32']")
    page.check("[data-axis='precision=bf16-mixed']")
    page.fill("#matrix-others", "seed=1,2")
    page.click("[data-start-matrix]")
    page.wait_for_url("**/#/compare?matrix=settings-compare")
    page.wait_for_selector("[data-matrix]", timeout=TRAINED)
    rows = page.locator("[data-matrix] tbody tr").all_inner_texts()
    assert [row.split("\t")[:2] for row in rows] == [[p, s] for p in ("fp32", "bf16-mixed") for s in "12"]
    assert all("completed" in row for row in rows)
    with page.expect_download() as begun:
        page.click("[data-page]")
    assert "<svg" in Path(begun.value.path()).read_text(encoding="utf-8")
    visit(page, "#/runs")
    page.wait_for_selector("h2:has-text('History')")
    assert page.locator("tbody a:has-text('settings-compare')").count() == 0
    page.go_back()
    page.click("[data-forget]")
    page.click("dialog button.danger")
    until(page, lambda: not (folder / "runs" / "settings-compare").exists())
