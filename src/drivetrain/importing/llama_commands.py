"""The commands that do what a LLaMA-Factory file asks for beside training: chat, its API, its predict, its export.

They take a run's folder, and chat and serve a folder of PEFT or Transformers too. What LLaMA-Factory trained itself is
no run: its adapter is chatted with and served as it lies, and merged or predicted with once a run goes on with it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from drivetrain.errors import problem, together
from drivetrain.importing.key_reader import SWITCHES, KeyReader, count, in_turn, number, switch
from drivetrain.importing.llama_command_keys import handlers
from drivetrain.importing.translated_file import Source, TranslatedFile
from drivetrain.runtime.run_folder import RunFolder

RUN = "RUN"  # stands for the folder of the run, where the file cannot name it
INFERENCE = ("infer_backend", "export_dir", "do_predict", "do_eval", "task")  # keys that make a file one of these
# key → field of the run, and LLaMA-Factory's default (its GeneratingArguments)
ANSWERS: dict[str, tuple[str, float]] = {
    "max_new_tokens": ("workload.generate.max_new_tokens", 1024),
    "temperature": ("workload.generate.temperature", 0.95),
}
QUANTISED: dict[float, str] = {8: "int8", 4: "int4"}  # bits → export's numbers
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # infer_dtype → export's --dtype
SHOTS = 5  # LLaMA-Factory's default (its EvaluationArguments)
# keys that decide how its answers are drawn → the value at which they change nothing
DRAWING = {"top_p": 1.0, "top_k": 0.0, "num_beams": 1.0, "repetition_penalty": 1.0, "length_penalty": 1.0}

TAKEN = (
    *("model_name_or_path", "adapter_folder", "trust_remote_code", "eval_dataset", "dataset", "dataset_dir"),
    *("output_dir", "export_dir", "export_size", "do_eval", *ANSWERS),
)
OWN_BACKEND = (
    "drivetrain answers with its own engine, on any device that PyTorch has; vLLM and SGLang serve an export "
    "(drivetrain serve EXPORT --backend vllm)"
)


def commands(raw: Mapping[str, Any]) -> list[str]:
    """Returns the commands, ready to be typed; none for a file that only trains. Raises UserError for numbers that the
    verbs refuse."""
    together([partial(_check, raw, *bounds) for bounds in _bounds(raw)])
    return [shlex.join(command) for command in _commands(raw)]


def _bounds(raw: Mapping[str, Any]) -> Iterator[tuple[str, str, float, float | None]]:
    """Yields (key, verb that gets it, least, most) of the numbers in the commands."""
    samples = raw.get("do_sample") is None or _is_on(raw, "do_sample")
    has_model = _source(raw) is not None
    for verb, hottest in (
        *([("chat", 2.0)] if raw.get("infer_backend") and has_model else []),
        *([("predict", None)] if _is_on(raw, "do_predict") else []),
    ):
        yield "max_new_tokens", verb, 1, None
        if samples:
            yield "temperature", verb, 0, hottest
    if raw.get("task") and has_model:
        yield "n_shot", "evaluate", 0, None
    if raw.get("export_dir"):
        yield "export_size", "export", 1, None


def _check(raw: Mapping[str, Any], key: str, verb: str, least: float, most: float | None) -> None:
    value = raw.get(key)
    if value is None:
        return
    found = number(key, value) if key == "temperature" else count(key, value)
    if found < least or (most is not None and found > most):
        allowed = f"{least:g} or more" if most is None else f"{least:g} to {most:g}"
        raise problem(key, f"{found:g} was given, and drivetrain {verb} takes {allowed}", f"give {allowed}")


def only_answers(raw: Mapping[str, Any]) -> bool:
    """Returns whether a file of LLaMA-Factory trains nothing: without do_train it only answers, and one that names no
    data has none to train on."""
    if not any(raw.get(key) for key in INFERENCE):
        return False
    on = {key for key in ("do_train", "do_predict", "do_eval") if SWITCHES.get(str(raw.get(key)).strip().lower())}
    return not raw.get("dataset") or (bool(on) and "do_train" not in on)


def translated(source: Source, known: Iterable[str]) -> TranslatedFile:
    """Returns the notes on a file that trains nothing. known: LLaMA-Factory's keys."""
    found = TranslatedFile(source)
    given = KeyReader(source.raw, found, source.prefix)
    for key in TAKEN:
        if given.has(key):
            idle = key == "model_name_or_path" and given.has("adapter_name_or_path")
            given.note(key, *(("unneeded", "the adapter names its base") if idle else ("mapped", "in the command")))
    given.note("infer_backend", "changed", OWN_BACKEND)
    given.note("template", "changed", "the chat template beside the tokenizer is used")
    in_turn(given, [_adapters, _exporting, _answering, _drawing])
    given.rest(handlers(known))
    return found


def _adapters(given: KeyReader) -> None:
    adapters = _names(given.take("adapter_name_or_path"))
    if len(adapters) > 1:
        why = f"the last, {adapters[-1]}, is in the command; a run whose `adapter` lists all of them merges them"
        given.note("adapter_name_or_path", "refused", why)
    else:
        given.note("adapter_name_or_path", "mapped", "in the command")


def _exporting(given: KeyReader) -> None:
    """Notes the keys that decide what is exported in which numbers."""
    if given.has("export_quantization_bit"):
        bits = given.number("export_quantization_bit", 0)
        if bits in QUANTISED:
            why = f"{bits:g} bits are {QUANTISED[bits]}, which needs no data; there they are GPTQ"
            given.note("export_quantization_bit", "changed", why)
        else:
            why = (
                f"{bits:g} bits by GPTQ: drivetrain export RUN --to transformers --quantise int4 rounds to 4 "
                "without data"
            )
            given.note("export_quantization_bit", "refused", why)
    dtype = given.word("infer_dtype", "auto")
    if dtype not in DTYPES and dtype != "auto":
        raise problem(f"{given.prefix}infer_dtype", f"{dtype!r} was given", f"give auto, {', '.join(DTYPES)}")
    if dtype == "auto":
        given.note("infer_dtype", "changed", "an export has fp32, there 16 bits: --dtype bf16 halves it")
    elif given.has("export_dir"):
        given.note("infer_dtype", "mapped", "in the command")
    else:
        given.note("infer_dtype", "refused", "the weights keep the numbers that they have")


def _answering(given: KeyReader) -> None:
    """Notes the keys that decide what is answered."""
    samples, predicts = given.switch("do_sample", True), given.switch("do_predict")
    if predicts and samples:
        why = "in the command; tokens are drawn from all, there from the likeliest 50 (top_k) and their 0.7 (top_p)"
        given.note("do_predict", "changed", why)
    elif predicts:
        given.note("do_predict", "mapped", "in the command")
    else:
        given.off("do_predict")
    given.note("do_sample", "mapped", "the temperature, in the command" if samples else "temperature 0, in the command")
    given.note("max_length", "unneeded", "max_new_tokens bounds the answer")
    if predicts and not given.switch("predict_with_generate", True):
        why = "predict writes answers; drivetrain evaluate has the loss"
        given.note("predict_with_generate", "refused", why)
    else:
        given.note("predict_with_generate", "mapped", "predict answers where the run has workload.generate")
    if predicts:
        given.note("default_system", "refused", "predict takes the run's own: give workload.data.system=... to it")
        given.note("cutoff_len", "changed", "the run's workload.data.length bounds what is read")
    else:
        given.note("default_system", "mapped", "in the command of chat; requests to a server bring their own")
        given.note("cutoff_len", "unneeded", "the model's context bounds what is read")


def _drawing(given: KeyReader) -> None:
    """Notes the keys that decide how tokens are drawn, beside the temperature."""
    samples = given.switch("do_sample", True)
    if given.switch("do_predict"):
        why = "tokens are drawn at the temperature, from all tokens, one answer a prompt"
    else:
        why = "the model's generation_config.json says it, to chat and to a server, whose requests may change it"
    for key, idle in DRAWING.items():
        if given.number(key, idle) == idle or (key in ("top_p", "top_k") and not samples):
            given.off(key)
        else:
            beams = key in ("num_beams", "length_penalty")
            given.note(key, "refused", "one answer is made, without beams" if beams else why)


def _commands(raw: Mapping[str, Any]) -> Iterator[list[str]]:
    source, trust = _source(raw), ["--trust"] if _is_on(raw, "trust_remote_code") else []
    if raw.get("infer_backend") and source is not None:
        yield ["drivetrain", "chat", source, *_talking(raw), *trust]
        yield ["drivetrain", "serve", source, *trust]
    if raw.get("task") and source is not None:
        shots = count("n_shot", SHOTS if raw.get("n_shot") is None else raw["n_shot"])
        yield [
            "drivetrain",
            "evaluate",
            source,
            "--multiple-choice",
            str(_questions(raw)),
            "--shots",
            str(shots),
            *trust,
        ]
    run, checkpoint = _run(source)
    names = _names(raw.get("eval_dataset"))
    if not names and not _is_on(raw, "do_train"):
        names = _names(raw.get("dataset"))
    place = raw.get("dataset_dir")
    registry = [] if place is None or not names else [f"workload.data.registry={place}"]
    if _is_on(raw, "do_eval") and not _is_on(raw, "do_train"):
        data = [word for name in names for word in ("--data", name)]
        yield ["drivetrain", "evaluate", run, *registry, *checkpoint, *data, *trust]
    if _is_on(raw, "do_predict"):
        settings = [*registry, *(f"{to}={_answer(raw, key)}" for key, (to, _) in ANSWERS.items())]
        output = Path(str(raw.get("output_dir") or "predict"))
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
    found += [] if numbers is None else ["--quantise", numbers]
    dtype, hub = DTYPES.get(str(raw.get("infer_dtype")).strip().lower()), raw.get("export_hub_model_id")
    found += [] if dtype is None else ["--dtype", dtype]
    return found if not hub else [*found, "--push", str(hub)]


def _questions(raw: Mapping[str, Any]) -> Path:
    """Returns the folder of a task's questions. task: "mmlu_test", "ceval_validation" or "cmmlu_test", or the name
    alone."""
    return Path(str(raw.get("task_dir") or "evaluation")) / str(raw["task"]).partition("_")[0]


def _source(raw: Mapping[str, Any]) -> str | None:
    """Returns the adapter, the last of several, or the model."""
    adapters = _names(raw.get("adapter_name_or_path"))
    model, within = raw.get("model_name_or_path"), raw.get("adapter_folder")
    if adapters:
        return adapters[-1] if within is None else str(Path(adapters[-1]) / str(within))
    return None if model is None else str(model)


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
