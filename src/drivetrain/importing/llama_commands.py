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
# key → field of the run, and LLaMA-Factory's default (its GeneratingArguments)
ANSWERS: dict[str, tuple[str, float]] = {
    "max_new_tokens": ("workload.generate.max_new_tokens", 1024),
    "temperature": ("workload.generate.temperature", 0.95),
}
QUANTISED: dict[float, str] = {8: "int8", 4: "int4"}  # bits → export's numbers
# keys that decide how its answers are drawn → the value at which they change nothing
DRAWING = {"top_p": 1.0, "top_k": 0.0, "num_beams": 1.0, "repetition_penalty": 1.0, "length_penalty": 1.0}

TAKEN = (
    *("model_name_or_path", "adapter_name_or_path", "trust_remote_code", "infer_backend", "eval_dataset"),
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
    in_turn(given, [_quantisation, _answering])
    given.rest(dict.fromkeys(known, fated("unneeded", "it decides nothing where nothing is trained")))
    return found


def _answering(given: KeyReader) -> None:
    """Notes the keys that decide what is answered."""
    samples = given.switch("do_sample", True)
    if given.switch("do_predict") and samples:
        why = "in the command; tokens are drawn from all, there from the likeliest 50 (top_k) and their 0.7 (top_p)"
        given.note("do_predict", "changed", why)
    elif given.switch("do_predict"):
        given.note("do_predict", "mapped", "in the command")
    else:
        given.off("do_predict")
    given.note("do_sample", "mapped", "the temperature, in the command" if samples else "temperature 0, in the command")
    for key, idle in DRAWING.items():
        if given.number(key, idle) == idle or (key in ("top_p", "top_k") and not samples):
            given.off(key)
        else:
            given.note(key, "refused", "tokens are drawn at the temperature, from all tokens, one answer a prompt")
    given.note("max_length", "unneeded", "max_new_tokens bounds the answer")
    if given.switch("do_predict"):
        given.note("default_system", "refused", "predict takes the run's own: give workload.data.system=... to it")
        given.note("cutoff_len", "changed", "the run's workload.data.length bounds what is read")
    elif given.has("default_system"):
        given.note("default_system", "mapped", "in the command")


def _quantisation(given: KeyReader) -> None:
    if not given.has("export_quantization_bit"):
        return
    bits = given.number("export_quantization_bit", 0)
    if bits in QUANTISED:
        why = f"{bits:g} bits are {QUANTISED[bits]}, which needs no data; there they are GPTQ"
        given.note("export_quantization_bit", "changed", why)
    else:
        why = f"{bits:g} bits by GPTQ: drivetrain export RUN --to transformers --quantise int4 rounds to 4 without data"
        given.note("export_quantization_bit", "refused", why)


def _commands(raw: Mapping[str, Any]) -> Iterator[list[str]]:
    source, trust = _source(raw), ["--trust"] if _is_on(raw, "trust_remote_code") else []
    if raw.get("infer_backend") and source is not None:
        yield ["drivetrain", "chat", source, *_talking(raw), *trust]
        yield ["drivetrain", "serve", source, *trust]
    run, checkpoint = _run(source)
    if _is_on(raw, "do_predict"):
        settings = [f"{to}={_answer(raw, key)}" for key, (to, _) in ANSWERS.items()]
        output, names = Path(str(raw.get("output_dir") or "predict")), _names(raw.get("eval_dataset"))
        sets: list[str | None] = [*names] if names else [None]
        for name in sets:
            data = [] if name is None else ["--data", name]
            to = str(output / name if name is not None and len(names) > 1 else output)
            yield ["drivetrain", "predict", run, *settings, *checkpoint, *data, "--llama-factory", to, *trust]
    if raw.get("export_dir"):
        to = str(raw["export_dir"])
        yield ["drivetrain", "export", run, *checkpoint, "--to", "transformers", "--output", to, *_export(raw), *trust]


def _answer(raw: Mapping[str, Any], key: str) -> str:
    """Returns the value of a key of ANSWERS, or LLaMA-Factory's default where the file has none."""
    samples = raw.get("do_sample") is None or _is_on(raw, "do_sample")
    if key == "temperature" and not samples:
        return "0"
    given = raw.get(key)
    return f"{number(key, ANSWERS[key][1] if given is None else given):.12g}"


def _talking(raw: Mapping[str, Any]) -> list[str]:
    """Returns the options of chat that the file gives."""
    found = [] if raw.get("default_system") is None else ["--system", str(raw["default_system"])]
    for key, option in (("temperature", "--temperature"), ("max_new_tokens", "--max-new-tokens")):
        if raw.get(key) is not None or (key == "temperature" and raw.get("do_sample") is not None):
            found += [option, _answer(raw, key)]
    return found


def _export(raw: Mapping[str, Any]) -> list[str]:
    size, bits = raw.get("export_size"), raw.get("export_quantization_bit")
    found = [] if size is None else ["--shard-size", f"{count('export_size', size)}GB"]
    numbers = None if bits is None else QUANTISED.get(number("export_quantization_bit", bits))
    return found if numbers is None else [*found, "--quantise", numbers]


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
