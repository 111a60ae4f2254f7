"""Translates LLaMA-Factory v1's keys of model, adapter, quantised base and data to a language_model workload.

Sources of their meaning: v1/core/model_engine.py, v1/core/data_engine.py, v1/plugins/model_plugins and data_plugins.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.config.files import read_yaml
from drivetrain.config.fine_tuning import SFT
from drivetrain.config.preference import DPO, REWARD
from drivetrain.config.translation import Fate, Handler, fated, if_on, lost
from drivetrain.errors import UserError
from drivetrain.importing import llama_preferences
from drivetrain.importing.key_reader import KeyReader
from drivetrain.importing.llama_adapter import FORMATS, WEIGHTS_ALONE, plain
from drivetrain.importing.llama_language import DATA, Unwritten
from drivetrain.importing.llama_model import OWN_CLASSES
from drivetrain.importing.llama_weights import CUTOFF, MODEL, names_of

KERNELS = {"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash"}
FORMS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "pair": "trl"}
OWN_ROWS = "rows there are messages of typed parts, which nothing here reads: name a YAML whose sets have a converter"
FREEZE = "freeze_trainable_layers"
PAIR = "pair"  # the converter of preferences: lists of messages as the columns chosen and rejected
CLASSES = {"llm": "a language model", "cls": "a reward model"}
OF_DPO = ("pref_loss", "pref_beta", "pref_ftx", "simpo_gamma", "dpo_label_smoothing", "ld_alpha")
EARLIER = "earlier replies that both sides have are not trained; there they count on both sides"


def workload(given: KeyReader) -> None:
    """Translates model, adapter and data; keys of parts that are not available are noted with the reason."""
    why = _unwritten(given)
    if why is not None:
        _without(given, why)
        return
    stage = _stage(given)
    given.found.translation.settings |= {"workload.type": "language_model", "workload.stage": stage}
    _model(given)
    _trained(given)
    _quantised(given)
    _data(given)
    _preferences(given, stage)


def _stage(given: KeyReader) -> str:
    """Returns the training stage that the data and the model's class show: the command line's word is not in a file."""
    if not _has_pairs(_sets(given, str(given.take("train_dataset"))) or {}):
        return SFT
    return REWARD if given.word("model_class", "llm") == "cls" else llama_preferences.stage_of(given, DPO)


def _has_pairs(sets: Mapping[str, Any]) -> bool:
    return any(isinstance(block, Mapping) and block.get("converter") == PAIR for block in sets.values())


def _preferences(given: KeyReader, stage: str) -> None:
    if stage in (SFT, REWARD):
        given.off(*OF_DPO, why=f"it is of dpo, and the data show {stage}")
        return
    llama_preferences.of_pairs(given)
    given.set("pref_beta", f"{llama_preferences.FIELD}.beta", given.number("pref_beta", llama_preferences.BETA))
    trains_on = bool(given.take("peft_config")) and names_of(given.block("peft_config"), "adapter_name_or_path")
    if stage == DPO and trains_on:  # not the model with the old adapter
        given.found.translation.settings[f"{llama_preferences.FIELD}.reference"] = "adapters_off"


# --- what cannot be had ----------------------------------------------------------------------------------------------


def _unwritten(given: KeyReader) -> Unwritten | None:
    kind = given.word("model_class", "llm")
    if kind not in CLASSES:
        return Unwritten("model_class", "refused", f"{kind}: there are {', '.join(CLASSES)}", alters=True)
    sets = _sets(given, str(given.take("train_dataset", "")))
    if kind == "cls" and sets is not None and not _has_pairs(sets):
        return Unwritten("model_class", "refused", "a reward model learns from pairs: converter: pair", alters=True)
    return _method(given) or _without_data(given)


def _method(given: KeyReader) -> Unwritten | None:
    if not given.take("peft_config"):
        return None
    block = given.block("peft_config")
    name = block.word("name")
    if name not in ("lora", "freeze"):
        return Unwritten("peft_config.name", "refused", f"{name}: there are lora, freeze", alters=True)
    if name == "freeze" and block.count(FREEZE, 2) <= 0:
        why = "the last blocks can be trained alone, not the first"
        return Unwritten(f"peft_config.{FREEZE}", "refused", why, alters=True)
    return None


def _without_data(given: KeyReader) -> Unwritten | None:
    """Handles data that are missing, or of no known form."""
    path = str(given.take("train_dataset", ""))
    if not given.take("model") or not path:
        key = "train_dataset" if given.take("model") else "model"
        return Unwritten(key, "refused", f"{key} is not given")
    if not path.endswith((".yaml", ".yml")):
        return Unwritten("train_dataset", "refused", OWN_ROWS)
    sets = _sets(given, path)
    if sets is None:
        why = f"{path}, which names the data sets, is neither here nor beside the file: put it there"
        return Unwritten("train_dataset", "refused", why)
    for name, block in sets.items():
        form = block.get("converter") if isinstance(block, Mapping) else None
        if form not in FORMS or not isinstance(block.get("path"), str):
            return Unwritten("train_dataset", "refused", f"{name}: {OWN_ROWS}")
        if block.get("weight") is not None:
            why = f"{name}: weight there draws rows anew, as many times as there are; give samples"
            return Unwritten("train_dataset", "refused", why, alters=True)
    if len({block["converter"] == PAIR for block in sets.values()}) > 1:
        return Unwritten("train_dataset", "refused", "some sets hold pairs and some do not", alters=True)
    return None


def _sets(given: KeyReader, path: str) -> dict[str, Any] | None:
    """Returns the data sets that a YAML names: relative to the current folder, or to the file's and those above it."""
    folder = given.found.source.folder.absolute()
    places = [place / path for place in (Path(), folder, *folder.parents)]
    file = next((place for place in places if place.is_file()), None)
    try:
        return read_yaml(file) or None if file is not None else None
    except UserError:
        return None


def _without(given: KeyReader, why: Unwritten) -> None:
    undecided = fated(why.fate, f"no workload is written: {why.why}")
    for name in (*TOGETHER, *KEYS):
        if name not in given.raw:
            continue
        given.used.add(name)
        value = given.raw[name]
        keys = [f"{name}.{part}" for part in value] if isinstance(value, dict) and value else [name]
        for key in keys:
            handler = fated(why.fate, why.why, why.alters) if key == why.key else undecided
            handler(given.prefix + key, value, given.found.translation)


# --- model and adapter -----------------------------------------------------------------------------------------------


def _model(given: KeyReader) -> None:
    given.set("model", f"{MODEL}.path", str(given.take("model")))
    given.off("model_class", why=f"it is {CLASSES[given.word('model_class', 'llm')]}")
    kernel = given.word("flash_attn", "sdpa")
    if kernel in KERNELS:
        given.set("flash_attn", f"{MODEL}.attention", KERNELS[kernel])
    else:
        given.note("flash_attn", "refused", f"{kernel}: there are {', '.join(KERNELS)}")


def _trained(given: KeyReader) -> None:
    if not given.take("peft_config"):
        given.off("peft_config", why="all parameters are trained")
        return
    block = given.block("peft_config")
    if block.word("name") == "freeze":
        block.note("name", "mapped", f"{MODEL}.train_last_blocks says it")
        block.set(FREEZE, f"{MODEL}.train_last_blocks", block.count(FREEZE, 2))
        whole = names_of(block, "freeze_trainable_modules") in ([], ["all"])
        fate: Fate = "mapped" if whole else "refused"
        block.note("freeze_trainable_modules", fate, "all that is in the blocks is trained", alters=not whole)
        if names_of(block, "freeze_extra_modules"):
            block.lose("freeze_extra_modules", "nothing beside the blocks is trained")
        else:
            block.off("freeze_extra_modules")
        block.rest({"cast_trainable_params_to_fp32": fated("unneeded", "what is trained is kept in fp32")})
    elif names_of(block, "adapter_name_or_path"):
        _saved(block)
    else:
        _lora(block)


def _saved(block: KeyReader) -> None:
    paths = names_of(block, "adapter_name_or_path")
    block.note("name", "mapped", "the adapter at adapter.path has it")
    if len(paths) > 1:
        block.lose("adapter_name_or_path", "v1 trains on from a single one: merge the others into the base")
    else:
        block.set("adapter_name_or_path", "adapter.path", paths[0])
    block.rest({**dict.fromkeys(LORA, fated("unneeded", "the adapter that is trained on has its own")), **EXPORT})


def _lora(block: KeyReader) -> None:
    block.set("name", "adapter.method", "lora")
    block.set("r", "adapter.rank", block.count("r", 8))
    block.set("lora_alpha", "adapter.alpha", plain(block.number("lora_alpha", 16.0)))
    block.set("lora_dropout", "adapter.dropout", block.number("lora_dropout", 0.05))
    targets = names_of(block, "target_modules")
    block.set("target_modules", "adapter.targets", targets if targets and targets != ["all"] else "all-linear")
    for key, to in (("use_rslora", "adapter.rslora"), ("use_dora", "adapter.dora")):
        if block.switch(key):
            block.set(key, to, True)
        else:
            block.off(key)
    if names_of(block, "modules_to_save"):
        block.set("modules_to_save", "adapter.train_also", names_of(block, "modules_to_save"))
    else:
        block.off("modules_to_save")
    block.off("adapter_name_or_path", why="there is none yet")
    block.rest(EXPORT)


LORA = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora", "modules_to_save")
EXPORT: dict[str, Handler] = dict.fromkeys(
    ("export_dir", "export_size", "export_hub_model_id", "infer_dtype", "export_legacy_format"),
    fated("unneeded", "drivetrain export writes what was trained"),
)


def _quantised(given: KeyReader) -> None:
    if not given.take("quant_config"):
        given.off("quant_config", why="nothing is quantised")
        return
    block = given.block("quant_config")
    name = block.word("name")
    bits = block.count("quantization_bit", 4 if name == "bnb" else 0)
    kind = block.word("quantization_type", "nf4")
    why = ""
    if name not in ("bnb", "auto") or bits not in (0, *FORMATS) or (bits == 4 and kind != "nf4"):
        why = f"{name}, {bits} bits, {kind}: there are bitsandbytes' nf4 and int8"
    elif bits and not _has_adapter(given):
        why = "a base in few bits is frozen, and nothing would be trained"
    if why:
        for key in block.raw:
            block.lose(key, why)
    elif not bits:
        block.off(*block.raw, why="nothing is quantised")
    else:
        block.set("quantization_bit", "quantised_base.format", FORMATS[bits], "" if bits == 4 else WEIGHTS_ALONE)
        if bits == 4:
            block.set("double_quantization", "quantised_base.double", block.switch("double_quantization", True))
        kept = ("quantization_bit", "double_quantization") if bits == 4 else ("quantization_bit",)
        block.off(*(key for key in block.raw if key not in kept), why="quantised_base and precision set it")


def _has_adapter(given: KeyReader) -> bool:
    return bool(given.take("peft_config")) and given.block("peft_config").word("name") == "lora"


# --- data ------------------------------------------------------------------------------------------------------------


def _data(given: KeyReader) -> None:
    path = str(given.take("train_dataset"))
    sets = _sets(given, path) or {}
    why = "a conversation is one sample with all its replies, there one for each reply; " * any(
        block["converter"] == "sharegpt" for block in sets.values()
    )
    why += f"{EARLIER}; " * _has_pairs(sets)
    why += "rows of a share are drawn once, there again and again" * any("size" in block for block in sets.values())
    given.set("train_dataset", f"{DATA}.train", list(map(_set, sets.values())), why.removesuffix("; "))
    given.found.translation.settings[f"{DATA}.evaluation_fraction"] = 0.0  # nothing is held out there
    given.off("eval_dataset", why="nothing is evaluated there; give it as workload.data.evaluation")
    given.set("cutoff_len", f"{DATA}.length", given.count("cutoff_len", CUTOFF))
    if any(block.get("streaming") for block in sets.values()):
        given.found.translation.settings[f"{DATA}.stream"] = True


def _set(block: Mapping[str, Any]) -> dict[str, Any]:
    described = {"path": block["path"], "formatting": FORMS[block["converter"]], "samples": block.get("size")}
    if block.get("source", "hf_hub") == "hf_hub":
        described["split"] = block.get("split")
    return {name: value for name, value in described.items() if value is not None}


KEYS: dict[str, Handler] = {
    "custom_chat_template": if_on(lost(f"save it as a file, and name that in {DATA}.template")),
    "trust_remote_code": if_on(fated("changed", OWN_CLASSES)),
    "init_config": fated("unneeded", "engine.meta spares the memory of ranks"),
    "kernel_config": fated("unneeded", "the model's own kernels compute the same"),
}
TOGETHER = (
    *("model", "model_class", "flash_attn", "peft_config", "quant_config", "train_dataset", "eval_dataset"),
    *("cutoff_len", *OF_DPO),
)
# that no other software has
OWN = (
    *("model_class", "peft_config", "quant_config", "train_dataset", "custom_chat_template", "init_config"),
    "kernel_config",
)
