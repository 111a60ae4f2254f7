"""Keys with any value at all: an import ends with a run file or with words, never with a crash."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from drivetrain.errors import Problem, UserError
from drivetrain.importing.key_reader import KeyReader, in_turn
from drivetrain.importing.recognise import KINDS
from drivetrain.importing.translated_file import Source, TranslatedFile
from drivetrain.importing.verb import Imported
from drivetrain.importing.xtuner_keys import RUNNER
from tests.importing.made import imported, keys_of
from tests.properties import examples

JUNK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=examples(60))
ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["auto", "no", "1e400", "0", "cpu", "FSDP", "AdamW", "linear", "1.5"]),
)


def trees(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    keys = (
        st.sampled_from(sorted(names)) | st.sampled_from(["type", "params", "enabled", "device"]) | st.text(max_size=5)
    )
    values = st.recursive(ATOMS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4))
    return st.dictionaries(keys, values, max_size=8)


def words(folder: Path, path: Path) -> Imported | None:
    """The import, or None where it was refused in words."""
    problems: Sequence[Problem] = ()
    try:
        return imported(folder, path)[0]
    except UserError as error:
        problems = error.problems
    assert all(problem.why and problem.fix for problem in problems)
    return None


MARKS = {
    "accelerate": {"distributed_type": "FSDP"},
    "deepspeed": {"zero_optimization": {"stage": 1}},
    "llama_factory": {"template": "x"},
    "training_arguments": {"output_dir": "x"},
    "trl_grpo": {"num_generations": 8},
    "trl_dpo": {"loss_type": "sigmoid", "ld_alpha": 1.0},
    "trl_kto": {"desirable_weight": 1.0},
    "trl_reward": {"center_rewards_coefficient": 0.1},
    "trl_gkd": {"lmbda": 0.5},
}


@pytest.mark.parametrize("kind", MARKS)
@JUNK
@given(data=st.data())
def test_any_values_end_in_a_run_file_or_in_words(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    raw = {**MARKS[kind], **data.draw(trees([*KINDS[kind].names]))}
    path = tmp_path / "given.json"
    path.write_text(json.dumps(raw))
    found = words(tmp_path, path)
    if found is not None:
        noted = {note.key for _, note in found.notes}
        assert {key for key in keys_of(raw) if key not in noted} == set()


def test_values_on_which_a_group_of_keys_fails_are_named() -> None:
    found = TranslatedFile(Source("given.json", "trl_dpo", {"one": 0, "other": 2, "unread": 3}, Path(), "block."))
    given = KeyReader(found.source.raw, found, found.source.prefix)
    in_turn(given, [lambda keys: print(keys.take("other") / keys.take("one")), lambda keys: keys.off("unread")])
    [problem] = found.problems
    assert (problem.field, problem.why) == ("block.one, block.other", "no sense can be made of one=0, other=2")
    assert [note.key for note in found.notes] == ["block.unread"]
    with pytest.raises(ZeroDivisionError):  # a mistake of the code, which no value can cure
        in_turn(given, [lambda _: print(1 / 0)])


@JUNK
@given(data=st.data())
def test_any_python_values_end_in_a_run_file_or_in_words(data: st.DataObject, tmp_path: Path) -> None:
    raw = {"train_cfg": {}, **data.draw(trees([*RUNNER]))}
    lines = [f"{name} = {value!r}" for name, value in raw.items() if name.isidentifier() and name.isascii()]
    path = tmp_path / "given.py"
    path.write_text("\n".join(lines).replace("inf", "1").replace("nan", "1"), encoding="utf-8")
    words(tmp_path, path)


@JUNK
@given(st.binary(max_size=60), st.sampled_from([".yaml", ".json", ".py"]))
def test_any_bytes_end_in_words(tmp_path: Path, content: bytes, ending: str) -> None:
    path = tmp_path / f"given{ending}"
    path.write_bytes(content)
    with pytest.raises(UserError):
        imported(tmp_path, path)


@JUNK
@given(data=st.data())
def test_any_yaml_ends_in_a_run_file_or_in_words(data: st.DataObject, tmp_path: Path) -> None:
    raw = {"template": "x", **data.draw(trees([*KINDS["llama_factory"].names]))}
    path = tmp_path / "given.yaml"
    with path.open("w", encoding="utf-8", errors="replace") as file:
        YAML(typ="safe", pure=True).dump(raw, file)
    words(tmp_path, path)
