"""Translates LLaMA-Factory's keys of the model: which one, how it computes, and which of its weights are trained."""

from __future__ import annotations

from drivetrain.config.translation import Fate
from drivetrain.importing.key_reader import KeyReader
from drivetrain.importing.llama_model import context_of, published_config

MODEL = "workload.model"
CUTOFF = 2048  # tokens, where cutoff_len is not given


def _method(given: KeyReader) -> str:
    """Returns what is trained, LoRA by default. The key still counts as unread."""
    return str(given.raw.get("finetuning_type") or "lora").strip().lower()


def is_oft(given: KeyReader) -> bool:
    return _method(given) == "oft"


def has_adapter(given: KeyReader) -> bool:
    """Returns whether an adapter is trained, and not the model's own weights."""
    return _method(given) in ("lora", "oft")


def names_of(given: KeyReader, key: str) -> list[str]:
    """Returns the names in a text with commas, or in a list."""
    value = given.take(key, [])
    parts = value if isinstance(value, list) else str(value).split(",")
    return [str(part).strip() for part in parts if str(part).strip()]


def cutoff(given: KeyReader) -> int:
    """Translates the length. With packing LLaMA-Factory leaves a place of each pack empty."""
    asked = given.switch("packing") or given.switch("neat_packing")
    return given.count("cutoff_len", CUTOFF) - asked


def _named(given: KeyReader) -> None:
    path = str(given.take("model_name_or_path"))
    if given.switch("train_from_scratch"):
        given.set("train_from_scratch", f"{MODEL}.config", published_config(path))
        given.set("model_name_or_path", f"{MODEL}.tokenizer", path)
    else:
        given.set("model_name_or_path", f"{MODEL}.path", path)
        given.off("train_from_scratch")
    kernels = {"auto": "auto", "disabled": "eager", "sdpa": "sdpa", "fa2": "flash"}
    kernel = given.word("flash_attn", "auto")
    if kernel not in kernels:
        given.note("flash_attn", "refused", f"{kernel}: there are {', '.join(kernels)}")
    elif given.has("flash_attn"):
        given.set("flash_attn", f"{MODEL}.attention", kernels[kernel], is_soft=kernel == "auto")
    switches = {
        "resize_vocab": (f"{MODEL}.resize_vocabulary", "as many rows as there are tokens, no multiple of 64"),
        "enable_liger_kernel": (f"{MODEL}.fused_loss", "the loss alone: norms and positions are the model's own"),
    }
    for key, (to, why) in switches.items():
        if given.switch(key) and key == "resize_vocab" and has_adapter(given):
            given.lose(key, "no base would have the new rows that the adapter needs: resize and save it first")
        elif given.switch(key):
            given.set(key, to, True, why)
        else:
            given.off(key)
    if given.number("neftune_noise_alpha", 0.0) > 0:
        why = "bounded by each sample's own length if packed; there, and here if padded, by the longest of them"
        given.set("neftune_noise_alpha", f"{MODEL}.neftune_alpha", given.number("neftune_noise_alpha", 0.0), why)
    else:
        given.off("neftune_noise_alpha")


def _rope(given: KeyReader) -> None:
    """Translates rope scaling, whose factor follows from the model's context: cutoff_len over it, rounded up."""
    kind = given.word("rope_scaling", "none")
    if kind == "none":
        given.off("rope_scaling")
        return
    length, context = cutoff(given), context_of(str(given.take("model_name_or_path")))
    if context is None:
        why = f"its factor is cutoff_len ({length}) over the model's context, rounded up, and no config.json is here"
        given.lose("rope_scaling", f"{why}: give {MODEL}.rope_scaling: {{type: {kind}, factor: ...}}")
    elif length <= context:
        given.off("rope_scaling", why=f"cutoff_len ({length}) is within the model's context ({context})")
    else:
        given.set("rope_scaling", f"{MODEL}.rope_scaling", {"type": kind, "factor": float(-(-length // context))})


def _trained(given: KeyReader) -> None:
    """Translates which weights are trained."""
    if given.word("finetuning_type", "lora") != "freeze":
        if not has_adapter(given):
            given.note("finetuning_type", "mapped", "all parameters are trained")
        given.off("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules", "use_llama_pro")
        return
    given.note("finetuning_type", "mapped", f"{MODEL}.train_last_blocks says it")
    given.set("freeze_trainable_layers", f"{MODEL}.train_last_blocks", given.count("freeze_trainable_layers", 2))
    modules = given.word("freeze_trainable_modules", "all")
    fate: Fate = "mapped" if modules == "all" else "refused"
    given.note("freeze_trainable_modules", fate, "all that is in the blocks is trained", alters=modules != "all")
    if given.take("freeze_extra_modules"):
        given.lose("freeze_extra_modules", "nothing beside the blocks is trained")
    given.off("freeze_extra_modules", "use_llama_pro")


GROUPS = (_named, _rope, _trained)
