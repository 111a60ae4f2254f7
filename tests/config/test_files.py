"""Bounds of what is read: no file and no override takes more than seconds, however it is made."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain.config.files import MOST_JSON_BYTES, MOST_YAML_BYTES, parsed_yaml, read_json, read_yaml, usable_path
from drivetrain.config.load import load, validate
from drivetrain.errors import Problem, UserError, shown
from tests.config.test_load import MODULE

SECONDS = 5  # of this process; each of these took tens of seconds, or all of the memory

BOMB = "a0: &a0 [x, x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 400))
YAML_OUT_OF_BOUNDS = {
    "open brackets": ("a: " + "[" * 3000, "nested in more than 64 levels"),
    "brackets": ("a: " + "[" * 3000 + "]" * 3000, "nested in more than 64 levels"),
    "dashes": ("- " * 3000, "nested in more than 64 levels"),
    "braces": ("{a: " * 3000, "nested in more than 64 levels"),
    "billion laughs": (BOMB, "too large"),
    "aliases of aliases": (CHAIN, "nested in more than 64 levels"),
    "an alias within itself": ("a: &x [*x]", "refers to itself"),
    "many values": ("a: [" + "1," * 30_000 + "]", "too large"),
    "many bytes": ("a: " + "x" * MOST_YAML_BYTES, "more than 1 MiB"),
    "digits": ("a: 0x" + "f" * 100_000, "broken YAML"),
    "an unknown truth": ("a: !!bool maybe", "broken YAML"),
    "half a character": (r'a: "\uD800"', "broken YAML"),
}


def refused(call: Callable[[Path], object], path: Path) -> str:
    start = time.process_time()
    with pytest.raises(UserError) as caught:
        call(path)
    assert time.process_time() - start < SECONDS
    (found,) = caught.value.problems
    assert len(str(found)) < 1000
    return found.why


@pytest.mark.parametrize(("text", "why"), YAML_OUT_OF_BOUNDS.values(), ids=YAML_OUT_OF_BOUNDS)
def test_yaml_out_of_bounds_is_refused_soon(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert why in refused(read_yaml, tmp_path / "run.yaml")


@pytest.mark.parametrize("text", ["[" * 3000, "[" * 3000 + "]" * 3000, "&a [*a]"], ids=["open", "closed", "itself"])
def test_an_override_out_of_bounds_is_refused_soon(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(MODULE))
    start = time.process_time()
    _, [found] = load(tmp_path / "run.json", [f"optimizer.options={text}"])
    assert time.process_time() - start < SECONDS
    assert found.field == "optimizer.options"
    assert len(str(found)) < 400


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested in more than 64 levels"),
        ('{"a":' * 100 + "1" + "}" * 100, "nested in more than 64 levels"),
        ('{"a": "' + "x" * MOST_JSON_BYTES + '"}', "more than 16 MiB"),
        ('{"a": 1, "a": 2}', "a is given twice"),
        ('{"a": ' + "9" * 5000 + "}", "broken JSON"),
    ],
    ids=["arrays", "objects", "bytes", "twice", "digits"],
)
def test_json_out_of_bounds_is_refused_soon(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "given.json").write_text(text)
    assert why in refused(read_json, tmp_path / "given.json")


def test_a_run_file_of_nested_arrays_in_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("[" * 100_000 + "]" * 100_000)
    assert "nested in more than 64 levels" in refused(load, tmp_path / "run.json")


def test_as_deep_as_the_bound_is_read() -> None:
    deep = "[" * 64 + "]" * 64
    assert json.dumps(parsed_yaml(deep)) == deep


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    for path in (tmp_path / "pipe.yaml", Path("/dev/zero"), Path("/dev/null"), tmp_path, tmp_path / "loop.yaml"):
        assert "cannot be read" in refused(read_yaml, path)
    assert "cannot be read" in refused(read_yaml, tmp_path / ("x" * 300))
    assert "cannot be read" in refused(read_yaml, tmp_path / "a\0b.yaml")
    assert "no such file" in refused(read_yaml, tmp_path / "missing.**")


def test_a_value_is_quoted_at_its_beginning_only() -> None:
    start = time.process_time()
    for value in ("x" * 10_000_000, ["x" * 1_000_000] * 10, {"a": [["b"] * 10_000] * 10_000}, 16**100_000):
        assert len(shown(value)) <= 60
    assert time.process_time() - start < 1
    assert len(str(Problem("f" * 10**6, "w" * 10**6, "x" * 10**6))) < 20_000


def test_of_thousands_of_problems_the_first_are_listed() -> None:
    start = time.process_time()
    _, problems = validate({**json.loads(json.dumps(MODULE)), "tracking": {"trackers": [1] * 15_000}}, [])
    assert time.process_time() - start < SECONDS
    assert len(problems) == 101
    assert "15,000 problems" in problems[-1].why


@pytest.mark.parametrize("text", ["", "a\0b", "\udcff", "x" * 300, "a/" * 3000])
def test_a_path_that_no_file_can_have_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no path") as caught:
        usable_path(text)
    assert len(str(caught.value)) < 300


def test_a_default_of_an_option_is_a_path_already() -> None:
    """A verb called without the option gets its default through the same check."""
    assert usable_path(Path("runs")) == Path("runs")


def test_a_recipe_that_is_not_here_is_written_by_init(tmp_path: Path) -> None:
    for place, fix in (
        ("recipes/rewards-grpo.yaml", "drivetrain init rewards-grpo writes a recipe of that name here"),
        ("rewards-grpo.yaml", "drivetrain init writes a run file to begin with"),
    ):
        with pytest.raises(UserError, match="there is no such file") as caught:
            read_yaml(tmp_path / place)
        assert caught.value.problems[0].fix.startswith(fix)
