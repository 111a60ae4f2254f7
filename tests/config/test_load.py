"""Run files and overrides: what is read, what is answered, and that nothing a user writes ends in a traceback."""

from __future__ import annotations

import copy
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.config import rules
from drivetrain.config.field_paths import field_paths
from drivetrain.config.load import load, resolve_key, validate
from drivetrain.config.machine import Machine
from drivetrain.config.notices import notices
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem, UserError
from tests.properties import examples

CPU = Machine("cpu", "a CPU", 1, 2**33, 2, None, frozenset({"float32"}))
IMAGES = {
    "name": "digits",
    "workload": {
        "type": "image_classification",
        "model": {"norm": "group", "config": {"model_type": "resnet", "depths": [1, 1]}},
        "data": {"source": "digits", "flip": True, "mean": [0.5], "image_size": 32},
    },
    "precision": "fp16-mixed",
    "scaler": {"init_scale": 1024.0},
    "engine": "single",
    "batch_size": 64,
    "loop": {"epochs": 3, "max_grad_norm": 1.0},
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "betas": [0.9, 0.99]},
    "schedule": {"name": "cosine", "warmup_ratio": 0.1},
    "evaluation": {"early_stopping": {"patience": 2}},
    "tracking": {"trackers": ["progress", "jsonl"]},
}
TEXTS = {
    "workload": {
        "type": "text_classification",
        "model": {"tokenizer": "vocab.txt", "config": {"model_type": "bert"}},
        "data": {"train": "reviews.csv", "text_column": 1, "label_column": "label"},
    },
    "batch_size_per_device": 8,
    "loop": {"steps": 100},
    "optimizer": {"name": "adamw"},
}
MODULE = {"workload": {"type": "module", "path": "mine.py"}, "batch_size": 4, "loop": {"steps": 1}}
VALID = [IMAGES, TEXTS, MODULE]


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def config_of(raw: dict[str, Any]) -> RunConfig:
    config, problems = validate(copy.deepcopy(raw), [])
    assert not problems
    assert config is not None
    return config


# --- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", VALID, ids=["images", "texts", "module"])
def test_a_config_written_out_and_read_again_is_the_same(raw: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(raw)
    again, problems = load(written(tmp_path, json.dumps(config.model_dump(mode="json"))))
    assert not problems
    assert again == config


def test_numbers_as_people_write_them_are_numbers(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(MODULE))
    for text, value in (("1e-3", 1e-3), ("3E-4", 3e-4), ("0.5", 0.5), ("1", 1.0)):
        config, problems = load(path, [f"lr={text}"])
        assert not problems
        assert config is not None
        assert config.optimizer.lr == value


def test_the_run_is_named_after_its_file_unless_it_names_itself(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(MODULE))
    assert load(path)[0].name == "run"  # type: ignore[union-attr]
    assert load(path, ["name=mine"])[0].folder == Path("runs/mine")  # type: ignore[union-attr]
    assert load(path, ["output=~/mine"])[0].folder == Path.home() / "mine"  # type: ignore[union-attr]


def test_a_config_cannot_be_changed() -> None:
    config = config_of(IMAGES)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.optimizer.lr = 3.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- a\n- list\n", "holds a list"),
        ("just words", "holds a str"),
        ("a: [1, 2", "broken YAML at line 1"),
        ("a: 1\na: 2\n", "broken YAML at line 2"),
        ("a: *nowhere\n", "broken YAML"),
        ("a: !!python/object:os.system x\n", "broken YAML"),
        ("a: \x07\n", "broken YAML"),
    ],
)
def test_a_file_that_is_no_run_file_is_reported_with_why(text: str, reported: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=reported):
        load(written(tmp_path, text))


def test_a_file_that_is_not_text_or_not_there_is_reported(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path / "run.yaml")
    with pytest.raises(UserError, match=r"did you mean .*run\.yaml"):
        load(tmp_path / "rum.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path)


# --- overrides -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("lr", "optimizer.lr"),
        ("optimizer.lr", "optimizer.lr"),
        ("patience", "evaluation.early_stopping.patience"),
        ("data.train", "workload.data.train"),
        ("tokenizer", "workload.model.tokenizer"),
        ("config.hidden_sizes", "workload.model.config.hidden_sizes"),
        ("model.config.rope.theta", "workload.model.config.rope.theta"),
        ("seed", "seed"),
    ],
)
def test_a_key_may_be_cut_short_where_one_field_ends_so(key: str, path: str) -> None:
    assert ".".join(resolve_key(key)) == path


@pytest.mark.parametrize(
    ("key", "reported"),
    [
        ("every_steps", "write checkpoints.every_steps or evaluation.every_steps"),
        ("learning_rate", "there is no such field"),
        ("optimizr.lr", "did you mean optimizer.lr"),
        ("batchsize", "did you mean batch_size"),
    ],
)
def test_a_key_that_fits_no_field_or_several_is_reported_with_which_are_near(key: str, reported: str) -> None:
    with pytest.raises(UserError, match=reported):
        resolve_key(key)


def test_every_full_path_is_a_key() -> None:
    for path, _ in field_paths():
        assert resolve_key(".".join(path)) == path


def test_the_last_override_wins_and_null_takes_the_default_away(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(IMAGES))
    config, problems = load(path, ["lr=1", "lr=2", "max_grad_norm=null", "engine.name=single", "scaler.init_scale=8"])
    assert not problems
    assert config is not None
    assert (config.optimizer.lr, config.loop.max_grad_norm, config.scaler.init_scale) == (2, None, 8)
    assert config.optimizer.momentum == 0.9  # its neighbours stay


def test_options_of_a_short_engine_name_come_beside_what_it_stands_for(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(IMAGES))
    config, problems = load(path, ["engine=zero2", "engine.offload_optimizer=cpu", "processes=2"])
    assert not problems
    assert config is not None
    assert config.engine.model_dump(include={"name", "stage", "offload_optimizer"}) == {
        "name": "deepspeed", "stage": 2, "offload_optimizer": "cpu",
    }  # fmt: skip


@pytest.mark.parametrize("name", [".", "..", "a/b", ""])
def test_a_name_that_is_no_folder_of_its_own_is_refused(name: str) -> None:
    _, problems = validate({**IMAGES, "name": name}, [])
    assert [problem.field for problem in problems] == ["name"]


def test_a_file_in_the_place_of_an_override_is_answered_with_the_option_that_takes_it(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("text\n")
    _, problems = load(written(tmp_path, json.dumps(MODULE)), [str(rows)])
    assert f"--data {rows} of predict" in problems[0].fix


@pytest.mark.parametrize("override", ["lr", "=3", "lr=[1", "", "lr 3"])
def test_what_is_no_override_is_a_problem_beside_the_others(override: str, tmp_path: Path) -> None:
    _, problems = load(written(tmp_path, json.dumps(MODULE)), [override, "sede=3"])
    assert len(problems) == 2
    assert problems[1].field == "sede"


# --- problems --------------------------------------------------------------------------------------------------------


def test_all_problems_of_the_schema_come_at_once(tmp_path: Path) -> None:
    raw = copy.deepcopy(IMAGES) | {"batch_size": -1, "optimiser": {}, "precision": "fp17"}
    raw["optimizer"] |= {"lr": "quick"}  # type: ignore[operator]
    del raw["workload"]["data"]["source"]  # type: ignore[attr-defined]
    _, problems = load(written(tmp_path, json.dumps(raw)))
    words = {found.field for found in problems}
    assert {"batch_size", "optimiser", "precision", "optimizer.lr", "workload.data.source"} <= words
    assert "did you mean optimizer?" in {found.fix for found in problems}


@pytest.mark.parametrize("name", ["batch_size", "loop", "workload"])
def test_a_misspelt_key_is_not_reported_missing_as_well(name: str, tmp_path: Path) -> None:
    raw: dict[str, Any] = copy.deepcopy(IMAGES)
    raw[f"{name}s"] = raw.pop(name)
    run, problems = load(written(tmp_path, json.dumps(raw)))
    assert run is not None
    _, problems = rules.judged(run, problems, CPU)
    assert [(found.field, found.why, found.fix) for found in problems] == [
        (f"{name}s", "there is no such key", f"did you mean {name}?")
    ]


def test_what_is_wrong_inside_of_a_misspelt_block_is_reported_too(tmp_path: Path) -> None:
    raw = {**IMAGES, "optimizers": {"lr": "quick"}, "engine": {"name": "ddp", "ofload": True}}
    del raw["optimizer"]
    _, problems = load(written(tmp_path, json.dumps(raw)))
    assert sorted(found.field for found in problems) == ["engine.ofload", "optimizer.lr", "optimizers"]


def test_a_workload_of_an_unknown_type_is_reported_with_the_known_ones(tmp_path: Path) -> None:
    raw = MODULE | {"workload": {"type": "image_clasification"}}
    _, problems = load(written(tmp_path, json.dumps(raw)))
    assert any("text_classification" in found.why for found in problems)


# --- whatever is written ---------------------------------------------------------------------------------------------

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["fp32", "adamw", "single", "digits", "1e-3", "nan", "-1", "~", "a/b", "runs\x00"]),
)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key and list position in a nested mapping."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [found for key, below in items for found in [(*path, key), *places(below, (*path, key))]]


@st.composite
def mutated(draw: st.DrawFn) -> dict[Any, Any]:
    """A valid run file with one to three keys replaced, removed, renamed or added."""
    raw: Any = copy.deepcopy(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(1, 3))):
        everywhere = places(raw)
        if not everywhere:
            break
        *above, last = draw(st.sampled_from(everywhere))
        node = raw
        for part in above:
            node = node[part]
        change = draw(st.sampled_from(["replace", "remove", "rename", "add"]))
        if change == "replace":
            node[last] = draw(values)
        elif change == "remove":
            del node[last]
        elif isinstance(node, dict):
            name = draw(st.text(min_size=1, max_size=6) | st.sampled_from(["lr", "data", "train", "path", "name"]))
            node[name] = node.pop(last) if change == "rename" else draw(values)
    return raw


def judged(raw: dict[Any, Any]) -> tuple[RunConfig | None, list[Problem]]:
    """As the command line does it: schema, then rules and notices on what could be built."""
    config, problems = validate(raw, [])
    if config is not None:
        problems = problems + rules.check(config, CPU)
        notices(config, CPU)
    return config, problems


@settings(max_examples=examples(400), deadline=None)
@given(mutated())
def test_any_change_of_a_valid_run_file_is_accepted_or_answered(raw: dict[Any, Any]) -> None:
    original = copy.deepcopy(raw)
    config, problems = judged(raw)
    assert config is not None or problems, original
    for found in problems:
        assert found.field
        assert found.why
        assert found.fix
    if config is not None and not problems:
        assert RunConfig.model_validate(config.model_dump(mode="json")) == config


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(VALID), st.data())
def test_any_damage_to_the_text_of_a_run_file_is_accepted_or_answered(raw: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(raw, indent=1)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 10)))
    damaged = text[:start] + data.draw(st.text(max_size=6)) + text[end:]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(damaged, encoding="utf-8", errors="surrogatepass")
        try:
            config, problems = load(path)
        except UserError as error:
            problems, config = list(error.problems), None
    assert config is not None or problems


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(
        st.text(max_size=20)
        | st.builds(
            "{}={}".format,
            st.sampled_from(["lr", "workload", "a.b", "engine", "data", "config.x", "name", "loop.steps.x"]),
            st.text(max_size=8),
        ),
        max_size=3,
    )
)
def test_any_override_is_accepted_or_answered(overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(json.dumps(IMAGES))
        config, problems = load(path, overrides)
    assert config is not None or problems


def test_an_infinity_in_a_free_form_block_is_kept() -> None:
    """Some configurations of Transformers have one (the time step's limits of Mamba); pydantic would write null."""
    model = {"config": {"model_type": "mamba2", "time_step_limit": [0.0, math.inf]}}
    workload = {"type": "language_model", "stage": "pretrain", "model": model, "data": {"train": "a.txt"}}
    config = RunConfig.model_validate({"workload": workload, "batch_size": 2, "loop": {"steps": 1}})
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config
