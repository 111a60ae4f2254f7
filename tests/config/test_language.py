"""The run file's block of a language model: its shapes, and what follows from the engine."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest

from drivetrain.config import rules
from drivetrain.config.bad_rows import most_dropped
from drivetrain.config.language_data import DataSource
from drivetrain.config.language_stages import FORMS, STAGES, StageName
from drivetrain.config.load import validate
from drivetrain.config.machine import Machine
from drivetrain.config.notices import notices
from drivetrain.config.resolve import resolved
from drivetrain.config.run import RunConfig
from drivetrain.workloads.base import Workload

CPU = Machine("cpu", "a CPU", 1, 2**33, 2, None, frozenset({"float32"}))
MODEL = {"config": {"model_type": "llama"}}


def raw(stage: str = "sft", model: Any = MODEL, run: dict[str, Any] | None = None, **data: Any) -> dict[str, Any]:
    workload = {"type": "language_model", "stage": stage, "model": model, "data": {"train": "owner/talks", **data}}
    return {"workload": workload, "batch_size": 8, "loop": {"steps": 10}, **(run or {})}


def config(**given: Any) -> RunConfig:
    built, problems = validate(raw(**given), [])
    assert not problems
    assert built is not None
    return built


def problems(**given: Any) -> str:
    built, found = validate(raw(**given), [])
    if built is not None:
        found = [*found, *rules.check(resolved(built, CPU), CPU)]
    return "\n".join(map(str, found))


def test_left_to_itself_it_pretrains_and_packs_what_it_fine_tunes() -> None:
    built, _ = validate({**raw(), "workload": {"type": "language_model", "model": MODEL, "data": {"train": "a/b"}}}, [])
    assert built is not None
    workload: Any = built.workload
    assert (workload.stage, workload.data.packing, workload.data.length) == ("pretrain", True, 256)
    assert (workload.data.too_long, workload.data.bad_rows, workload.data.train_on) == (
        "truncate",
        "error",
        "responses",
    )


@pytest.mark.parametrize("train", ["a/b", {"path": "a/b"}, ["a/b"], [{"path": "a/b"}]], ids=str)
def test_data_are_a_path_a_block_or_a_list_of_either(train: Any) -> None:
    workload: Any = config(train=train, evaluation=train).workload
    assert workload.data.train == workload.data.evaluation == [DataSource(path="a/b")]


@pytest.mark.parametrize(("given", "share"), [("error", 0.0), ("drop", 0.05), (1, 1.0), (0.3, 0.3)])
def test_bad_rows_may_be_left_out_up_to_a_share(given: Any, share: float) -> None:
    workload: Any = config(train="a/b", bad_rows=given).workload
    assert most_dropped(workload.data.bad_rows) == share


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a share above all": ({"bad_rows": 1.5}, "workload.data.bad_rows"),
    "a share of none": ({"bad_rows": 0}, "workload.data.bad_rows"),
    "a switch for a share": ({"bad_rows": True}, "workload.data.bad_rows"),
    "an unknown key": ({"lenght": 9}, "workload.data.lenght"),
    "an unknown key of a source": ({"train": [{"path": "a/b", "wieght": 1}]}, "wieght"),
    "no source": ({"train": []}, "at least 1 item"),
    "an unknown stage": ({"stage": "rlhf"}, "workload.stage"),
    "a weight of nothing": ({"train": {"path": "a/b", "weight": 0}}, "weight"),
    "no rows of a source": ({"train": {"path": "a/b", "samples": 0}}, "samples"),
    "windows of one token": ({"length": 1}, "workload.data.length"),
    "an empty stream buffer": ({"stream_buffer": 0}, "workload.data.stream_buffer"),
    "all held out": ({"evaluation_fraction": 1}, "workload.data.evaluation_fraction"),
    "a vocabulary of bytes alone": ({"model": {**MODEL, "vocabulary_size": 256}}, "workload.model.vocabulary_size"),
    "noise below nothing": ({"model": {**MODEL, "neftune_alpha": -1}}, "workload.model.neftune_alpha"),
    "an unknown kernel": ({"model": {**MODEL, "attention": "fast"}}, "workload.model.attention"),
    "no model": ({"model": {}}, "workload.model: of path and config neither was given"),
    "two models": ({"model": {**MODEL, "path": "a/b"}}, "workload.model: of path and config both were given"),
    "a file that is not there": ({"train": "./no.jsonl"}, "workload.data.train: no.jsonl does not exist"),
    "evaluation data that are not there": (
        {"evaluation": ["./no.jsonl"]},
        "workload.data.evaluation: no.jsonl does not exist",
    ),
    "a registry that is not there": ({"registry": "./none"}, "workload.data.registry: "),
}


@pytest.mark.parametrize(("given", "reported"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_before_anything_is_read(given: dict[str, Any], reported: str) -> None:
    assert reported in problems(**given)


def test_names_of_a_registry_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    assert problems(train="mine.jsonl", registry=str(tmp_path)) == ""


@pytest.mark.parametrize(
    ("engine", "packs"),
    [
        ({"name": "ddp"}, True),
        ({"name": "fsdp"}, True),
        ({"name": "mesh", "pp": 2}, True),
        ({"name": "mesh", "cp": 2}, False),
        ({"name": "dp"}, False),
    ],
    ids=str,
)
def test_engines_that_need_a_sample_a_row_get_padded_batches_and_say_so(engine: dict[str, Any], packs: bool) -> None:
    run = resolved(config(run={"engine": engine, "processes": 2}), CPU)
    workload: Any = run.workload
    assert workload.data.packing is packs
    assert any("padded, not packed" in notice for notice in notices(run, CPU)) is not packs


@pytest.mark.parametrize(
    ("tp", "fused", "words"), [(2, "auto", True), (2, True, True), (2, False, False), (1, True, False)]
)
def test_a_head_that_tensor_parallelism_splits_gives_logits_and_a_note_says_so(
    tp: int, fused: bool | str, words: bool
) -> None:
    engine = {"name": "mesh", "tp": tp, "dp": 2}
    run = config(model={**MODEL, "fused_loss": fused}, run={"engine": engine, "processes": 2 * tp})
    reported = [notice for notice in notices(run, CPU) if notice.startswith("workload.model.fused_loss has no effect")]
    assert len(reported) == words


def test_each_stage_is_an_entry_that_names_a_workload_there_is() -> None:
    assert get_args(StageName) == tuple(STAGES)
    for stage in (*STAGES.values(), *FORMS.values()):
        module, _, name = stage.implementation.partition(":")
        assert issubclass(getattr(import_module(module), name), Workload)
