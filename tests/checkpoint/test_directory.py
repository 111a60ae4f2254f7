"""A checkpoint is whole or not there, and says what is wrong with it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from drivetrain.checkpoint import saving
from drivetrain.checkpoint.directory import (
    check_fits,
    clean_partials,
    load,
    newest_good,
    read_manifest,
    steps,
    verify,
)
from drivetrain.checkpoint.saving import save
from drivetrain.checkpoint.state import same
from drivetrain.errors import RunError, UserError
from tests.properties import examples

DEAD = 2**22 + 1  # larger than any process id on Linux
FILES = ["manifest.json", "model.json", "model.safetensors", "training.json", "training.safetensors"]


def parts(version: int = 0) -> dict[str, Any]:
    weight = torch.full((3, 2), float(version))
    return {
        "model": {"embed.weight": weight, "head.weight": weight, "bias": torch.arange(4)},
        "training": {"version": version, "rng": torch.arange(10, dtype=torch.uint8), "loss": float("inf")},
    }


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 120, parts(7), {"metric": 0.5})
    assert path == tmp_path / "checkpoints" / "step-00000120"
    assert sorted(file.name for file in path.iterdir()) == FILES
    assert verify(path) == []
    assert same(load(path), parts(7))
    manifest = read_manifest(path)
    assert (manifest.step, manifest.facts) == (120, {"metric": 0.5})
    assert [file.name for file in (tmp_path / "checkpoints").iterdir()] == ["step-00000120"], "nothing is left aside"


def test_weights_are_read_by_any_safetensors_tool_under_their_own_names(tmp_path: Path) -> None:
    weights = load_file(save(tmp_path, 1, parts(3), {}) / "model.safetensors")
    assert set(weights) == {"embed.weight", "bias"}, "a tied weight is kept once, under its first name"
    assert torch.equal(weights["embed.weight"], torch.full((3, 2), 3.0))


def test_tied_weights_are_tied_again(tmp_path: Path) -> None:
    model = load(save(tmp_path, 1, parts(3), {}))["model"]
    assert model["head.weight"] is model["embed.weight"]


def test_views_of_one_storage_are_saved(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    state = {"flat": base, "square": base.view(2, 3), "part": base[2:4], "turned": base.view(2, 3).t()}
    path = save(tmp_path, 1, {"model": state, "optimizer": {"a": [state]}}, {})
    assert same(load(path), {"model": state, "optimizer": {"a": [state]}})


def test_empty_parts_are_saved(tmp_path: Path) -> None:
    assert load(save(tmp_path, 1, {"model": {}, "optimizer": {"state": {}, "groups": []}}, {})) == {
        "model": {},
        "optimizer": {"state": {}, "groups": []},
    }


def test_training_on_with_loaded_tensors_leaves_the_file_alone(tmp_path: Path) -> None:
    path = save(tmp_path, 1, parts(3), {})
    load(path)["model"]["bias"].zero_()
    assert verify(path) == []
    assert torch.equal(load(path)["model"]["bias"], torch.arange(4))


def test_assets_lie_beside_the_weights_and_are_checked_too(tmp_path: Path) -> None:
    def assets(folder: Path, _: Any) -> None:
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocab.txt").write_text("[PAD]")
        (folder / "foreign.safetensors").write_bytes(b"not ours to read")

    path = save(tmp_path, 1, parts(), {}, assets)
    assert set(load(path)) == {"model", "training"}
    (path / "tokenizer" / "vocab.txt").write_text("[pad]")
    assert verify(path) == ["tokenizer/vocab.txt does not have its checksum"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5, parts(1), {})
    path = save(tmp_path, 5, parts(2), {})
    assert load(path)["training"]["version"] == 2
    assert [file.name for file in tmp_path.iterdir()] == ["step-00000005"]


def test_a_failure_while_replacing_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rename = save(tmp_path, 5, parts(1), {}), Path.rename

    def fail_for_partials(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_partials)
    with pytest.raises(RunError, match=r"step 5 .*Input/output error .*last good checkpoint is .*step-00000005"):
        save(tmp_path, 5, parts(2), {})
    assert load(path)["training"]["version"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["step-00000005"]


def test_a_save_that_reads_back_different_is_not_put_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = saving.fill

    def damaging(file: Path, *given: Any) -> None:
        write(file, *given)
        content = bytearray(file.read_bytes())
        content[-1] ^= 1  # before the checksum is taken, as a bad cable would
        file.write_bytes(content)

    monkeypatch.setattr(saving, "fill", damaging)
    with pytest.raises(RunError, match=r"of model, .*of training read back different"):
        save(tmp_path, 5, parts(1), {})
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_save_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 5, parts(1), {}, interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_value_without_a_form_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"step 3 could not be saved.*state/tags: a set has no form"):
        save(tmp_path, 3, {"model": {}, "optimizer": {"state": {"tags": {1}}}}, {})


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_found_and_named(tmp_path: Path, name: str) -> None:
    file = save(tmp_path, 1, parts(), {}) / name
    file.write_bytes(file.read_bytes()[:-1])
    assert [name in wrong for wrong in verify(file.parent)] == [True]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found_and_named(tmp_path: Path, name: str) -> None:
    file = save(tmp_path, 1, parts(), {}) / name
    file.unlink()
    assert [name in wrong for wrong in verify(file.parent)] == [True]


@settings(deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_flipped_bit_of_a_part_is_found(tmp_path: Path, data: st.DataObject) -> None:
    path = save(tmp_path, 1, parts(), {})
    file = path / data.draw(st.sampled_from(FILES[1:]))
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    assert verify(path) == [f"{file.name} does not have its checksum"]


@pytest.mark.parametrize(
    "manifest",
    ["", "[]", "{}", "null", "\xff\x00", '{"format": 1, "files": {}}', '{"format": 2, "files": {"a": 1}}'],
)
def test_a_foreign_manifest_is_a_problem_not_a_traceback(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest, encoding="latin-1")
    (wrong,) = verify(tmp_path)
    assert "manifest.json cannot be read" in wrong
    with pytest.raises(UserError, match="damaged or no checkpoint"):
        load(tmp_path)


def test_loading_a_damaged_one_names_the_newest_good_one_beside_it(tmp_path: Path) -> None:
    good, bad = save(tmp_path, 1, parts(), {}), save(tmp_path, 2, parts(), {})
    (bad / "model.safetensors").unlink()
    with pytest.raises(UserError) as caught:
        load(bad)
    (found,) = caught.value.problems
    assert "model.safetensors is missing" in found.why
    assert str(good) in found.fix


def test_loading_what_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        load(tmp_path / "nothing")


def test_the_newest_good_one_is_found_and_the_skipped_are_explained(tmp_path: Path) -> None:
    good, truncated, unfinished = (save(tmp_path, step, parts(step), {}) for step in (9, 10, 11))
    (truncated / "model.safetensors").write_bytes(b"short")
    (unfinished / "manifest.json").unlink()
    (tmp_path / "step-00000012").write_text("a file, no folder")
    found, skipped = newest_good(tmp_path)
    assert found == good
    assert skipped[0] == "step-00000011: it has no manifest.json"
    assert skipped[1].startswith("step-00000010: model.safetensors has 5 bytes, not ")
    assert len(skipped) == 2


def test_no_folder_holds_no_checkpoint(tmp_path: Path) -> None:
    assert newest_good(tmp_path / "nothing") == (None, [])


def test_steps_are_ordered_by_number_past_eight_digits(tmp_path: Path) -> None:
    for step in (100_000_000, 99_999_999, 3):
        save(tmp_path, step, parts(), {})
    assert [path.name for path in steps(tmp_path)] == ["step-00000003", "step-99999999", "step-100000000"]


# --- leftovers -------------------------------------------------------------------------------------------------------


def test_leftovers_go_whatever_process_has_their_number_now(tmp_path: Path) -> None:
    """In a container every run is process 1."""
    left = [tmp_path / f".step-00000001.{purpose}-{DEAD}" for purpose in ("partial", "deleted")]
    alike = tmp_path / f".step-00000001.partial-{os.getppid()}"
    other = tmp_path / ".notes"
    for folder in (*left, alike, other):
        (folder / "inside").mkdir(parents=True)
    clean_partials(tmp_path)
    assert set(tmp_path.iterdir()) == {other}


def test_a_checkpoint_whose_replacement_was_killed_is_used_and_put_back(tmp_path: Path) -> None:
    path = save(tmp_path, 1, parts(8), {})
    path.rename(tmp_path / f".step-00000001.replaced-{DEAD}")
    found, _ = newest_good(tmp_path)
    assert found is not None
    assert load(found)["training"]["version"] == 8
    clean_partials(tmp_path)
    assert newest_good(tmp_path) == (path, [])


def test_a_replaced_checkpoint_goes_once_the_new_one_is_in_place(tmp_path: Path) -> None:
    path = save(tmp_path, 1, parts(9), {})
    shutil.copytree(path, tmp_path / f".step-00000001.replaced-{DEAD}")
    assert steps(tmp_path) == [path]
    clean_partials(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


# --- another model ---------------------------------------------------------------------------------------------------


def test_weights_of_another_model_are_refused_with_all_that_differs(tmp_path: Path) -> None:
    model = {f"layer.{i}": torch.zeros(1) for i in range(5)} | {"head": torch.zeros(2, 3), "both": torch.zeros(1)}
    saved = {"head": torch.zeros(4, 3), "both": torch.zeros(1), "old": torch.zeros(1)}
    with pytest.raises(UserError) as caught:
        check_fits({name: weight.shape for name, weight in model.items()}, saved, tmp_path)
    missing, unknown, shaped = (found.why for found in caught.value.problems)
    assert "layer.0 missing there; layer.1 missing there; layer.2 missing there; and 2 more" in missing
    assert "old unknown here" in unknown
    assert "head (4, 3) there, (2, 3) here" in shaped


def test_weights_of_the_same_model_fit(tmp_path: Path) -> None:
    check_fits({"w": torch.Size([2])}, {"w": torch.ones(2, dtype=torch.float64)}, tmp_path)


def test_the_manifest_is_json_that_names_every_file(tmp_path: Path) -> None:
    path = save(tmp_path, 1, parts(), {"metric": 0.1, "run": "a"})
    manifest = json.loads((path / "manifest.json").read_text())
    assert sorted(manifest["files"]) == FILES[1:]
    assert manifest["facts"] == {"metric": 0.1, "run": "a"}
