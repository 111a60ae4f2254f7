"""Types of values: what YAML and JSON can write is taken for what it is, and nothing else is converted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from ruamel.yaml import YAML

from drivetrain.config.field_paths import field_paths
from drivetrain.config.load import load, validate
from drivetrain.config.run import RunConfig
from drivetrain.errors import Problem
from drivetrain.runtime.run_folder import RunFolder
from tests.config.test_load import IMAGES, MODULE, VALID
from tests.properties import examples

ROOT = Path(__file__).resolve().parents[2]


def changed(key: str, value: Any) -> dict[str, Any]:
    """A valid run file with one dotted key set."""
    raw: dict[str, Any] = json.loads(json.dumps(MODULE))
    node = raw
    *above, last = key.split(".")
    for part in above:
        node = node.setdefault(part, {})
    node[last] = value
    return raw


def answered(key: str, value: Any) -> list[Problem]:
    return validate(changed(key, value), [])[1]


def run_of(key: str, value: Any) -> RunConfig:
    run, problems = validate(changed(key, value), [])
    assert not problems
    assert run is not None
    return run


REFUSED: list[tuple[str, Any, str]] = [
    ("optimizer.lr", True, "true was given; input should be a valid number"),
    ("optimizer.lr", "3e-4", "'3e-4' was given; input should be a valid number"),
    ("loop.max_grad_norm", "1e5", "'1e5' was given; input should be a valid number"),
    ("loop.steps", "5", "'5' was given; input should be a valid integer"),
    ("loop.steps", True, "true was given; input should be a number"),
    ("loop.steps", 5.5, "5.5 was given; input should be a valid integer"),
    ("micro_batch_size", "8", "'8' was given; input should be a valid integer, or 'auto'"),
    ("engine", {"name": "deepspeed", "stage": True}, "true was given; input should be a number"),
    ("recompute", 1, "1 was given; input should be a valid boolean"),
    ("compile", "yes", "'yes' was given; input should be a valid boolean"),
    ("name", 5, "5 was given; input should be a valid string"),
    ("optimizer.betas", [0.9, "0.99"], "'0.99' was given; input should be a valid number"),
    ("optimizer.betas", 0.9, "0.9 was given; input should be a list"),
    ("workload.path", "", "'' was given; input should be a path"),
    ("workload.path", 5, "5 was given; input should be a path"),
    ("workload.path", "a\0b", "it has a NUL character"),
    ("output", "", "'' was given; input should be a path"),
    ("evaluation.metric", "", "at least 1 character"),
    ("tracking.trackers", [""], "at least 1 character"),
    ("output", "x" * 300, "a name has at most 255 bytes"),
    ("workload", {"type": "text_classification", "model": {}, "data": {"train": "x" * 300}}, "or a hub id"),
    ("optimizer.name", "/proc/self/mem", "others as package.module:Class"),
    ("optimizer.name", "./mine.py:Best", "others as package.module:Class"),
    ("optimizer.name", "mine:", "others as package.module:Class"),
    ("optimizer.name", "adan", "known: sgd, adam, adamw, adafactor"),
    ("workload", None, "null was given; input should be a block of keys"),
]


@pytest.mark.parametrize(("key", "value", "words"), REFUSED, ids=[f"{key}={value!r}" for key, value, _ in REFUSED])
def test_a_value_of_another_type_is_refused_with_what_was_given(key: str, value: Any, words: str) -> None:
    (found,) = answered(key, value)
    assert found.field.startswith(key)
    assert words in found.why


TAKEN: list[tuple[str, Any, Any]] = [
    ("optimizer.lr", 1, 1.0),
    ("loop.steps", 1e3, 1000),
    ("seed", 1.0, 1),
    ("workload.path", "some.py", Path("some.py")),
    ("optimizer.betas", [0.5, 0.25], (0.5, 0.25)),
    ("optimizer.name", "package.module:Class", "package.module:Class"),
    ("optimizer.name", "package.module.Class", "package.module.Class"),
    ("hang_seconds", None, None),
    ("numerics.spike_factor", None, None),
]


@pytest.mark.parametrize(("key", "value", "wanted"), TAKEN, ids=[f"{key}={value!r}" for key, value, _ in TAKEN])
def test_what_yaml_has_no_other_form_for_is_taken(key: str, value: Any, wanted: Any) -> None:
    found: Any = run_of(key, value)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == wanted
    assert type(found) is type(wanted)


def values_with_defaults() -> list[tuple[str, Any]]:
    """Each field that stands in every run, and has a default that is not null."""
    plain = [(path, info) for path, info in field_paths() if path[0] not in ("workload", "engine", "adapter")]
    top = validate(changed("seed", 0), [])[0]
    found = []
    for path, info in plain:
        node: Any = top
        for part in path[:-1]:
            node = getattr(node, part, None)
        if node is not None and not info.is_required() and info.default is not None:
            found.append((".".join(path), info.default))
    return found


@pytest.mark.parametrize(("key", "default"), values_with_defaults(), ids=[key for key, _ in values_with_defaults()])
def test_null_gives_every_field_and_block_its_default_back(key: str, default: Any, tmp_path: Path) -> None:
    if key in ("hang_seconds", "numerics.spike_factor"):
        pytest.skip("null means none there")
    if key == "name":
        default = "run"
    (tmp_path / "run.yaml").write_text(json.dumps(MODULE))
    run, problems = load(tmp_path / "run.yaml", [f"{key}=null"])
    assert not problems
    for part in key.split("."):
        run = getattr(run, part)
    assert run == default


def test_a_block_taken_back_counts_as_left_out(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps({**IMAGES, "engine": None, "optimizer": {"name": "sgd", "lr": None}}))
    run, problems = load(tmp_path / "run.yaml", ["evaluation=null"])
    assert not problems
    assert run is not None
    assert run.model_fields_set.isdisjoint({"engine", "evaluation"})
    assert run.optimizer.model_fields_set == {"name"}
    assert (run.evaluation.early_stopping, run.optimizer.lr, run.engine.name) == (None, 1e-3, "single")


def test_null_within_a_mapping_of_others_is_a_value() -> None:
    assert run_of("optimizer.options", {"maximize": None}).optimizer.options == {"maximize": None}


def test_the_schema_for_editors_takes_null_where_the_run_file_does() -> None:
    optimizer = RunConfig.model_json_schema()["$defs"]["Optimizer"]["properties"]
    assert {"type": "null"} in optimizer["lr"]["anyOf"]
    assert None in RunConfig.model_json_schema()["properties"]["precision"]["enum"]


FILES = [*sorted((ROOT / "recipes").glob("*.yaml")), *sorted((ROOT / "examples").rglob("*.yaml"))]


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_run_file_that_ships_loads_and_so_does_what_its_run_writes(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    run, problems = load(file)
    assert not problems
    assert run is not None
    assert reloaded(run, tmp_path) == run


def reloaded(run: RunConfig, folder: Path) -> RunConfig:
    """The run of the run.yaml that a run leaves in its folder."""
    RunFolder(folder).describe(run, {})
    again, problems = load(RunFolder(folder).run_file)
    assert not problems
    assert again is not None
    return again


numbers = st.floats(1e-8, 1e8)
texts = st.text(min_size=1, max_size=8).filter(lambda text: "\0" not in text)
free = st.dictionaries(
    texts, st.recursive(st.none() | st.booleans() | st.integers() | numbers | st.text(max_size=6), st.lists), max_size=3
)


@settings(max_examples=examples(100))
@example(raw=MODULE, changes={"optimizer": {"name": "adamw", "options": {"?a": "?0", ":": ":0"}}})
@example(raw=MODULE, changes={"optimizer": {"name": "adamw", "options": {"a": "\x85", "\u2028": "\U0001f600"}}})
@given(
    raw=st.sampled_from(VALID),
    changes=st.fixed_dictionaries(
        {},
        optional={
            "optimizer": st.fixed_dictionaries(
                {"name": st.sampled_from(["adamw", "a.b:C"])}, optional={"lr": numbers, "eps": numbers, "options": free}
            ),
            "output": texts.filter(
                lambda text: text.isprintable() and not re.match(r"~|\w+:/", text)
            ),  # a home, an address
            "seed": st.integers(0, 2**32 - 1),
            "evaluation": st.none() | st.fixed_dictionaries({}, optional={"metric": texts}),
            "recompute": st.booleans() | st.just("selective"),
            "engine": st.sampled_from(["ddp", "zero2", "mesh-pp2-tp2", "accelerate-fsdp"]),
        },
    ),
)
def test_a_run_file_that_a_run_writes_gives_the_same_run(
    raw: dict[str, Any], changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    run, problems = validate(json.loads(json.dumps({**raw, **changes})), [])
    assert not problems
    assert run is not None
    assert reloaded(run, tmp_path_factory.mktemp("run")) == run


@pytest.mark.parametrize(("override", "wanted"), [("lr=3e-4", 3e-4), ("lr=1", 1.0), ("loop.steps=1e2", 100)])
def test_an_override_is_of_the_type_that_yaml_gives_it(override: str, wanted: float, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(MODULE))
    run, problems = load(tmp_path / "run.json", [override])
    assert not problems
    assert run is not None
    assert wanted in (run.optimizer.lr, run.loop.steps)


@pytest.mark.parametrize("override", ["lr=true", "lr='3e-4'", "loop.steps='5'", "output=''", "seed=yes"])
def test_an_override_of_another_type_is_refused(override: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(MODULE))
    _, [found] = load(tmp_path / "run.json", [override])
    assert "was given" in found.why


def test_a_task_in_json_gives_the_same_run() -> None:
    """As ranks get it."""
    for raw in VALID:
        run, _ = validate(json.loads(json.dumps({**raw, "output": "here", "adapter": ["lora"]})), [])
        assert run is not None
        assert TypeAdapter(RunConfig).validate_json(run.model_dump_json()) == run


def test_yaml_dates_are_texts(tmp_path: Path) -> None:
    YAML(typ="safe", pure=True).dump(MODULE, tmp_path / "run.yaml")
    run, problems = load(tmp_path / "run.yaml", ["name=2024-01-31"])
    assert not problems
    assert run is not None
    assert run.name == "2024-01-31"
