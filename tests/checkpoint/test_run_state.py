"""A checkpoint may have right checksums and be none that a run can go on from: it is skipped, with its reason."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from drivetrain.checkpoint import directory, run_state
from drivetrain.checkpoint.convert.contents import contents
from drivetrain.checkpoint.run_state import verify
from drivetrain.config.micro_batch_backoff import BOUNDS
from drivetrain.errors import UserError
from drivetrain.training import step_guard
from drivetrain.training.progress import Progress
from tests.properties import examples
from tests.training.test_run_checkpoints import Training

Tree = Any


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2. Nobody may write into it."""
    root = tmp_path_factory.mktemp("run") / "checkpoints"
    training = Training(root, "fp16-mixed", checkpoints={"keep_last": 2})
    training.checkpoints.save(training.train(Progress(), 1))
    best = {"step": 1, "metric": "accuracy", "value": 0.5}
    training.checkpoints.save(training.train(Progress(step=1, updates=1, metrics={"accuracy": 0.5}, best=best), 1))
    assert [verify(path) for path in directory.steps(root)] == [[], []]
    return root


@pytest.fixture
def newer(run: Path, tmp_path: Path) -> Path:
    """The newer one of a copy."""
    return Path(shutil.copytree(run, tmp_path / "checkpoints")) / "step-00000002"


def seal(path: Path, name: str) -> None:
    """Give the manifest a file's true size and checksum."""
    manifest = json.loads((path / "manifest.json").read_text())
    held = (path / name).read_bytes()
    manifest["files"][name] = {"bytes": len(held), "sha256": [hashlib.sha256(held).hexdigest()]}
    (path / "manifest.json").write_text(json.dumps(manifest))


def change(path: Path, name: str, how: Callable[[Tree], Tree]) -> None:
    tree = json.loads((path / f"{name}.json").read_text())
    changed = how(tree)
    (path / f"{name}.json").write_text(json.dumps(tree if changed is None else changed))
    if name != "manifest":
        seal(path, f"{name}.json")


def goes_on_from(root: Path) -> tuple[int, list[str]]:
    """The step that a run with --resume goes on from, and the messages."""
    training = Training(root, "fp16-mixed", checkpoints={"keep_last": 2})
    return training.checkpoints.restore().step, training.warnings()


# --- training.json, sealed anew --------------------------------------------------------------------------------------

BOTH = dict.fromkeys(BOUNDS)
BROKEN: dict[str, tuple[str, Callable[[Tree], Tree], str]] = {
    "a list": ("training", lambda _: [1, 2], "training: input should be"),
    "no progress": ("training", lambda t: t.pop("progress") and t, "training.progress: field required"),
    "no order": ("training", lambda t: t.pop("order") and t, "training.order: field required"),
    "a step that is a text": (
        "training",
        lambda t: t["progress"].update(step="2") or t,
        "training.progress.step: input should be a valid integer",
    ),
    "another step": ("training", lambda t: t["progress"].update(step=7) or t, "of step 7, and the manifest of step 2"),
    "an unknown field": ("training", lambda t: t["progress"].update(x=1) or t, "training.progress.x: extra inputs"),
    "a generator of nothing": ("training", lambda t: {**t, "generators": [{}]}, "training.generators.0 cannot be"),
    "a tensor that is not there": (
        "training",
        lambda t: {**t, "generators": [{"$tensor": {"key": "nowhere"}}]},
        "its parts cannot be read: KeyError",
    ),
    "too many numbers for Python's generator": (
        "training",
        lambda t: t["generators"][0]["python"].update(words=[1]) or t,
        "training.generators.0 cannot be restored",
    ),
    "a reduction that sets other fields": (
        "training",
        lambda t: (
            t["progress"].update(reduction={"of": BOTH, "to": {**BOTH, "tracking": {"trackers": ["evil:Tracker"]}}})
            or t
        ),
        "training.progress.reduction.to.tracking: extra inputs",
    ),
    "a scale of nothing": ("training", lambda t: t["engine"]["scaler"].pop("scale") and t, "scaler.scale: field req"),
    "groups of nothing": ("optimizer", lambda t: {**t, "param_groups": 5}, "optimizer.param_groups: input should be"),
    "weights within weights": ("model", lambda t: {"all": t}, "model.weights.all: input should be an instance of"),
    "strides without bound": (
        "model",
        lambda t: {n: {"$tensor": {**v["$tensor"], "strides": [2**40] * 2}} for n, v in t.items()},
        "its parts cannot be read: ValueError",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_state_that_cannot_be_restored_is_skipped_with_its_reason_and_the_one_before_is_taken(
    newer: Path, name: str
) -> None:
    part, how, why = BROKEN[name]
    change(newer, part, how)
    assert directory.verify(newer) == [], "its checksums are right"
    [wrong] = verify(newer)
    assert why in wrong
    step, reported = goes_on_from(newer.parent)
    assert step == 1
    assert reported[0].startswith(f"checkpoint skipped: {newer.name}: ")


def test_of_depth_without_end_nothing_breaks(newer: Path) -> None:
    (newer / "training.json").write_text("[" * 200_000 + "]" * 200_000)
    seal(newer, "training.json")
    assert "RecursionError" in verify(newer)[0]


def test_a_tensor_file_that_is_none_is_reported(newer: Path) -> None:
    (newer / "model.safetensors").write_bytes(b"\xff" * 64)
    seal(newer, "model.safetensors")
    assert "its parts cannot be read" in verify(newer)[0]


# --- manifests -------------------------------------------------------------------------------------------------------


def _without_part(manifest: Tree) -> Tree:
    manifest["parts"].remove("optimizer")
    return manifest


MANIFESTS: dict[str, tuple[Callable[[Tree], Tree], str]] = {
    "no files": (lambda m: {**m, "files": {}, "parts": []}, "it lists no weights"),
    "parts without files": (lambda m: {**m, "files": {}}, "it lists no model.safetensors, model.json"),
    "a part too few": (_without_part, "it lacks the part optimizer"),
    "an absolute name": (lambda m: m["files"].update({"/etc/passwd": {"bytes": 1, "sha256": []}}) or m, "/etc/passwd"),
    "a name that climbs": (lambda m: m["files"].update({"a/../../b": {"bytes": 1, "sha256": []}}) or m, "a/../../b"),
    "a part that climbs": (lambda m: {**m, "parts": [*m["parts"], "../x"]}, "it lists no ../x.safetensors"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_no_save_wrote_is_reported(newer: Path, name: str) -> None:
    how, why = MANIFESTS[name]
    change(newer, "manifest", how)
    [wrong] = verify(newer)
    assert why in wrong
    assert goes_on_from(newer.parent)[0] == 1


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "training.json"])
def test_links_out_of_a_checkpoint_are_not_followed(newer: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    (newer / name).rename(outside)
    (newer / name).symlink_to(outside)
    [wrong] = verify(newer)
    assert "a link that leads out of the checkpoint" in wrong
    assert name in wrong
    with pytest.raises(UserError, match="a link that leads out"):
        contents(newer)


@pytest.mark.parametrize("target", ["/dev/zero", "a pipe", "a folder", "itself"])
def test_what_is_no_file_is_not_read(newer: Path, target: str) -> None:
    """A device has no end, and a pipe is waited for."""
    for name in ("manifest.json", "config.json"):
        path = newer / name
        path.unlink(missing_ok=True)
        if target == "a pipe":
            os.mkfifo(path)
        elif target == "a folder":
            path.mkdir()
        else:
            path.symlink_to(path if target == "itself" else target)
    assert len(verify(newer)) == 1
    assert goes_on_from(newer.parent)[0] == 1


def test_the_command_says_bad_of_what_no_run_can_go_on_from(
    newer: Path, drivetrain: Callable[..., tuple[int, str, str]]
) -> None:
    change(newer, "manifest", lambda m: {**m, "files": {}, "parts": []})
    code, out, _ = drivetrain("checkpoint", "verify", str(newer.parent))
    assert code == 1
    assert out.splitlines()[0].endswith(": good")
    assert "it lists no weights" in out


# --- whatever is written ---------------------------------------------------------------------------------------------

OTHERS = st.sampled_from(
    [None, True, -1, 3, 10**30, 0.5, "x", [], {}, [[1]], {"a": 1}, {"$tensor": 1}, {"$float": "x"}]
)


def places(tree: Tree) -> list[list[Any]]:
    """The path of every value within."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree[:3]) if isinstance(tree, list) else ()
    return [[key, *below] for key, value in children for below in ([], *places(value))]


@settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_change_of_manifest_or_state_ends_a_resume_in_a_traceback(
    run: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    newer = Path(shutil.copytree(run, tmp_path_factory.mktemp("any") / "checkpoints")) / "step-00000002"
    name = data.draw(st.sampled_from(["training", "manifest"]))

    def mutate(tree: Tree) -> Tree:
        for _ in range(data.draw(st.integers(1, 3))):
            known = places(tree)
            if not known:
                break
            *path, last = data.draw(st.sampled_from(known))
            node = tree
            for key in path:
                node = node[key]
            if data.draw(st.booleans()):
                del node[last]
            else:
                node[last] = copy.deepcopy(data.draw(OTHERS))  # a later change may reach into it
        return tree

    change(newer, name, mutate)
    try:
        step: int | str = goes_on_from(newer.parent)[0]
    except UserError as error:
        step = error.problems[0].field
    of_another_run = ["--resume"]  # well-formed: told as that of the user's own would be
    assert step in ([1] if verify(newer) else [2, *of_another_run])
    shutil.rmtree(newer.parents[1])


# --- the forms are those of the loop ---------------------------------------------------------------------------------


def test_the_fields_that_are_checked_are_those_that_are_restored() -> None:
    assert set(run_state.Progress.model_fields) == {field.name for field in dataclasses.fields(Progress)}
    assert set(run_state.Recent.model_fields) == {field.name for field in dataclasses.fields(step_guard.Recent)}
    assert set(run_state.Bounds.model_fields) == set(BOUNDS)
    saved = torch.amp.GradScaler("cpu").state_dict()
    assert {field.alias or name for name, field in run_state.Scaler.model_fields.items()} == set(saved)


def test_what_a_run_writes_has_no_tensor_that_the_check_does_not_see(newer: Path) -> None:
    held = load_file(newer / "model.safetensors")
    save_file({**held, "more": torch.ones(1)}, newer / "model.safetensors")
    seal(newer, "model.safetensors")
    assert verify(newer) == [], "tensors that no tree names are of no part"
