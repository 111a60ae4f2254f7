"""The form is the run file: the same fields, the same checks, the same text."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.board import form_routes, static_files
from drivetrain.board.form import SHORT_FORMS, form
from drivetrain.board.run_file import check, command, edited, flat, flow, values_of
from drivetrain.config.field_paths import field_paths
from drivetrain.config.files import parsed_yaml
from drivetrain.config.load import load, validate
from drivetrain.errors import UserError
from drivetrain.init.catalogue import recipe, recipes
from drivetrain.launch.prepare import judged
from drivetrain.runtime.hardware import detect
from tests.board.boards import DIGITS, FixedMachine, ask, serving

RECIPES = [name for name, _ in recipes()]
MACHINE = FixedMachine().machine()


def test_every_field_of_a_run_file_is_in_the_form_with_its_documentation() -> None:
    fields = form()["fields"]
    documented = {(each["path"], each["doc"]) for each in fields if not each.get("tag")}
    tags = {each["path"] for each in fields if each.get("tag")}
    for path, info in field_paths():
        dotted = ".".join(path)
        if ".".join(path[:3]) in SHORT_FORMS and len(path) > 3:
            continue  # a data set in full is for the YAML; in the form it is its path
        assert dotted == "output" or dotted in tags or (dotted, info.description or "") in documented, dotted


def test_fields_that_exist_under_the_same_conditions_have_different_paths() -> None:
    seen = [(each["path"], str(each.get("when"))) for each in form()["fields"]]
    assert len(seen) == len(set(seen))


def test_a_condition_names_a_field_that_chooses_among_such_values() -> None:
    choices: dict[str, set[str]] = {}
    for each in form()["fields"]:
        if each.get("tag"):
            choices.setdefault(each["path"], set()).update(each["choices"])
    for each in form()["fields"]:
        for condition in each.get("when", []):
            assert set(condition["is"]) <= choices[condition["path"]], each["path"]
    assert choices["workload.type"] >= {"image_classification", "text_classification", "language_model"}
    assert "objects" not in choices["workload.type"], "a file cannot describe objects of Python"


@pytest.mark.parametrize(
    "each", [each for each in form()["fields"] if "default" in each], ids=lambda each: each["path"]
)
def test_a_default_is_among_the_choices_and_within_the_range(each: dict[str, Any]) -> None:
    value = each["default"]
    if each["type"] == "choice":
        assert value in each["choices"]
    if each["type"] in ("integer", "number"):
        assert each.get("minimum", value) <= value <= each.get("maximum", value)
        assert "above" not in each or value > each["above"]
        assert "below" not in each or value < each["below"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_goes_through_the_form_unchanged(name: str) -> None:
    text = recipe(name).read_text(encoding="utf-8")
    again = edited(text, {}, [])
    assert values_of(again) == values_of(text)
    assert [line for line in again.splitlines() if line.startswith("#")] == [
        line for line in text.splitlines() if line.startswith("#")
    ]


def test_a_changed_key_leaves_all_others_and_every_comment() -> None:
    text = edited(DIGITS, {"optimizer.lr": 0.25, "schedule.name": "cosine"}, ["loop.steps"])
    assert values_of(text) == {
        **{key: value for key, value in values_of(DIGITS).items() if key != "loop"},
        "optimizer": {"name": "sgd", "lr": 0.25},
        "schedule": {"name": "cosine"},
    }
    assert text.startswith("# the demo\n")
    assert "# bundled" in text


def test_an_engines_short_name_becomes_its_block_when_a_key_of_it_is_set() -> None:
    text = edited("engine: zero2\n", {"engine.offload_optimizer": "cpu"}, [])
    assert values_of(text)["engine"] == {"name": "deepspeed", "stage": 2, "offload_optimizer": "cpu"}
    assert flat({"engine": "zero2"})["engine.stage"] == 2


KEYS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3).map(".".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@given(KEYS, VALUES, st.dictionaries(st.sampled_from("def"), VALUES, max_size=3))
def test_a_key_that_was_set_is_read_back_and_nothing_else_changed(key: str, value: Any, others: dict[str, Any]) -> None:
    text = edited("", others, [])
    changed = values_of(edited(text, {key: value}, []))
    node = changed
    for part in key.split(".")[:-1]:
        node = node[part]
    assert node[key.split(".")[-1]] == value
    assert {name: each for name, each in changed.items() if name in others} == others
    removed = values_of(edited(edited(text, {key: value}, []), {}, [key]))
    assert removed == others


@pytest.mark.parametrize(
    "value", ["?0", "a: b", "#c", "*d", "- e", "[", "{", "}", ",", "1e3", "null", "yes", "a #b", "'", '"']
)
def test_a_text_stays_one_within_the_lists_and_mappings_of_a_line(value: str) -> None:
    text = edited("data: {source: digits, classes: [a]}  # mine\n", {"data.train": value, "data.classes": [value]}, [])
    assert values_of(text) == {"data": {"source": "digits", "classes": [value], "train": value}}
    assert "# mine" in text
    assert parsed_yaml(flow([value, {value: value}])) == [value, {value: value}]


@given(VALUES)
def test_a_value_on_the_command_line_is_read_as_it_was_meant(value: Any) -> None:
    line = flow(value)
    assert "\n" not in line
    assert parsed_yaml(line) == value


@pytest.mark.parametrize("text", ["a: [", "a: !!python/object/apply:os.system [id]", "- 1", "a: &a [*a]", "a: 1\na: 2"])
def test_what_is_no_run_file_is_refused_with_a_reason(text: str) -> None:
    for read in (values_of, lambda each: edited(each, {"b": 1}, []), lambda each: check(each, MACHINE)):
        with pytest.raises(UserError) as error:
            read(text)
        assert error.value.problems[0].field == "yaml"


WRONG = (
    *("optimizer: {lr: -1}", "engine: nothing", "optimzer: {lr: 1}", "precision: fp99", "loop: {epochs: 1, steps: 2}"),
    *("device: cuda", "batch_size_per_device: 4", "workload: {type: nothing}", "evaluation: {metric: 3}"),
)


@pytest.mark.parametrize("wrong", WRONG)
def test_the_form_finds_what_the_command_line_finds(tmp_path: Path, wrong: str) -> None:
    values = {**values_of(DIGITS), **values_of(wrong)}
    text = edited("", values, [])
    (tmp_path / "run.yaml").write_text(text)
    machine = detect()
    found = check(text, machine)
    try:
        expected = judged(*load(tmp_path / "run.yaml"), node=None).problems
    except UserError as error:
        expected = list(error.problems)
    assert found.problems == expected
    assert expected, "each of these is wrong"


@pytest.mark.parametrize("name", ["digits", "shakespeare-char", "alpaca-qlora"])
def test_the_command_makes_the_same_run_as_the_form(name: str, tmp_path: Path) -> None:
    text = recipe(name).read_text(encoding="utf-8")
    text = edited(text, {"optimizer.lr": 0.5, "loop.max_grad_norm": None, "tracking.trackers": ["tensorboard"],
                         "numerics.spike_factor": 3.5}, [])  # fmt: skip
    found = command(text, name)
    assert found["file"] is None
    first, second = found["lines"]
    assert first == f"drivetrain init {name} --output run.yaml"
    (tmp_path / "run.yaml").write_text(recipe(name).read_text(encoding="utf-8"))
    overrides = shlex.split(second)[3:]
    typed, problems = load(tmp_path / "run.yaml", overrides)
    sent, others = validate({"name": "run", **values_of(text)}, [])
    assert typed == sent
    assert problems == others == []


def test_a_key_that_was_taken_away_cannot_be_an_override() -> None:
    text = edited(recipe("digits").read_text(encoding="utf-8"), {}, ["schedule"])
    assert command(text, "digits") == {"lines": ["drivetrain train run.yaml"], "file": text}


def test_the_api_gives_fields_recipes_and_checks(tmp_path: Path) -> None:
    with serving(tmp_path / "runs") as (server, _):
        _, found = ask(server, "/api/schema")
        assert {"path": "optimizer.lr", "default": 0.001, "above": 0}.items() <= next(
            each for each in found["fields"] if each["path"] == "optimizer.lr"
        ).items()
        _, listed = ask(server, "/api/recipes")
        assert [each["name"] for each in listed["recipes"]] == RECIPES
        _, checked = ask(server, "/api/check", {"yaml": DIGITS.replace("lr: 0.1", "lr: high")})
        assert not checked["ready"]
        assert [each["field"] for each in checked["problems"]] == ["optimizer.lr"]
        status, twice = ask(server, "/api/check", b'{"yaml": "a: 1", "yaml": "b: 1"}')
        assert (status, twice["error"]["message"]) == (400, "yaml: the body has this key twice in one object")
        _, checked = ask(server, "/api/check", {"yaml": DIGITS})
        assert checked["ready"]
        assert checked["resolved"]["optimizer"]["lr"] == 0.1
        _, changed = ask(server, "/api/edit", {"yaml": DIGITS, "set": {"optimizer.lr": 0.2}})
        assert changed["flat"]["optimizer.lr"] == 0.2
        assert "# bundled" in changed["yaml"]
        headers = server.ask("/api/schema", authorization="Bearer a-token-of-the-tests-0123456789")[1]
        tagged = {"if_none_match": headers["etag"]}
        assert ask(server, "/api/schema", **tagged)[0] == 304, "a browser that has it is not sent it again"


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_checked_in_words_that_json_has(name: str) -> None:
    found = check(recipe(name).read_text(encoding="utf-8"), MACHINE).as_dict()
    for each in found["problems"]:
        assert set(each) == {"field", "why", "fix", "line", "column", "end_column"}
    json.dumps(found)


def test_all_engines_can_be_chosen() -> None:
    engine = next(each for each in form()["fields"] if each["path"] == "engine")
    assert {"single", "ddp", "fsdp", "zero2", "auto"} <= set(engine["choices"])
    assert not [name for name, more in itertools.pairwise(engine["choices"]) if name == more]


def test_answers_that_stay_the_same_are_compressed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    real = static_files.gzip.compress

    def compress(content: bytes, *given: Any, **named: Any) -> bytes:
        packed.append(len(content))
        return real(content, *given, **named)

    monkeypatch.setattr(static_files.gzip, "compress", compress)
    for each in (form_routes._fields, form_routes._recipes, form_routes._json_schema):
        each.cache_clear()
    with serving(tmp_path / "runs") as (server, _):
        for path in ("/api/schema", "/api/recipes", "/api/schema/json") * 3:
            assert ask(server, path)[0] == 200
    assert len(packed) == 3
