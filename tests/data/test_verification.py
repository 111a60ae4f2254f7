"""`drivetrain data --verify` finds the one edit that sampling does not find."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain.config.language import LanguageModel
from drivetrain.config.workload import TextClassification
from drivetrain.data import array_store
from drivetrain.data.source_files import SourceFile
from drivetrain.data.texts import read_texts
from drivetrain.data.verification import verified

LINES = '{"text": "a"}\n' * 50 + '{"text": "secret"}\n' + '{"text": "a"}\n' * 50


def hidden_edit(file: Path) -> None:
    """Change bytes between the samples, and keep size and time."""
    before = file.stat()
    content = bytearray(file.read_bytes())
    place = content.index(b"secret")
    content[place : place + 6] = b"SECRET"
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_store, "SAMPLED", 2)
    monkeypatch.setattr(array_store, "SAMPLE_BYTES", 64)


@pytest.mark.usefixtures("few_samples")
def test_an_edit_between_the_samples_is_found_and_the_next_start_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("text,label\n" + "".join(f"row {number},{number % 2}\n" for number in range(50)) + "secret,1\n")
    with file.open("a") as opened:
        opened.writelines(f"row {number},{number % 2}\n" for number in range(50))
    given = {"model": {"path": "bert"}, "data": {"train": str(file), "cache": tmp_path / "cache"}}
    workload = TextClassification.model_validate(given)
    data = workload.data

    def states() -> list[str]:
        return [each.state for each in verified(workload)]

    assert states() == ["not known"]
    assert read_texts(data, str(file), "f").first[50] == "secret"
    assert states() == ["same"]
    hidden_edit(file)
    assert read_texts(data, str(file), "f").first[50] == "secret", "the samples do not find it"
    assert states() == ["changed"]
    assert states() == ["not known"]
    assert read_texts(data, str(file), "f").first[50] == "SECRET"
    assert states() == ["same"]


@pytest.mark.usefixtures("few_samples")
def test_shards_and_registered_names_are_verified_each(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"s{number}.jsonl").write_text(
            '{"text": "a"}\n' * 50 + '{"text": "secret"}\n' + '{"text": "a"}\n' * 50
        )
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "s2.jsonl"}}))
    given: dict[str, Any] = {"train": f"{tmp_path}/s[01].jsonl", "evaluation": "mine"}
    data = {**given, "registry": tmp_path, "cache": tmp_path / "cache"}
    workload = LanguageModel.model_validate({"model": {"path": "llama"}, "data": data})
    for number in (0, 2):
        SourceFile(tmp_path / f"s{number}.jsonl", "f").digest(tmp_path / "cache")
    hidden_edit(tmp_path / "s2.jsonl")
    found = [(Path(each.path).name, each.state) for each in verified(workload)]
    assert found == [("s0.jsonl", "same"), ("s1.jsonl", "not known"), ("s2.jsonl", "changed")]


@pytest.mark.usefixtures("few_samples")
def test_the_verb_says_it_and_fails(tmp_path: Path, drivetrain: Callable[..., tuple[int, str, str]]) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(LINES)
    run = tmp_path / "run.yaml"
    model = "{config: {model_type: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2}}"
    data = f"{{train: {file}, cache: {tmp_path / 'cache'}}}"
    run.write_text(
        f"workload: {{type: language_model, model: {model}, data: {data}}}\n"
        "precision: fp32\nbatch_size: 2\nloop: {steps: 1}\noptimizer: {name: sgd, lr: 0.1}\n"
    )
    SourceFile(file, "f").digest(tmp_path / "cache")
    code, out, _ = drivetrain("data", str(run), "--verify")
    assert (code, out.strip()) == (0, f"holds what was read: {file}")
    hidden_edit(file)
    code, out, _ = drivetrain("data", str(run), "--verify", "--json")
    assert (code, json.loads(out)) == (1, {"files": [{"path": str(file), "state": "changed"}]})
