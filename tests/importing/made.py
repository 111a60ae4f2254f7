"""Defines what the tests of importing share: the files, a run file to import onto, and an import of a text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML
from transformers import LlamaConfig, LlamaForCausalLM

from drivetrain.config.translation import Note
from drivetrain.data.language.vocabularies import END_OF_TEXT, byte_tokenizer
from drivetrain.errors import UserError
from drivetrain.importing.verb import Imported, import_files
from tests.tiny_language import LLAMA

Run = Callable[..., tuple[int, str, str]]
TALKS = [{"instruction": f"say {number}", "input": "", "output": f"it is {number}"} for number in range(12)]
FOLDER = Path(__file__).parent / "files"
FILES = sorted(path for path in FOLDER.rglob("*") if path.suffix in {".yaml", ".json", ".py"})
SMALL = """
workload:
  type: image_classification
  model:
    norm: group
    config: {model_type: resnet, layer_type: basic, embedding_size: 8, hidden_sizes: [8, 8], depths: [2, 2]}
  data: {source: digits, image_size: 16, limit_train: 128, limit_evaluation: 40}
batch_size: 16
loop: {steps: 2}
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
"""


def file_name(path: Path) -> str:
    return path.relative_to(FOLDER).as_posix()


def small(folder: Path) -> Path:
    path = folder / "small.yaml"
    path.write_text(SMALL)
    return path


def read(path: Path) -> dict[str, Any]:
    return YAML(typ="safe", pure=True).load(path.read_text())


def imported(folder: Path, *files: Path, onto: Path | None = None) -> tuple[Imported, dict[str, Any]]:
    """The import and the run file it wrote, without the keys that it asks to be given up."""
    output = folder / "new.yaml"
    try:
        found = import_files(files, onto, output, overwrite=True)
    except UserError as error:
        asked = asked_to_give_up(error)
        if not asked:
            raise
        found = import_files(files, onto, output, overwrite=True, without=asked)
    return found, read(output)


def asked_to_give_up(error: UserError) -> list[str]:
    """Keys whose dropping changes what is trained."""
    return [each.field.rpartition(": ")[2] for each in error.problems if "--without" in each.fix]


numbers = itertools.count()


def of_text(folder: Path, text: str, ending: str = ".yaml") -> Path:
    path = folder / f"given-{next(numbers)}{ending}"
    path.write_text(text)
    return path


def run_of(folder: Path, *texts: str, ending: str = ".yaml", onto: Path | None = None) -> dict[str, Any]:
    """The run file that comes of files with these texts."""
    return imported(folder, *(of_text(folder, text, ending) for text in texts), onto=onto)[1]


def notes_of(folder: Path, text: str, ending: str = ".yaml") -> dict[str, Note]:
    """Key → its note."""
    return {note.key: note for _, note in imported(folder, of_text(folder, text, ending))[0].notes}


def keys_of(value: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Every key of a file that holds a value of its own, dotted."""
    if isinstance(value, dict) and value:
        for name in value:
            yield from keys_of(value[name], (*path, str(name)))
    elif isinstance(value, list) and any(type(part) is dict for part in value):
        for position in range(len(value)):
            yield from keys_of(value[position], (*path, str(position)))
    else:
        yield ".".join(path)


# --- LLaMA-Factory's runs, trained ------------------------------------------------------------------------------------


def model_and_data() -> None:
    """In the current folder a model of bytes, and a registry of conversations and texts."""
    tokenizer = byte_tokenizer([END_OF_TEXT])
    tokenizer.save_pretrained("model")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(**{**LLAMA, "vocab_size": len(tokenizer), "max_position_embeddings": 512})
    ).save_pretrained("model")
    folder = Path("data")
    folder.mkdir()
    (folder / "talks.json").write_text(json.dumps([*TALKS, {"instruction": "no reply"}]))
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": f"text {n} " * 9}) + "\n" for n in range(20)))
    registry = {
        "talks": {"file_name": "talks.json"},
        "texts": {"file_name": "texts.jsonl", "columns": {"prompt": "text"}},
    }
    (folder / "dataset_info.json").write_text(json.dumps(registry))


def given(**keys: Any) -> None:
    common = {"model_name_or_path": "model", "finetuning_type": "full", "output_dir": "run", "cutoff_len": 512}
    steps = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-3}
    Path("lf.yaml").write_text("".join(f"{key}: {value}\n" for key, value in {**common, **steps, **keys}.items()))


def trained(drivetrain: Run, *overrides: str) -> dict[str, Any]:
    code, _, words = drivetrain("import", "lf.yaml", "--output", "new.yaml")
    assert code == 0, words
    code, _, words = drivetrain("train", "new.yaml", *overrides, "workload.data.cache=cache", "--quiet")
    assert code == 0, words
    report: dict[str, Any] = json.loads(Path("run/report.json").read_text())
    assert report["status"] == "completed"
    return report
