"""The commands that do what a LLaMA-Factory file asks for beside training: chat, its API, its predict, its export.

They take a run's folder, and chat and serve a folder of PEFT or Transformers too. What LLaMA-Factory trained itself is
no run: its adapter is chatted with and served as it lies, and merged or predicted with once a run goes on with it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from drivetrain.config.translation import Fate, fated
from drivetrain.importing.key_reader import KeyReader, count, in_turn, number, switch
from drivetrain.importing.translated_file import Source, TranslatedFile
from drivetrain.runtime.run_folder import RunFolder

RUN = "RUN"  # stands for the folder of the run, where the file cannot name it
INFERENCE = ("infer_backend", "export_dir", "do_predict")  # keys that make a file one of these
ANSWERS = {"max_new_tokens": "workload.generate.max_new_tokens", "temperature": "workload.generate.temperature"}


TAKEN = (
    *("model_name_or_path", "adapter_name_or_path", "trust_remote_code", "infer_backend", "do_predict", "eval_dataset"),
    *("output_dir", "export_dir", "export_size", *ANSWERS),
)
OWN_BACKEND = "drivetrain answers with its own engine, on any device that PyTorch has"
WHY = {
    "infer_backend": ("changed", OWN_BACKEND),
    "template": ("changed", "the chat template beside the tokenizer is used"),
    "max_samples": ("refused", "predict answers all samples of a file: give a shorter one"),
    "predict_with_generate": ("mapped", "predict answers where the run has workload.generate"),
}


def commands(raw: Mapping[str, Any]) -> list[str]:
    """Returns the commands, ready to be typed; none for a file that only trains. Raises UserError for a size that is no
    number."""
    return [shlex.join(command) for command in _commands(raw)]


def only_answers(raw: Mapping[str, Any]) -> bool:
    """Returns whether a file of LLaMA-Factory trains nothing: it names no data to train on."""
    return not raw.get("dataset") and any(raw.get(key) for key in INFERENCE)


def translated(source: Source, known: Iterable[str]) -> TranslatedFile:
    """Returns the notes on a file that trains nothing. known: LLaMA-Factory's keys."""
    found = TranslatedFile(source)
    given = KeyReader(source.raw, found, source.prefix)
    for key in TAKEN:
        if key not in WHY and given.has(key):
            idle = key == "model_name_or_path" and given.has("adapter_name_or_path")
            given.note(key, *(("unneeded", "the adapter names its base") if idle else ("mapped", "in the command")))
    for key, (fate, why) in WHY.items():
        if given.has(key):
            given.note(key, cast(Fate, fate), why)
    in_turn(given, [_quantisation])
    given.rest(dict.fromkeys(known, fated("unneeded", "it decides nothing where nothing is trained")))
    return found


def _quantisation(given: KeyReader) -> None:
    if not given.has("export_quantization_bit"):
        return
    bits = given.number("export_quantization_bit", 0)
    if bits == 8:
        why = "8 bits are int8 of torchao, which needs no data; there they are GPTQ"
        given.note("export_quantization_bit", "changed", why)
    else:
        why = f"{bits:g} bits by GPTQ: drivetrain export RUN --to gguf --quantise q4_0 rounds to 4 without data"
        given.note("export_quantization_bit", "refused", why)


def _commands(raw: Mapping[str, Any]) -> Iterator[list[str]]:
    source, trust = _source(raw), ["--trust"] if _is_on(raw, "trust_remote_code") else []
    if raw.get("infer_backend") and source is not None:
        yield ["drivetrain", "chat", source, *trust]
        yield ["drivetrain", "serve", source, *trust]
    run, checkpoint = _run(source)
    if _is_on(raw, "do_predict"):
        settings = [f"{to}={raw[key]}" for key, to in ANSWERS.items() if raw.get(key) is not None]
        output, names = Path(str(raw.get("output_dir") or "predict")), _names(raw.get("eval_dataset"))
        sets: list[str | None] = [*names] if names else [None]
        for name in sets:
            data = [] if name is None else ["--data", name]
            to = str(output / name if name is not None and len(names) > 1 else output)
            yield ["drivetrain", "predict", run, *settings, *checkpoint, *data, "--llama-factory", to]
    if raw.get("export_dir"):
        to = str(raw["export_dir"])
        yield ["drivetrain", "export", run, *checkpoint, "--to", "transformers", "--output", to, *_export(raw)]


def _export(raw: Mapping[str, Any]) -> list[str]:
    size, bits = raw.get("export_size"), raw.get("export_quantization_bit")
    found = [] if size is None else ["--shard-size", f"{count('export_size', size)}GB"]
    eight = bits is not None and number("export_quantization_bit", bits) == 8
    return [*found, *(["--quantise", "int8"] if eight else [])]


def _source(raw: Mapping[str, Any]) -> str | None:
    """Returns the adapter, the last of several, or the model."""
    adapters = _names(raw.get("adapter_name_or_path"))
    model = raw.get("model_name_or_path")
    return adapters[-1] if adapters else None if model is None else str(model)


def _run(source: str | None) -> tuple[str, list[str]]:
    """Returns the run's folder and the option for its checkpoint, if the source lies in a run here; else RUN."""
    place = Path(source or RUN)
    if source is not None and _is_run(place):
        return source, []
    if source is not None and _is_run(place.parent.parent):
        return str(place.parent.parent), ["--checkpoint", source]
    return RUN, []


def _is_run(place: Path) -> bool:
    try:
        return RunFolder(place).run_file.is_file()
    except (OSError, ValueError):  # a name that no file system takes
        return False


def _names(value: Any) -> list[str]:
    texts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
    return [str(text).strip() for text in texts if str(text).strip()]


def _is_on(raw: Mapping[str, Any], key: str) -> bool:
    return switch(key, raw.get(key) or False)
