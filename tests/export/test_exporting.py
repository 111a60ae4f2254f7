"""Exports of tiny runs: each is loaded by its own software, and one that is not the run's model is not kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import drivetrain as api
from drivetrain.config.load import load
from drivetrain.config.run import RunConfig
from drivetrain.data.language.vocabularies import byte_tokenizer
from drivetrain.errors import RunError, UserError
from drivetrain.export import exporting, transformers_format
from drivetrain.export.exporting import RefusedExport, export
from drivetrain.export.formats import FORMATS, matrix
from drivetrain.export.request import Request
from drivetrain.launch.prepare import run_file_of
from tests.tiny_language import LLAMA, ROWS, write_lines

Command = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A Llama of two layers with a LoRA, trained for a few steps on conversations."""
    return trained(tmp_path_factory.mktemp("lora"), adapter="lora")


def trained(folder: Path, **settings: Any) -> RunConfig:
    tokenizer = byte_tokenizer(("<|end|>", "<|im_start|>", "<|im_end|>"))
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING["llama"](**{**LLAMA, "vocab_size": len(tokenizer)})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    data = {"train": write_lines(folder / "rows.jsonl", ROWS), "template": "chatml", "length": 64}
    model = {"path": str(folder / "base")}
    workload = {"type": "language_model", "stage": "sft", "model": model, "data": data}
    api.train({"workload": workload}, batch_size=8, steps=4, lr=1e-2, quiet=True, output=folder / "run", **settings)
    found, problems = load(*run_file_of(folder / "run", []))
    assert found is not None
    assert not problems
    return found


def test_a_merged_model_answers_in_plain_transformers_as_the_run_does(run: RunConfig, tmp_path: Path) -> None:
    done = export(run, Request("transformers", tmp_path / "out", dtype="bf16", shard_size="40KB", samples=4))
    assert done.report["passed"]
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(model(ids).logits.float(), api.load(run.folder)(ids).logits, atol=0.05)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "license: unknown" in card
    loss = json.loads((run.folder / "report.json").read_text())["metrics"]["loss"]
    assert f"| loss (last evaluation of the run) | {loss:.6g} |" in card
    assert f'- {{type: "loss", value: {loss:.6g}}}' in card
    assert "merged into the weights" in card
    assert str(tmp_path) not in card, "a path of this machine means nothing elsewhere"
    assert json.loads((tmp_path / "out" / "export.json").read_text())["answers"]["other"] == 0


KINDS = {
    "dora": {"adapter": {"method": "lora", "dora": True}},
    "rslora": {"adapter": {"method": "lora", "rslora": True}},
    "pissa": {"adapter": {"method": "lora", "pissa": True}},
    "ia3": {"adapter": "ia3"},
    "oft": {"adapter": {"method": "oft", "block_size": 16}},
    "nf4": {"adapter": "lora", "quantised_base": {"format": "nf4"}},
    "int8": {"adapter": "lora", "quantised_base": {"format": "int8"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_is_merged_into_the_weights(kind: str, tmp_path: Path) -> None:
    run = trained(tmp_path, **KINDS[kind])
    done = export(run, Request("transformers", tmp_path / "out", samples=2))
    assert done.report["passed"]
    assert done.verdict.difference.relative < 1e-5
    if "quantised_base" in KINDS[kind]:
        return  # drivetrain.load merges onto the base as it was before it was rounded
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, api.load(run.folder)(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("format_", ["peft", "onnx", "torch-export"])
def test_other_formats_are_loaded_by_their_own_software(run: RunConfig, format_: str, tmp_path: Path) -> None:
    done = export(run, Request(format_, tmp_path / "out", samples=2))
    assert done.report["passed"]
    assert done.verdict.difference.relative < 1e-5
    assert done.verdict.answers.equal == 2
    script = tmp_path / "out" / "use.py"
    if script.exists():
        shown = subprocess.run([sys.executable, script.name], cwd=script.parent, capture_output=True, check=True)
        ids = torch.tensor(json.loads((script.parent / "example.json").read_text())["input_ids"][0])
        model, found = api.load(run.folder), json.loads(shown.stdout)
        with torch.no_grad():
            if format_ == "onnx":  # the likeliest tokens, one by one
                expected = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=-1)
                assert found == expected[0, ids.shape[1] :].tolist()
            else:
                torch.testing.assert_close(torch.tensor(found), model(ids).logits[0, -1], atol=1e-4, rtol=1e-4)


def swapped(model: Any, source: Any, into: Path) -> Any:
    """Writes well, and then exchanges two tensors of the file."""
    from safetensors.torch import load_file, save_file

    written = transformers_format.write(model, source, into)
    weights = load_file(into / "model.safetensors")
    first, second = (f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 1))
    weights[first], weights[second] = weights[second], weights[first]
    save_file(weights, into / "model.safetensors", {"format": "pt"})
    return written


def in_another_dtype(model: Any, source: Any, into: Path) -> Any:
    written = transformers_format.write(model, source, into)
    model.to(torch.float16).save_pretrained(into)
    return written


def with_another_template(model: Any, source: Any, into: Path) -> Any:
    written = transformers_format.write(model, source, into)
    file = into / "chat_template.jinja"
    file.write_text(file.read_text().replace("im_start|>", "im_start|> "))
    return written


@pytest.mark.long
@pytest.mark.parametrize(
    ("writer", "why"),
    [
        (swapped, "other numbers than the run's"),
        (in_another_dtype, "another dtype"),
        (with_another_template, "chat template renders"),
    ],
)
def test_a_wrong_export_is_refused_and_not_kept(
    run: RunConfig, writer: Callable[..., Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_function", lambda _: writer)
    with pytest.raises(RefusedExport, match=why):
        export(run, Request("transformers", tmp_path / "out", samples=2))
    assert not list(tmp_path.iterdir())


def test_a_broken_merge_is_refused_unless_accepted_with_the_numbers_in_the_card(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = exporting.merged

    def broken(model: nn.Module) -> nn.Module:
        found = merged(model)
        with torch.no_grad():
            found.get_parameter("model.layers.0.mlp.up_proj.weight").mul_(1.2)
        return found

    monkeypatch.setattr(exporting, "merged", broken)
    done = export(run, Request("transformers", tmp_path / "out", samples=2, accept=True))
    assert done.report["accepted_over_bound"]
    assert "the merge changed the model" in done.report["failures"][0]
    assert "Accepted although it is over its bound" in (tmp_path / "out" / "README.md").read_text()


def test_everything_that_is_wrong_comes_at_once_before_any_work(run: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    asked = Request("onnx", tmp_path / "taken", dtype="bf16", quantise="gptq", shard_size="2GB")
    with pytest.raises(UserError) as refused:
        export(run, asked)
    assert [each.field for each in refused.value.problems] == ["--quantise", "--dtype", "--shard-size", "--output"]
    with pytest.raises(UserError, match="gptqmodel"):
        export(run, Request("gptq", tmp_path / "out"))


def test_a_full_disk_leaves_nothing_and_says_what_to_do(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(exporting, "write_card", full)
    with pytest.raises(RunError, match=r"No space left.*make room"):
        export(run, Request("transformers", tmp_path / "out", samples=2))
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_killed_export_leaves_no_output_and_the_next_one_clears_its_rest(run: RunConfig, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "drivetrain", "export", str(run.folder), "--to", "transformers"]
    started = subprocess.Popen([*command, "--output", str(tmp_path / "out")], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".out.partial-*/config.json")) and time.monotonic() < deadline:
        assert started.poll() is None
        time.sleep(0.02)
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.glob(".out.partial-*"))
    export(run, Request("transformers", tmp_path / "out", samples=2))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_checkpoint_is_exported_by_its_own_folder(run: RunConfig, tmp_path: Path, drivetrain: Command) -> None:
    code, _, errors = drivetrain(
        "export", str(run.folder / "last"), "--to", "transformers", "--output", str(tmp_path / "out"), "--samples", "2"
    )
    assert code == 0, errors
    report = json.loads((tmp_path / "out/export.json").read_text())
    assert report["checkpoint"] == (run.folder / "last").resolve().name
    assert "it/s" not in errors, "no library's bar stands between the lines"


def test_the_table_in_the_docs_is_the_table_in_the_code() -> None:
    lines = Path("docs/how-to/export.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    formats = rows[0][1:]
    table = {row[0]: dict(zip(formats, row[1:], strict=True)) for row in rows[1:]}
    assert formats == list(FORMATS)
    for kind, refusals in matrix().items():
        for name, why in refusals.items():
            first = "no" if why else "with adapters" if FORMATS[name].needs_adapter else "yes"
            assert table[kind][name].startswith(first), (kind, name)
    for name, each in FORMATS.items():
        numbers = "as trained" if each.needs_adapter else ", ".join([*each.dtypes, *each.quantised])
        assert table["numbers"][name].replace(";", ",") == numbers
