"""`make gpu`: cases that are kept, cut off and taken up again, its figures, and the page made of them."""

from __future__ import annotations

import importlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.gpu import __main__ as command
from bench.gpu import cases as running
from bench.gpu import parity, plain, report, setting, sides, suite, workload
from bench.gpu.cases import Case, Record, Result, run_part
from bench.gpu.language import SIZES, config_of, folder_of
from bench.gpu.setting import Setting, slug
from bench.gpu.speed import in_turns, peak_flops
from drivetrain.config.load import validate
from drivetrain.config.rules import check_anywhere
from drivetrain.numerics.emulation import fp32_products

ROOT = Path(__file__).resolve().parents[2]
CASES = "tests.bench.gpu_cases"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setattr(running, "stamp", lambda _: {"date": "2026-01-01", "device": "a CPU"})
    return Setting("cpu", "a CPU", tmp_path / "results", tmp_path / "scratch")


def case(folder: Path, name: str, function: str = "quick", seconds: float = 0.0, **more: Any) -> Case:
    given = {"name": name, "journal": str(folder / "journal"), "child": str(folder / "child"), **more.pop("given", {})}
    return Case(name, f"{CASES}:{function}", given, seconds=seconds, **more)


def journal(folder: Path) -> list[str]:
    return (folder / "journal").read_text().split() if (folder / "journal").exists() else []


def run(cases: list[Case], place: Setting, budget: float = 100.0) -> tuple[int, Record]:
    path = place.folder / "part.json"
    left = run_part(cases, Record(path), place, lambda _: None, budget)
    return left, Record(path)


# --- cases -----------------------------------------------------------------------------------------------------------


def test_what_is_done_is_kept_and_not_done_again(place: Setting, tmp_path: Path) -> None:
    missed = case(tmp_path, "b", given={"answer": {"missed": "it differs"}})
    absent = case(tmp_path, "d", given={"answer": {"not_here": "no such precision"}})
    left, record = run([case(tmp_path, "a"), missed, absent], place)
    assert left == 1
    assert (record.results["d"].status, record.results["d"].why) == ("skipped", "no such precision")
    assert record.results["a"].found == {"device": "cpu"}
    assert (record.results["b"].status, record.results["b"].why) == ("missed", "it differs")
    assert run([case(tmp_path, "a"), missed, case(tmp_path, "c")], place)[0] == 0
    assert journal(tmp_path) == ["a", "b", "d", "c", "b"], "what missed its check is tried once more, after others"


def test_a_case_is_not_begun_with_too_little_time_and_comes_next_time(place: Setting, tmp_path: Path) -> None:
    cases = [case(tmp_path, "long", seconds=500), case(tmp_path, "short")]
    assert run(cases, place)[0] == 1
    assert journal(tmp_path) == ["short"]
    assert run(cases, place, budget=600)[0] == 0
    assert journal(tmp_path) == ["short", "long"]


def test_a_case_that_fails_is_tried_twice_after_the_others(place: Setting, tmp_path: Path) -> None:
    broken, fine = case(tmp_path, "broken", "broken"), case(tmp_path, "fine")
    left, record = run([broken], place)
    assert left == 1
    assert record.results["broken"].why == "exit code 1: ValueError: of the case"
    assert run([broken, fine], place)[0] == 0
    assert run([broken, fine], place)[0] == 0
    assert journal(tmp_path) == ["broken", "fine", "broken"]


def is_alive(process: int) -> bool:
    """Returns whether it is there after some seconds still: a killed one goes when the kernel comes to it."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            if psutil.Process(process).status() == psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.slow
def test_a_case_that_does_not_end_goes_with_the_time_and_all_that_it_started(place: Setting, tmp_path: Path) -> None:
    begun = time.monotonic()
    left, record = run([case(tmp_path, "endless", "endless")], place, budget=15)
    assert (left, record.results["endless"].status) == (1, "cut off")
    assert time.monotonic() - begun < 60
    assert not is_alive(int((tmp_path / "child").read_text()))
    assert not list(place.scratch.glob("case-*")), "its folder is gone"


def test_what_is_missing_is_named_and_what_needs_it_skipped(place: Setting, tmp_path: Path) -> None:
    needing = case(tmp_path, "a", needs=("torch", "no-such-package"))
    left, record = run([needing, case(tmp_path, "b", after=("a",))], place)
    assert left == 0
    assert record.results["a"].why == "not installed: no-such-package"
    assert record.results["b"].why == "a is not done"
    assert run([case(tmp_path, "a"), case(tmp_path, "b", after=("a",))], place)[0] == 0, "once it is installed"
    assert journal(tmp_path) == ["a", "b"]


def test_cases_are_chosen_by_name_with_all_that_they_come_after(tmp_path: Path) -> None:
    chain = [case(tmp_path, "model"), case(tmp_path, "speeds", after=("model",)), case(tmp_path, "other")]
    chain.append(case(tmp_path, "plan", after=("speeds",)))
    assert [each.name for each in command.selected(chain, re.compile("^plan"))] == ["model", "speeds", "plan"]
    assert command.selected(chain, re.compile("")) == chain


def test_cases_that_are_not_timed_may_run_at_once(place: Setting, tmp_path: Path) -> None:
    cases = [case(tmp_path, name) for name in "abc"]
    path = place.folder / "part.json"
    assert run_part(cases, Record(path), place, lambda _: None, 100.0, jobs=3) == 0
    assert sorted(journal(tmp_path)) == ["a", "b", "c"]
    assert {result.status for result in Record(path).results.values()} == {"done"}


def test_without_a_package_that_every_part_needs_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "installed", lambda name: None if name in ("typer", "matplotlib") else "1.0")
    monkeypatch.setattr("sys.argv", ["gpu", "--device", "cpu"])
    assert command.main() == 1
    words = capsys.readouterr().out
    assert "typer, matplotlib" in words
    assert "no part can run without typer;" in words


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_gpu_that_is_not_there_is_reported() -> None:
    with pytest.raises(SystemExit, match="make gpu DEVICE=cpu"):
        setting.here("cuda")


# --- what the cases ask for ------------------------------------------------------------------------------------------

GPU = Setting("cuda", "NVIDIA H100 80GB HBM3", Path("results"), Path("scratch"))
CPU = Setting("cpu", "a CPU", Path("results"), Path("scratch"))


@pytest.mark.parametrize("part", command.PARTS)
@pytest.mark.parametrize("where", [GPU, CPU], ids=["cuda", "cpu"])
def test_every_case_fits_into_a_part_and_names_a_function(part: str, where: Setting) -> None:
    cases = importlib.import_module(f"bench.gpu.{command.PARTS[part]}").cases(where)
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    for each in cases:
        assert each.seconds < running.BUDGET_SECONDS
        module, _, function = each.work.partition(":")
        assert callable(getattr(importlib.import_module(f"bench.gpu.{module}"), function))
        assert all(names.index(before) < names.index(each.name) for before in each.after)
    json.dumps([each.given for each in cases])


@pytest.mark.parametrize("part", ["pretrain", "sft", "images", "texts"])
@pytest.mark.parametrize("where", [GPU, CPU], ids=["cuda", "cpu"])
def test_the_run_files_of_our_sides_are_valid(
    part: str, where: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that only a GPU runs."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))  # its files import each other as scripts do
    task = importlib.import_module(f"bench.gpu.{part}")
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "vocab.txt").touch()
    (tmp_path / "train.csv").touch()
    (tmp_path / "evaluation.csv").touch()
    ours = [each.given for each in task.cases(where) if each.given.get("side") == "ours"]
    assert ours
    for given in ours:
        if part in ("pretrain", "sft"):
            raw = sides.our_run(given, where, tmp_path, tmp_path / "train.jsonl")
        else:
            (tmp_path / "train").mkdir(exist_ok=True)
            (tmp_path / "evaluation").mkdir(exist_ok=True)
            made = task.workload(given, where, tmp_path, tmp_path / "cache")
            raw = importlib.import_module("bench.gpu.classifiers").run_of(given, where, made)
        config, problems = validate({**raw, "output": str(tmp_path / "run")}, [])
        assert not problems
        assert config is not None
        assert check_anywhere(config) == []


def test_sides_take_turns_and_the_order_swaps() -> None:
    asked = {"name": "1B", "sides": {"a": {"side": "ours"}, "b": {"side": "trl"}}}
    cases = in_turns([asked], "sides:trained", rounds=2, seconds=1)
    assert [each.name for each in cases] == ["1B | a | 1", "1B | b | 1", "1B | b | 2", "1B | a | 2"]
    assert cases[1].needs == ("trl", "datasets", "peft")
    assert [each.given["seed"] for each in cases] == [0, 0, 1, 1]


@pytest.mark.parametrize(("size", "published"), [("1B", 1_235_814_400), ("8B", 8_030_261_248), ("tiny", None)])
def test_sizes_are_those_that_were_published(size: str, published: int | None) -> None:
    """meta-llama's model cards: Llama-3.2-1B and Llama-3.1-8B."""
    given = SIZES[size]
    tokenizer = SimpleNamespace(eos_token_id=0, pad_token_id=1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(size, 64, tokenizer))
    count = sum(p.numel() for p in model.parameters())
    products = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert published in (count, None)
    assert given.parameters() == products
    assert given.flops_per_token(100) == 6 * products + 12 * given.blocks * given.width * 100


def test_a_devices_peak_is_that_of_its_data_sheet_or_unknown() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("a card of tomorrow") is None


def takes_the_device(file: Path) -> bool:
    text = file.read_text()
    return any(way in text for way in ('usefixtures("device")', 'usefixtures("on_device")', "device: str) ->"))


def test_the_files_that_take_the_device_are_those_that_the_part_runs() -> None:
    helpers = ("conftest.py", "device.py", "test_device.py", "tiny_workload.py", "test_gpu.py")
    found = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "tests").rglob("*.py")
        if file.name not in helpers and takes_the_device(file)
    }
    assert found == set(suite.FILES)
    assert set(suite.SMALL) <= set(suite.FILES)
    for file in suite.GPU_ONLY:
        assert "mark.gpu" in (ROOT / file).read_text()


# --- parity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "precision",
    ["fp32", "bf16-mixed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp16-mixed", "bf16"))],
)
def test_the_run_agrees_with_the_plain_loop_and_a_wrong_one_does_not(precision: str) -> None:
    ours = parity.trained("single", precision, "cpu")
    with fp32_products(True):
        theirs = parity._plain(precision, "cpu")
    start = workload.build_model().state_dict()
    found = parity.judged(ours, theirs, start, parity.TOLERANCE[precision])
    assert "missed" not in found, found
    with pytest.MonkeyPatch.context() as patch, fp32_products(True):
        patch.setattr(plain, "CLIP", 0.8)
        wrong = parity._plain(precision, "cpu")
    assert "weights" in parity.judged(ours, wrong, start, parity.TOLERANCE[precision])["missed"]


@pytest.mark.slow
def test_a_master_copy_is_updated_by_what_its_16_bit_copies_learn() -> None:
    with fp32_products(True):
        curve = parity._plain("bf16-master", "cpu")
        mixed = parity._plain("bf16-mixed", "cpu")
    assert curve.losses != mixed.losses
    assert curve.losses == pytest.approx(mixed.losses, rel=2e-2)
    assert not all(torch.equal(w, w.bfloat16().float()) for w in curve.weights.values()), "the weights stay in fp32"


# --- the page --------------------------------------------------------------------------------------------------------

STAMP = {
    "date": "2026-01-01",
    "device": "NVIDIA H100 80GB HBM3",
    "python": "3.12",
    "platform": "Linux",
    "cores": 16,
    "software": {"device": "cuda", "GPU": "NVIDIA H100 80GB HBM3", "driver": "580.1", "NCCL": "2.28"},
    "packages": {"torch": "2.13"},
}


def side(rate: float, memory: float, mfu: float | None = None) -> dict[str, Any]:
    return {"rate": rate, "peak_bytes": memory * 2**30, "mfu": mfu, "unit": "tokens", "loss": 2.5}


def records(folder: Path, found: dict[str, dict[str, Result]]) -> None:
    for part, results in found.items():
        path = folder / f"{part}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"stamp": STAMP, "cases": {name: vars(each) for name, each in results.items()}}))


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], str]:
    """The page of a device with some results."""

    def of(device: str) -> str:
        where = Setting(device, "NVIDIA H100 80GB HBM3", tmp_path, tmp_path)
        difference = {"loss": 1e-7, "norm": 1e-6, "weights": 1e-6, "tolerance": [1e-5, 1e-4, 1e-4]}
        records(
            where.folder,
            {
                "parity": {
                    "single fp32": Result("done", found=difference),
                    "ddp fp32, 1 over nccl": Result("missed", found={**difference, "loss": 1.0}, why="loss differs"),
                },
                "resume": {"hang": Result("done", found={"seconds": 31.0, "way": "kernel", "ranks": 1})},
                "bench-pretrain": {
                    "1B | ours, bf16-mixed | 1": Result("done", found=side(90, 30, 0.41)),
                    "1B | ours, bf16-mixed | 2": Result("done", found=side(110, 30, 0.43)),
                    "1B | ours, bf16-master | 1": Result("done", found=side(120, 30, 0.44)),
                    "1B | trainer | 1": Result("done", found=side(80, 40, 0.3)),
                },
                "bench-sft": {
                    "1B, all weights | ours, bf16-mixed | 1": Result("done", found=side(150, 20)),
                    "1B, all weights | trl | 1": Result("done", found=side(110, 25)),
                    "1B, all weights | trl | 2": Result("failed", why="exit code 1: out of memory"),
                },
            },
        )
        assert report.write_page(where) == 0
        return where.page.read_text()

    return of


def test_the_page_shows_goals_as_reached_or_missed(written: Callable[[str], str]) -> None:
    page = written("cuda")
    assert page.startswith("# drivetrain on NVIDIA H100 80GB HBM3\n")
    assert "rehearsal" not in page
    assert "| ours, bf16-mixed | 2 | 100 | 42.0% | 40% reached | 30.00 | 2.500 |" in page
    assert "| ours, bf16-master | 1 | 120 | 44.0% | 45% MISSED | 30.00 | 2.500 |" in page
    assert "| ours, bf16-mixed over trainer | 1.25 | 1.2 reached | 0.75 |  |" in page
    assert "| ours, bf16-mixed over trl | 1.36 | 1.5 MISSED | 0.80 | 0.7 MISSED |" in page
    assert "| ddp fp32, 1 over nccl | 1.0e+00 (1e-05) | 1.0e-06 (1e-04) | 1.0e-06 (1e-04) | DIFFERS |" in page
    assert "- hang: reported after 31 s (kernel, 1 rank(s))" in page
    assert "1B, all weights | trl | 2: failed: exit code 1: out of memory" in page
    assert "driver 580.1, NCCL 2.28, torch 2.13" in page
    assert "Measured on 2026-01-01." in page
    assert "## bench-images\n\nNot run." in page


def test_a_rehearsals_page_says_that_it_is_one(written: Callable[[str], str]) -> None:
    page = written("cpu")
    assert page.startswith("# drivetrain on a CPU\n\n**A rehearsal on a CPU.**")
    assert "H100" not in page.partition("## doctor")[0]
    assert "reached" not in page
    assert "MISSED" not in page


def test_without_results_there_is_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = Setting("cpu", "a CPU", tmp_path, tmp_path)
    assert report.write_page(where) == 1
    assert "run `make gpu` first" in capsys.readouterr().out
    assert not where.page.exists()


def test_a_devices_name_makes_a_files_name() -> None:
    assert slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    assert folder_of(GPU, "1B") == Path("scratch/models/1B")
