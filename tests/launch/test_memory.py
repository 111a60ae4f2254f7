"""Runs whose memory runs out: cut smaller they end with the curve that they would have had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.checkpoint.directory import load, newest_good
from drivetrain.checkpoint.state import same
from drivetrain.config.files import read_yaml
from drivetrain.tracking.jsonl import read_events
from tests.launch.test_start import finished, finished_here, losses, prepared, report

# as a GPU's allocator does it, from the third step on, where more than two samples are there at once
SHORT = "if Model.steps > 6 and len(x) > 2: raise torch.OutOfMemoryError('CUDA out of memory')"
# a layer that takes 192 MiB for each sample
WIDE = "return super().forward(x) + x.mean(1)[:, None].expand(-1, 48 * 2**20).exp().mean(1)[:, None] * 0"


def warnings(folder: Path) -> str:
    return " ".join(e["message"] for e in read_events(folder / "events.jsonl") if e["event"] == "warning")


Cli = Callable[..., tuple[int, str, str]]


def test_one_process_takes_the_window_back_and_goes_on_with_smaller_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drivetrain: Cli
) -> None:
    roomy = tmp_path / "roomy"
    roomy.mkdir()
    monkeypatch.chdir(prepared(roomy))
    assert drivetrain("train", "run.yaml", "output=whole", "micro_batch_size=2")[0] == 0
    monkeypatch.chdir(prepared(tmp_path, SHORT))
    assert drivetrain("train", "run.yaml", "output=short")[0] == 0
    assert losses(Path("short")) == pytest.approx(losses(roomy / "whole"), rel=1e-5)
    words = warnings(Path("short"))
    assert "step 7: out of memory with 8 samples at once; it is made again, and the run goes on, with" in words
    assert "with 4 samples at once; it is made again, and the run goes on, with micro-batches of at most 2" in words
    # resumed with the same run file it is cut as it was, and not tried again with more
    assert drivetrain("train", "run.yaml", "output=short", "loop.steps=16", "--resume")[0] == 0
    assert "micro-batches of at most 2, as this run did before" in warnings(Path("short"))
    assert warnings(Path("short")).count("out of memory") == 2


@pytest.mark.long
def test_where_one_sample_does_not_fit_the_run_ends_with_what_to_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drivetrain: Cli
) -> None:
    monkeypatch.chdir(prepared(tmp_path, "raise torch.OutOfMemoryError('CUDA out of memory')"))
    code, _, reported = drivetrain("train", "run.yaml", "output=none")
    assert code == 1
    assert "step 1: out of memory with 1 sample(s) at once: try recompute: true" in reported
    code, _, reported = drivetrain("train", "run.yaml", "output=none", "micro_batch_size=auto", "--overwrite")
    assert code == 1
    assert "out of memory in micro-batches of 1 sample(s)" in reported


def test_a_model_that_does_not_fit_is_a_shortage_and_no_mistake_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drivetrain: Cli
) -> None:
    monkeypatch.chdir(prepared(tmp_path))
    text = Path("workload.py").read_text()
    Path("workload.py").write_text(text.replace("    return Model(", "    torch.empty(2**46)\n    return Model("))
    code, _, reported = drivetrain("train", "run.yaml", "output=none")
    assert code == 1
    assert "out of memory in building the model" in reported
    assert "try recompute" in reported


def test_a_loss_that_does_not_decompose_is_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drivetrain: Cli
) -> None:
    monkeypatch.chdir(prepared(tmp_path, SHORT))
    with Path("workload.py").open("a") as file:
        file.write("splits_batches = False\n")
    code, _, reported = drivetrain("train", "run.yaml", "output=none")
    assert code == 1
    assert "step 7: out of memory with 8 sample(s) at once" in reported
    code, _, reported = drivetrain("train", "run.yaml", "output=auto", "micro_batch_size=auto")
    assert code == 2
    assert "micro_batch_size: auto may be < the batch (8), but this loss does not decompose" in reported


@pytest.mark.long
def test_ranks_start_again_from_the_newest_checkpoint_with_half_of_what_did_not_fit(tmp_path: Path) -> None:
    place = prepared(tmp_path, SHORT.replace("if ", "if os.environ.get('RANK') == '1' and "))
    (place / "roomy").mkdir()
    prepared(place / "roomy")
    spread = ("engine=ddp", "processes=2", "checkpoints.every_steps=4")
    finished_here(place / "roomy", "train", "run.yaml", "output=../whole", "micro_batch_size=2")
    finished(place, "train", "run.yaml", "output=short", *spread)
    assert losses(place / "short") == pytest.approx(losses(place / "whole"), rel=1e-5)
    assert "rank 1: out of memory in micro-batches of 4 sample(s)" in warnings(place / "short")
    assert "Going on with micro-batches of at most 2" in warnings(place / "short")
    started = [e["first_step"] for e in read_events(place / "short" / "events.jsonl") if e["event"] == "run_started"]
    assert started == [0, 4]
    assert report(place / "short")["restarts"] == [], "it is no death"


@pytest.mark.slow
def test_auto_finds_the_largest_that_a_limit_leaves_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drivetrain: Cli
) -> None:
    """192 MiB a sample: what the limit leaves is for some of the eight and not for all."""
    place = prepared(tmp_path, WIDE)
    run = ("train", "run.yaml", "loop.steps=2", "micro_batch_size=auto")
    monkeypatch.chdir(place)
    assert drivetrain(*run, "output=all")[0] == 0
    assert read_yaml(place / "all" / "run.yaml")["micro_batch_size"] == 8
    finished(place, *run, "output=some", "memory_limit=1.3")
    size = read_yaml(place / "some" / "run.yaml")["micro_batch_size"]
    assert 1 <= size < 8
    assert f"micro_batch_size is {size}: of the longest samples" in warnings(place / "some")
    assert losses(place / "some") == pytest.approx(losses(place / "all"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dp", "ddp", "fsdp", "zero2", "zero3", "accelerate-fsdp", "mesh-dp2"])
def test_auto_ends_below_what_does_not_fit_under_every_engine(tmp_path: Path, engine: str) -> None:
    place = prepared(tmp_path, "if len(x) > 2: raise torch.OutOfMemoryError('CUDA out of memory')")
    spread = ("train", "run.yaml", f"engine={engine}", "processes=2", "loop.steps=3")
    finished(place, *spread, "output=auto", "micro_batch_size=auto", "evaluation.batch_size=2")
    finished(place, *spread, "output=by-hand", "micro_batch_size=2", "evaluation.batch_size=2")
    assert read_yaml(place / "auto" / "run.yaml")["micro_batch_size"] == 2
    assert losses(place / "auto") == losses(place / "by-hand")
    states = [newest_good(place / name / "checkpoints")[0] for name in ("auto", "by-hand")]
    assert same(*(load(path)["model"] for path in states if path is not None))
