"""Loaders, each with a payload in what it reads: what becomes of it, and how the two meet."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from drivetrain.checkpoint import run_state
from drivetrain.checkpoint.convert import accelerate_folder, transformers_folder, universal, zero
from drivetrain.checkpoint.convert import dcp as dcp_folder
from drivetrain.checkpoint.convert.from_others import _read
from drivetrain.checkpoint.directory import load
from drivetrain.compare.verbs import report
from drivetrain.config.adapter import Adapter
from drivetrain.config.files import read_yaml
from drivetrain.data.cifar import BATCHES, read_cifar10
from drivetrain.data.language.registry import find, read_registry
from drivetrain.data.rows import open_rows
from drivetrain.data.tables import load_from_hub
from drivetrain.data.tokenised import load_tokenizer, tokenise
from drivetrain.importing.verb import import_files
from drivetrain.models import adapter_files
from drivetrain.models.adapters import AdapterSet
from drivetrain.models.model_folders import config_of
from drivetrain.models.preprocessing import expected_by
from drivetrain.models.transformers_classifiers import build_classifier
from drivetrain.replay import replay
from drivetrain.tracking.jsonl import read_events
from drivetrain.training.progress import Progress
from tests.checkpoint.test_run_state import seal
from tests.tiny_language import LLAMA, ROWS, workload
from tests.training.test_run_checkpoints import Training
from tests.trust.stranger import Evil, marking, model_with_code, tokenizer_with_code

Load = Callable[[Path, Path], object]


@dataclass(frozen=True)
class Case:
    """refused: what the problem says; None where the payload is not looked at, and all else is read."""

    loader: str
    payload: str
    outcome: str
    load: Load
    refused: str | None


def refused(loader: str, payload: str, load: Load, why: str) -> Case:
    return Case(loader, payload, "refused", load, why)


def harmless(loader: str, payload: str, outcome: str, load: Load) -> Case:
    return Case(loader, payload, outcome, load, None)


# --- models and tokenizers -------------------------------------------------------------------------------------------


def llama(folder: Path, **more: Any) -> Path:
    """A small Llama as Transformers saves it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    fields = {key: value for key, value in LLAMA.items() if key != "model_type"}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **fields)).save_pretrained(folder)
    change(folder / "config.json", **more)
    return folder


def change(file: Path, **more: Any) -> None:
    held = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**held, **more}))


def built(folder: Path) -> Any:
    return build_classifier("AutoModelForCausalLM", str(folder), None, (), "workload.model")


def model_of_a_known_kind(folder: Path, marker: Path) -> None:
    llama(folder, auto_map={"AutoConfig": "net.Config", "AutoModelForCausalLM": "net.Net"})
    (folder / "net.py").write_text(marking(marker))
    assert type(built(folder)).__module__.startswith("transformers.")


def pickled_weights(folder: Path, marker: Path) -> None:
    (llama(folder) / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Evil(marker)}, folder / "pytorch_model.bin")
    built(folder)


def generation(folder: Path, marker: Path) -> None:
    change(llama(folder) / "generation_config.json", custom_generate=str(folder), trust_remote_code=True)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(marking(marker))
    model = built(folder)
    model.generate(input_ids=torch.tensor([[1, 2]]), max_new_tokens=1, pad_token_id=0)


def kernel(folder: Path, marker: Path) -> None:
    del marker
    built(llama(folder, attn_implementation="kernels-community/anything"))


def tokenizer_beside_a_models_code(folder: Path, marker: Path) -> None:
    tokenizer_with_code(model_with_code(folder, marker), marker)
    described = json.loads((folder / "tokenizer_config.json").read_text())
    del described["auto_map"]
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    load_tokenizer(str(folder), "workload.model.path")


def image_processor(folder: Path, marker: Path) -> None:
    folder.mkdir()
    (folder / "net.py").write_text(marking(marker))
    (folder / "config.json").write_text('{"model_type": "resnet", "num_channels": 3}')
    auto_map = {"AutoImageProcessor": "net.Processor"}
    (folder / "preprocessor_config.json").write_text(json.dumps({"auto_map": auto_map, "image_mean": [0.5]}))
    assert expected_by(str(folder), "workload.model").mean == (0.5,)


def template(folder: Path, marker: Path) -> None:
    folder.mkdir()
    reach = "cycler.__init__.__globals__['os']"
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ " + reach + f".mkdir('{marker}') }}}}{{% endfor %}}")
    workload(folder, ROWS, template=str(folder / "chat.jinja"))


# --- adapters --------------------------------------------------------------------------------------------------------


def lora(folder: Path, **more: Any) -> Path:
    import peft

    base = built(llama(folder / "base"))
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    adapted.save_pretrained(str(folder / "adapter"))
    change(folder / "adapter" / "adapter_config.json", **more)
    return folder / "adapter"


def put(folder: Path) -> None:
    """Load the adapter onto its base, as a run does."""
    AdapterSet([Adapter(path=folder)], str(folder.parent / "base")).fit(built(folder.parent / "base"))


def pickled_adapter(folder: Path, marker: Path) -> None:
    (lora(folder) / "adapter_model.safetensors").unlink()
    torch.save(Evil(marker), folder / "adapter" / "adapter_model.bin")
    adapter_files.read(folder / "adapter")


def module_on_the_path(folder: Path, marker: Path, **more: Any) -> None:
    Path("evil.py").write_text(marking(marker))
    with mock.patch("sys.path", [os.getcwd(), *sys.path]):
        put(lora(folder, **more))


def prompt_tokenizer(folder: Path, marker: Path) -> None:
    import peft

    base = built(llama(folder / "base"))
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft.get_peft_model(base, config).save_pretrained(str(folder / "adapter"))
    place = str(tokenizer_with_code(folder / "tokenizer", marker))
    asked = {"prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "a", "tokenizer_name_or_path": place}
    change(folder / "adapter" / "adapter_config.json", **asked, tokenizer_kwargs={"trust_remote_code": True})
    put(folder / "adapter")


# --- data ------------------------------------------------------------------------------------------------------------


def cifar(folder: Path, marker: Path) -> None:
    folder.mkdir()
    for name in [*BATCHES["train"], "batches.meta"]:
        (folder / name).write_bytes(pickle.dumps({b"data": Evil(marker), b"labels": []}))
    read_cifar10(folder, "workload.data.train", "train")


def script_in_a_folder(folder: Path, marker: Path) -> None:
    folder.mkdir()
    (folder / f"{folder.name}.py").write_text(marking(marker))
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    assert open_rows(str(folder), "workload.data.train").read(0, 9) == [{"text": "a"}]


def script_of_the_hub(folder: Path, marker: Path) -> None:
    """As datasets before 4: it asks where the argument is left out, and refuses where it is False."""
    del folder

    def load_dataset(name: str, subset: str | None, split: str, trust_remote_code: bool | None = None) -> None:
        if trust_remote_code is not False:
            marker.touch()
        raise ValueError(f"loading {name} {subset} {split} requires to execute the dataset script")

    fake = SimpleNamespace(load_dataset=load_dataset, config=SimpleNamespace(HF_DATASETS_CACHE="/"))
    with (
        mock.patch("drivetrain.data.tables.import_datasets", return_value=fake),
        mock.patch("drivetrain.data.tables._check_reachable"),
    ):
        load_from_hub("someone/rows", "workload.data.train", None, "train")


def script_in_a_registry(folder: Path, marker: Path) -> None:
    folder.mkdir()
    (folder / "rows.py").write_text(marking(marker))
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"script_url": "rows"}}))
    find(read_registry(folder, "workload.data.registry"), "rows", "workload.data.registry")


def file_of_rows(name: str) -> Load:
    def load(folder: Path, marker: Path) -> None:
        folder.mkdir()
        file = folder / name
        if file.suffix == ".pt":
            torch.save(Evil(marker), file)
        elif file.suffix == ".npz":
            np.savez(file, rows=np.array([Evil(marker)], dtype=object))
        elif file.suffix == ".npy":
            np.save(file, np.array([Evil(marker)], dtype=object))
        else:
            file.write_bytes(pickle.dumps(Evil(marker)))
        open_rows(str(file), "workload.data.train")

    return load


def arrow(name: str) -> Load:
    """An extension type of pyarrow's old kind, whose metadata are a pickle that old versions load."""

    def load(folder: Path, marker: Path) -> None:
        folder.mkdir()
        metadata = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": b"!"}
        metadata["ARROW:extension:metadata"] = pickle.dumps(Evil(marker))
        schema = pa.schema([pa.field("text", pa.string(), metadata=metadata)])
        table = pa.table({"text": ["a"]}, schema=schema)
        (pyarrow.parquet.write_table if name.endswith("parquet") else pyarrow.feather.write_feather)(
            table, str(folder / name)
        )
        assert open_rows(str(folder / name), "workload.data.train").read(0, 9) == [{"text": "a"}]

    return load


def token_cache(folder: Path, marker: Path) -> None:
    from drivetrain.data.language.vocabularies import byte_tokenizer

    tokenizer = byte_tokenizer([])
    before, _ = tokenise(tokenizer, ["ab"], None, 8, folder)
    [file] = folder.rglob("*.npz")
    np.savez(file, ids=np.array([Evil(marker)], dtype=object))
    after, warning = tokenise(tokenizer, ["ab"], None, 8, folder)
    assert after.ids.tolist() == before.ids.tolist()
    assert "made again" in (warning or "")


# --- checkpoints of others -------------------------------------------------------------------------------------------

WEIGHTS = {"first.bias": torch.ones(3)}
CODE = r"reading it could run code that came with it"
MKDIR = rf"posix.mkdir\): {CODE}"
PASSED_OVER = "read: it is passed over"


def transformers(name: str) -> Load:
    def load(folder: Path, marker: Path) -> None:
        folder.mkdir()
        if name != "pytorch_model.bin":
            save_file(WEIGHTS, folder / "model.safetensors")
        torch.save({"state": Evil(marker), "param_groups": []}, folder / name)
        _read(transformers_folder.read, folder, "transformers")

    return load


def accelerate(name: str) -> Load:
    def load(folder: Path, marker: Path) -> None:
        folder.mkdir()
        save_file(WEIGHTS, folder / "model.safetensors")
        torch.save(Evil(marker), folder / name)
        _read(accelerate_folder.read, folder, "accelerate")

    return load


def dcp_metadata(folder: Path, marker: Path) -> None:
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    _read(dcp_folder.read, folder, "dcp")


def dcp_values(folder: Path, marker: Path) -> None:
    dcp.save({"model": WEIGHTS, "step": Evil(marker)}, checkpoint_id=folder, no_dist=True)
    _read(dcp_folder.read, folder, "dcp")


def sharded_accelerate(folder: Path, marker: Path) -> None:
    (folder / "pytorch_model_fsdp_0").mkdir(parents=True)
    (folder / "pytorch_model_fsdp_0" / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    _read(accelerate_folder.read, folder, "accelerate")


def deepspeed_zero(folder: Path, marker: Path) -> None:
    folder.mkdir()
    torch.save({"module": {}}, folder / "mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": Evil(marker)}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    _read(lambda tag: zero._read(tag, ()), folder, "deepspeed")


def deepspeed_universal(folder: Path, marker: Path) -> None:
    (folder / "zero" / "first.bias").mkdir(parents=True)
    torch.save({"param_groups": []}, folder / "zero" / "optimizer_state.pt")
    torch.save({"param": Evil(marker)}, folder / "zero" / "first.bias" / "fp32.pt")
    _read(lambda tag: universal.read(tag, ()), folder, "deepspeed")


# --- what this project writes ----------------------------------------------------------------------------------------


def checkpoint(folder: Path) -> Path:
    training = Training(folder)
    training.checkpoints.save(training.train(Progress(), 1))
    return folder / "step-00000001"


def own_pickle(folder: Path, marker: Path) -> None:
    path = checkpoint(folder)
    torch.save(Evil(marker), path / "training.safetensors")
    seal(path, "training.safetensors")
    load(path, run_state.verify)


def own_link(folder: Path, marker: Path) -> None:
    path = checkpoint(folder)
    shutil.move(path / "model.safetensors", marker.with_name("elsewhere"))
    (path / "model.safetensors").symlink_to(marker.with_name("elsewhere"))
    load(path, run_state.verify)


def events(folder: Path, marker: Path) -> None:
    folder.mkdir()
    line = {"event": "step", "py/reduce": [{"py/function": "os.mkdir"}, [str(marker)]]}
    (folder / "events.jsonl").write_text(json.dumps(line) + "\n")
    assert list(read_events(folder / "events.jsonl")) == []


def naming_code(folder: Path, marker: Path) -> Path:
    folder.mkdir()
    (folder / "net.py").write_text(marking(marker))
    run = {"workload": {"type": "module", "path": str(folder / "net.py")}, "batch_size": 2, "loop": {"steps": 1}}
    (folder / "run.yaml").write_text(json.dumps(run))
    return folder


def reported(folder: Path, marker: Path) -> None:
    naming_code(folder, marker)
    (folder / "report.json").write_text("{}")
    assert report([folder]).rows[0].label == folder.name


# --- files that people write -----------------------------------------------------------------------------------------


def tagged(folder: Path, marker: Path) -> Path:
    folder.mkdir()
    file = folder / "run.yaml"
    file.write_text(f"name: !!python/object/apply:os.mkdir ['{marker}']\n")
    return file


def xtuner(folder: Path, marker: Path) -> None:
    folder.mkdir()
    (folder / "evil.py").write_text(marking(marker))
    (folder / "config.py").write_text(
        f"{marking(marker)}\nimport evil\nfrom mmengine.config import read_base\nwith read_base():\n"
        f"    from .evil import *\nmax_epochs = {marking(marker).partition('; ')[2]}\n"
        "train_cfg = dict(max_epochs=1)\nmodel = dict(type=evil.Net)\nbatch_size = 2\n"
    )
    notes = import_files([folder / "config.py"], None, folder / "out.yaml", False).notes
    assert any("files are read, never run" in str(note) for note in notes)


def deepspeed_json(folder: Path, marker: Path) -> None:
    folder.mkdir()
    Path("evil.py").write_text(marking(marker))
    names = {"zero_optimization": {"stage": 1}, "compile": {"enabled": True, "backend": "evil:run"}}
    (folder / "ds.json").write_text(json.dumps(names))
    notes = import_files([folder / "ds.json"], None, folder / "out.yaml", False).notes
    assert any("compile.backend" in str(note) and "refused" in str(note) for note in notes)


def llama_factory(folder: Path, marker: Path) -> None:
    del marker
    folder.mkdir()
    (folder / "rows.json").write_text(json.dumps(ROWS))
    (folder / "dataset_info.json").write_text('{"rows": {"file_name": "rows.json"}}')
    given = {"model_name_or_path": "someone/model", "trust_remote_code": True, "stage": "sft", "template": "alpaca"}
    (folder / "sft.yaml").write_text(json.dumps({**given, "dataset": "rows", "dataset_dir": str(folder)}))
    imported = import_files([folder / "sft.yaml"], None, folder / "out.yaml", False)
    assert any("trust_remote_code" in str(note) and "yourself" in str(note) for note in imported.notes)
    assert read_yaml(folder / "out.yaml")["workload"]["model"] == {"path": "someone/model"}


CASES = [
    refused(
        "model, configuration",
        "`auto_map` with Python files beside it",
        lambda f, m: config_of(str(model_with_code(f, m)), None, "workload.model"),
        r"configuration_net.NetConfig \(AutoConfig of auto_map\).*trust_remote_code=true",
    ),
    refused(
        "model",
        "`auto_map` of an architecture that Transformers lacks",
        lambda f, m: built(model_with_code(f, m)),
        r"modeling_net.Net \(AutoModelForCausalLM of auto_map\).*trust_remote_code=true",
    ),
    harmless(
        "model",
        "`auto_map` of an architecture that Transformers has",
        "read: Transformers' own class is taken",
        model_of_a_known_kind,
    ),
    refused("model, weights", "a pickle as pytorch_model.bin", pickled_weights, rf"posix.mkdir\): {CODE}.*safetensors"),
    refused("model", "`attn_implementation`: a kernel of the hub", kernel, "compiled code of the hub"),
    harmless(
        "model, generation configuration",
        "`custom_generate` with generate.py",
        "read: generate.py is not looked at",
        generation,
    ),
    refused(
        "tokenizer",
        "`auto_map` with Python files beside it",
        lambda f, m: load_tokenizer(str(tokenizer_with_code(f, m)), "workload.model.tokenizer"),
        r"tokenization_net.NetTokenizer \(AutoTokenizer of auto_map\).*trust_tokenizer_code=true",
    ),
    harmless(
        "tokenizer",
        "a model's `auto_map` in the same folder",
        "read: the model's code is not looked at",
        tokenizer_beside_a_models_code,
    ),
    harmless(
        "image processor",
        "`auto_map` in preprocessor_config.json",
        "read: numbers of the file are taken, and no class",
        image_processor,
    ),
    refused("chat template", "Jinja that reaches for Python's modules", template, "is unsafe"),
    refused("adapter", "a pickle as adapter_model.bin", pickled_adapter, "holds no adapter_model.safetensors"),
    refused(
        "adapter",
        "`megatron_core`: a module to import",
        lambda f, m: module_on_the_path(f, m, megatron_config={"a": 1}, megatron_core="evil"),
        "megatron_config, which is not known here",
    ),
    harmless(
        "adapter",
        "`auto_mapping`: a module to import",
        "read: no class is looked for",
        lambda f, m: module_on_the_path(f, m, auto_mapping={"base_model_class": "Net", "parent_library": "evil"}),
    ),
    harmless(
        "adapter",
        "a prompt's tokenizer with Python files beside it",
        "read: the prompt's saved numbers are taken, and no tokenizer",
        prompt_tokenizer,
    ),
    refused("images, cifar10", "pickles that name functions", cifar, "no CIFAR-10 pickle: .*posix.mkdir"),
    harmless("rows, a folder", "a loading script beside the rows", "read: rows alone", script_in_a_folder),
    refused("rows, the hub", "a loading script (datasets before 4)", script_of_the_hub, "cannot be had from the hub"),
    refused("rows, LLaMA-Factory's registry", "`script_url`", script_in_a_registry, "made by a script"),
    *(
        refused("rows, a file", f"a pickle as rows{ending}", file_of_rows(f"rows{ending}"), f"ends in {ending}")
        for ending in (".pkl", ".pt", ".npy", ".npz")
    ),
    harmless("rows, parquet", "an extension type that is a pickle", "read: as plain values", arrow("rows.parquet")),
    harmless("rows, Arrow", "an extension type that is a pickle", "read: as plain values", arrow("rows.arrow")),
    harmless("cache of tokens", "an array of pickled objects", "made again", token_cache),
    refused(
        "checkpoint convert, transformers",
        "a pickle as pytorch_model.bin",
        transformers("pytorch_model.bin"),
        rf"posix.mkdir\): {CODE}.*safetensors",
    ),
    *(
        refused("checkpoint convert, transformers", f"a pickle as {name}", transformers(name), MKDIR)
        for name in ("optimizer.pt", "scaler.pt")
    ),
    *(
        harmless("checkpoint convert, transformers", f"a pickle as {name}", PASSED_OVER, transformers(name))
        for name in ("training_args.bin", "rng_state.pth", "scheduler.pt")
    ),
    refused("checkpoint convert, dcp", "a pickle as .metadata", dcp_metadata, "it names posix.mkdir"),
    refused("checkpoint convert, dcp", "an object among the values", dcp_values, "step holds more than tensors"),
    refused("checkpoint convert, deepspeed", "an object among ZeRO's states", deepspeed_zero, CODE),
    refused("checkpoint convert, deepspeed", "an object in a universal checkpoint", deepspeed_universal, CODE),
    *(
        refused("checkpoint convert, accelerate", f"a pickle as {name}", accelerate(name), MKDIR)
        for name in ("optimizer.bin", "scaler.pt")
    ),
    *(
        harmless("checkpoint convert, accelerate", f"a pickle as {name}", PASSED_OVER, accelerate(name))
        for name in ("random_states_0.pkl", "scheduler.bin", "custom_checkpoint_0.pkl")
    ),
    refused("checkpoint convert, accelerate", "a pickle as .metadata of FSDP's", sharded_accelerate, "posix.mkdir"),
    refused("checkpoint of a run", "a pickle as training.safetensors", own_pickle, "damaged or no checkpoint"),
    refused("checkpoint of a run", "a link to a file elsewhere", own_link, "a link that leads out of the checkpoint"),
    harmless("events of a run", "a line that jsonpickle would call", "read: passed over, for it is no event", events),
    refused(
        "replay of a run's folder",
        "run.yaml names Python that came with it",
        lambda f, m: replay(naming_code(f, m), 1, lambda _: None),
        "lies outside the current folder|came with the folder",
    ),
    harmless("report of a run's folder", "run.yaml names Python", "read: run.yaml is not looked at", reported),
    refused("run file", "a YAML tag of Python's", lambda f, m: read_yaml(tagged(f, m)), "broken YAML"),
    refused(
        "import, YAML", "a YAML tag of Python's", lambda f, m: import_files([tagged(f, m)], None, None, False), "YAML"
    ),
    harmless("import, XTuner's Python", "imports and calls", "read: nothing of it runs, each call is listed", xtuner),
    harmless(
        "import, a DeepSpeed JSON",
        "`compile.backend`: a module to import",
        "read: the key is left out, which is listed",
        deepspeed_json,
    ),
    harmless(
        "import, LLaMA-Factory",
        "`trust_remote_code: true`",
        "read: the permission is not taken over, which is listed",
        llama_factory,
    ),
]
