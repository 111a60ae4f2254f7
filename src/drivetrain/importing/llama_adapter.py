"""LLaMA-Factory's keys of adapters (LoRA and its kin) and of a base in few bits.

What each means there: hparams/finetuning_args.py, hparams/model_args.py, model/adapter.py,
model/model_utils/quantization.py and train/trainer_utils.py of LLaMA-Factory 0.9.
"""

from __future__ import annotations

from typing import Any

from drivetrain.importing.found import Default
from drivetrain.importing.given import Given
from drivetrain.importing.llama_weights import MODEL, is_lora

OF_NEW = (
    *("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_rslora", "use_dora", "additional_target"),
    *("pissa_init", "pissa_iter", "pissa_convert"),
)
OF_SAVED = ("adapter_name_or_path", "adapter_folder", "create_new_adapter")
OF_RATES = ("loraplus_lr_ratio", "loraplus_lr_embedding")
OF_BASE = (
    *("quantization_bit", "quantization_method", "quantization_type", "double_quantization"),
    "quantization_device_map",
)
TOGETHER = (*OF_NEW, *OF_SAVED, *OF_RATES, *OF_BASE)

RANK = 8
ROUNDS = 16  # of PiSSA's fast singular value decomposition, unless pissa_iter says otherwise
FORMATS = {4: "nf4", 8: "int8"}
BITSANDBYTES = ("bnb", "bitsandbytes")


def lacking(given: Given) -> tuple[str, str] | None:
    """The key, and why nothing here trains such an adapter or such a base."""
    if given.switch("train_from_scratch") and is_lora(given):
        return "train_from_scratch", "nobody could load an adapter of a model that is made at random"
    bits, method = given.count("quantization_bit", 0), given.word("quantization_method", "bnb")
    kind = given.word("quantization_type", "nf4")
    if not bits:
        return None
    if not is_lora(given):
        return "quantization_bit", "a base in few bits is frozen, and nothing would be trained without lora"
    if method not in BITSANDBYTES:
        return "quantization_method", f"{method}: there are bitsandbytes' 4 and 8 bits (bnb)"
    if bits not in FORMATS:
        return "quantization_bit", f"{bits}: there are 4 and 8"
    if bits == 4 and kind != "nf4":
        return "quantization_type", f"{kind}: 4 bits are nf4 here"
    return None


def adapters(given: Given) -> None:
    """A new adapter, or saved ones: the last is trained on, or all stay as they are below a new one."""
    if not is_lora(given):
        given.off(*OF_NEW, *OF_RATES, "create_new_adapter", why="it is of finetuning_type lora")
        if given.has("adapter_name_or_path"):
            given.note("adapter_name_or_path", "refused", "merge it into the model first: adapters are of lora")
        given.off("adapter_folder", why="see adapter_name_or_path")
        return
    saved = _names(given, "adapter_name_or_path")
    folder = str(given.take("adapter_folder", ""))
    given.note("adapter_folder", "mapped" if saved else "unneeded", "the folder within adapter_name_or_path")
    paths = [f"{path.rstrip('/')}/{folder}" if folder else path for path in saved]
    stacks = given.switch("create_new_adapter") and bool(paths)
    if stacks:
        given.note("create_new_adapter", "mapped", "a new adapter stands on those at adapter_name_or_path")
    given.off("create_new_adapter", why="there is no saved adapter") if not paths else given.off("create_new_adapter")
    _rates(given)
    if stacks or not paths:
        _new(given)
    else:
        given.off(*OF_NEW, why="the adapter that is trained on has its own")
    if paths:
        _on_saved(given, paths, stacks)
