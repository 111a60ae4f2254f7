"""Translates XTuner's `model`: PEFT's LoraConfig and Transformers' BitsAndBytesConfig to an adapter and a quantised
base.

Fields left out have the defaults of PEFT and Transformers, except the targets, which XTuner finds: all linear layers.
"""

from __future__ import annotations

from typing import Any

from drivetrain.config.translation import Handler, fated, if_on, lost
from drivetrain.importing.key_reader import KeyReader
from drivetrain.importing.llama_adapter import WEIGHTS_ALONE, plain

PRECISION = fated("unneeded", "precision decides the dtype of products")
LORA: dict[str, Handler] = {
    **dict.fromkeys(("task_type", "inference_mode", "peft_type"), fated("unneeded", "the workload and method set it")),
    "fan_in_fan_out": fated("unneeded", "the layer has it"),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), if_on(lost("all targets have one rank and alpha"))),
    **dict.fromkeys(
        ("layers_to_transform", "layers_pattern", "exclude_modules", "target_parameters"),
        if_on(lost("name the layers in adapter.targets")),
    ),
}
BITS: dict[str, Handler] = {
    "bnb_4bit_compute_dtype": PRECISION,
    "bnb_4bit_quant_storage": fated("unneeded", "codes are bytes, which every engine shards"),
    "llm_int8_threshold": fated("unneeded", "inputs are not quantised, so that none is too large"),
    "llm_int8_has_fp16_weight": if_on(fated("refused", "weights are kept in 8 bits")),
    "llm_int8_enable_fp32_cpu_offload": if_on(fated("refused", "a quantised base stays on the device")),
    "llm_int8_skip_modules": if_on(lost("all linear layers are quantised but those trained whole")),
}
OF_PICTURES = ("visual_encoder", "visual_encoder_lora", "llm_lora")


def model(given: KeyReader) -> None:
    """Translates its adapter and base, for any model."""
    if not isinstance(given.take("model"), dict):
        return
    given.note("model", "refused", "give it as workload.model.path of type language_model, with --onto")
    within = given.block("model")
    has_adapter = isinstance(within.take("lora"), dict)
    if has_adapter:
        _lora(within.block("lora"))
    for name in within.raw:
        if name in OF_PICTURES:
            within.note(name, "later", "no models of images and texts are trained here yet", alters=True)
    holder = within.block("llm") if isinstance(within.take("llm"), dict) else within
    bits = holder.take("quantization_config")
    if isinstance(bits, dict) and not has_adapter:
        holder.lose("quantization_config", "a base in few bits is frozen: nothing would be trained")
    elif isinstance(bits, dict):
        _bits(holder.block("quantization_config"))


def _kind(given: KeyReader, default: str) -> str:
    return str(given.take("type", default)).rsplit(".", 1)[-1]


def _lora(given: KeyReader) -> None:
    kind = _kind(given, "LoraConfig")
    if kind != "LoraConfig":
        for name in given.raw:
            given.lose(name, f"{kind}: adapters of XTuner are read from LoraConfig")
        return
    given.set("type", "adapter.method", "lora")
    given.set("r", "adapter.rank", given.count("r", 8))
    given.set("lora_alpha", "adapter.alpha", plain(given.number("lora_alpha", 8)))
    if given.has("lora_dropout"):
        given.set("lora_dropout", "adapter.dropout", given.number("lora_dropout", 0.0))
    given.set("target_modules", "adapter.targets", _named(given.take("target_modules", "all-linear")))
    if given.take("modules_to_save"):
        given.set("modules_to_save", "adapter.train_also", _named(given.take("modules_to_save")))
    else:
        given.off("modules_to_save")
    for key, to in (("use_rslora", "adapter.rslora"), ("use_dora", "adapter.dora")):
        if given.switch(key):
            given.set(key, to, True)
        else:
            given.off(key)
    bias = given.word("bias", "none")
    stays = bias == "none"
    given.note("bias", "unneeded" if stays else "refused", "biases of the base stay as they are", alters=not stays)
    _start(given)
    given.rest(LORA)


def _named(value: Any) -> Any:
    return [value] if isinstance(value, str) and value != "all-linear" else value


def _start(given: KeyReader) -> None:
    start = str(given.take("init_lora_weights", True)).lower()
    rounds = start.removeprefix("pissa_niter_")
    if start == "pissa":
        given.set("init_lora_weights", "adapter.pissa", True)
    elif rounds != start:
        why = f"from an exact decomposition, there a fast one of {rounds} rounds"
        given.set("init_lora_weights", "adapter.pissa", True, why)
    elif start == "true":
        given.off("init_lora_weights", why="B starts from zeros, A at random")
    else:
        given.lose("init_lora_weights", f"{start}: there are PEFT's own start and pissa")


def _bits(given: KeyReader) -> None:
    four = given.switch("load_in_4bit")
    lacking = _lacking(given, four)
    if lacking is not None:
        for name in given.raw:
            given.lose(name, lacking)
        return
    given.off("type", why="quantised_base says it")
    if four:
        given.set("load_in_4bit", "quantised_base.format", "nf4")
        given.note("bnb_4bit_quant_type", "mapped", "quantised_base.format says it")
        given.set("bnb_4bit_use_double_quant", "quantised_base.double", given.switch("bnb_4bit_use_double_quant"))
        given.off("load_in_8bit")
    elif given.switch("load_in_8bit"):
        given.set("load_in_8bit", "quantised_base.format", "int8", WEIGHTS_ALONE)
        given.off("load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", why="weights have 8 bits")
    else:
        given.off("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
    given.rest(BITS)


def _lacking(given: KeyReader, four: bool) -> str | None:
    kind, codes = _kind(given, "BitsAndBytesConfig"), given.word("bnb_4bit_quant_type", "fp4")
    if kind != "BitsAndBytesConfig":
        return f"{kind}: quantised bases are read from BitsAndBytesConfig"
    if four and codes != "nf4":
        return f"{codes}: 4 bits are nf4 here" + (
            "" if given.has("bnb_4bit_quant_type") else " (what is left out is fp4)"
        )
    return None
