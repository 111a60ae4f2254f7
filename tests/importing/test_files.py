"""Configurations as people write them: each becomes a run file, and each of its keys is reported."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from drivetrain.config import rules
from drivetrain.config.load import load
from drivetrain.config.machine import Machine
from drivetrain.config.resolve import resolved
from tests.importing.made import FILES, file_name, imported, keys_of, read, small

CPU = Machine("cpu", "a CPU", 1, 2**33, 8, None, frozenset({"float32"}))
H100 = Machine("cuda", "NVIDIA H100", 8, 2**36, 16, (9, 0), frozenset({"float32", "float16", "bfloat16"}))
HAVE_A_WORKLOAD = {name for name in map(file_name, FILES) if name.startswith("llama_factory/")}
# what the file asks of a device that a CPU is not
NEEDS_A_GPU = {
    "llama_factory/tuned_sft.yaml": "tf32",
    "llama_factory/mistral_qlora.yaml": "bnb-paged-adamw8bit",
    "deepspeed/fp16_scaled.json": "DeepSpeed has no fp16 on a CPU",
}


@pytest.mark.parametrize("file", FILES, ids=file_name)
def test_every_key_has_a_note_and_only_one_fate(file: Path, tmp_path: Path) -> None:
    found, _ = imported(tmp_path, file)
    of_this = [note for label, note in found.notes if label == str(file)]
    fates: dict[str, set[str]] = {}
    for note in of_this:
        fates.setdefault(note.key, set()).add(note.fate)
    assert {key for key, fate in fates.items() if len(fate) > 1} == set()
    assert set(keys_in(file)) - fates.keys() == set()


@pytest.mark.parametrize("file", FILES, ids=file_name)
def test_no_note_is_empty_or_owns_up_to_having_read_nothing(file: Path, tmp_path: Path) -> None:
    found, _ = imported(tmp_path, file)
    assert all(note.why for _, note in found.notes)
    assert not [note.key for _, note in found.notes if note.why == "nothing reads it"]
    assert not [note.key for _, note in found.notes if "no such key" in note.why]


@pytest.mark.parametrize("file", FILES, ids=file_name)
def test_onto_a_run_file_it_passes_schema_and_rules(file: Path, tmp_path: Path) -> None:
    found, _ = imported(tmp_path, file, onto=small(tmp_path))
    assert not found.missing
    run, problems = load(found.output)
    assert not problems
    assert run is not None
    machine = H100 if file_name(file) in NEEDS_A_GPU else CPU
    elsewhere = {"workload.data.registry", "workload.model.attention"}  # whose files are on another machine
    if run.workload.type != "language_model":
        elsewhere.add("adapter")  # none is trained on the run file's model, which is made at random
    assert {each.field for each in rules.check(resolved(run, machine), machine)} <= elsewhere
    assert (run.workload.type == "language_model") == (file_name(file) in HAVE_A_WORKLOAD)


@pytest.mark.parametrize("file", NEEDS_A_GPU)
def test_what_needs_a_gpu_is_reported_by_the_rules(file: str, tmp_path: Path) -> None:
    path = next(path for path in FILES if file_name(path) == file)
    found, _ = imported(tmp_path, path, onto=small(tmp_path))
    run, _ = load(found.output)
    assert run is not None
    problems = rules.check(resolved(run, CPU), CPU)
    assert NEEDS_A_GPU[file] in " ".join(problem.why for problem in problems)


@pytest.mark.parametrize("file", [each for each in FILES if file_name(each) not in HAVE_A_WORKLOAD], ids=file_name)
def test_without_a_workload_the_run_file_says_that_it_is_missing(file: Path, tmp_path: Path) -> None:
    found, raw = imported(tmp_path, file)
    assert found.missing[0] == "workload"
    assert found.run is None
    assert "workload" not in raw
    text = found.output.read_text()
    assert "# Missing: workload" in text
    assert f"# Imported from {file}"[:40] in text


def keys_in(file: Path) -> list[str]:
    """The keys, by other ways than the import's own."""
    if file.suffix == ".json":
        return list(keys_of(json.loads(file.read_text())))
    if file.suffix == ".yaml":
        return list(keys_of(read(file)))
    return list(keys_of(as_executed(file)))


def as_executed(file: Path) -> dict[str, Any]:
    """An XTuner file as Python runs it, among packages that give back any name asked of them."""
    before, path = dict(sys.modules), list(sys.path)
    names = ["torch", "torch.optim", "datasets", "peft", "transformers", "mmengine"]
    names += [f"mmengine.{part}" for part in ("config", "dataset", "hooks", "optim", "visualization")]
    names += ["xtuner"] + [f"xtuner.{part}" for part in ("dataset", "engine", "model", "parallel", "utils")]
    names += ["xtuner.dataset.collate_fns", "xtuner.dataset.map_fns", "xtuner.engine.hooks", "xtuner.engine.runner"]
    names += ["xtuner.parallel.sequence"]
    try:
        sys.modules |= {name: Anything(name) for name in names}
        text = file.read_text().replace("from .", "from ")
        sys.path.insert(0, str(file.parent))
        space: dict[str, Any] = {}
        exec(text, space)  # our own files
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - set(before):
            del sys.modules[name]
        sys.modules |= before
    values = {name: value for name, value in space.items() if type(value) in (dict, list, tuple, str, int, float, bool)}
    return {name: _lists(value) for name, value in values.items() if not name.startswith("_")}


class Anything(types.ModuleType):
    """A module that has every name, as a class that can be opened and has every attribute."""

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":
            return []
        if name.startswith("__"):
            raise AttributeError(name)
        return Anyone


class _AnyAttribute(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Anyone(metaclass=_AnyAttribute):
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(part) for key, part in value.items()}
    return [_lists(part) for part in value] if isinstance(value, list | tuple) else value
