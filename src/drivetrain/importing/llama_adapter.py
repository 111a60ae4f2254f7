"""Translates LLaMA-Factory's keys of adapters (LoRA and its variants) and of a base in few bits.

Sources of their meaning: hparams/finetuning_args.py, hparams/model_args.py, model/adapter.py,
model/model_utils/quantization.py and train/trainer_utils.py of LLaMA-Factory 0.9.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drivetrain.importing.key_reader import KeyReader
from drivetrain.importing.llama_weights import has_adapter, is_oft, names_of

OF_NEW = (
    *("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_rslora", "use_dora", "additional_target"),
    *("pissa_init", "pissa_iter", "pissa_convert"),
)
OF_OFT = ("oft_rank", "oft_block_size", "oft_target", "module_dropout")
OF_SAVED = ("adapter_name_or_path", "adapter_folder", "create_new_adapter")
OF_RATES = ("loraplus_lr_ratio", "loraplus_lr_embedding")
OF_BASE = (
    *("quantization_bit", "quantization_method", "quantization_type", "double_quantization"),
    "quantization_device_map",
)
TOGETHER = (*OF_NEW, *OF_OFT, *OF_SAVED, *OF_RATES, *OF_BASE)

RANK = 8
BLOCK = 32  # inputs
ROUNDS = 16  # of PiSSA's fast singular value decomposition, unless pissa_iter says otherwise
FORMATS = {4: "nf4", 8: "int8"}
WEIGHTS_ALONE = "of the weights alone: inputs stay as they are, there they are in 8 bits too"
BITSANDBYTES = ("bnb", "bitsandbytes")


def lacking(given: KeyReader) -> tuple[str, str] | None:
    """Returns the key because of which no such adapter or base can be trained here, and the reason."""
    if is_oft(given) and given.count("oft_rank", 0):
        return "oft_rank", "a number of blocks for each layer: there is oft_block_size"
    if given.switch("train_from_scratch") and has_adapter(given):
        return "train_from_scratch", "an adapter of a randomly made model could not be loaded"
    bits, method = given.count("quantization_bit", 0), given.word("quantization_method", "bnb")
    kind = given.word("quantization_type", "nf4")
    if not bits:
        return None
    if not has_adapter(given):
        return "quantization_bit", "a base in few bits is frozen, and nothing would be trained without lora"
    if method not in BITSANDBYTES:
        return "quantization_method", f"{method}: there are bitsandbytes' 4 and 8 bits (bnb)"
    if bits not in FORMATS:
        return "quantization_bit", f"{bits}: there are 4 and 8"
    if bits == 4 and kind != "nf4":
        return "quantization_type", f"{kind}: 4 bits are nf4 here"
    return None


def adapters(given: KeyReader) -> None:
    """Translates a new adapter, or saved ones: the last is trained on, or all stay frozen below a new one."""
    if not has_adapter(given):
        given.off(*OF_NEW, *OF_RATES, "create_new_adapter", why="it is of finetuning_type lora")
        given.off(*OF_OFT, why="it is of finetuning_type oft")
        given.lose("adapter_name_or_path", "adapters are of finetuning_type lora and oft: merge it into the model")
        given.off("adapter_folder", why="it is of finetuning_type lora and oft")
        return
    saved, folder = names_of(given, "adapter_name_or_path"), str(given.take("adapter_folder", "")).strip("/")
    given.note("adapter_folder", "mapped" if saved else "unneeded", "the folder within adapter_name_or_path")
    paths = [f"{path.rstrip('/')}/{folder}" if folder else path for path in saved]
    stacks = bool(paths) and given.switch("create_new_adapter")
    if stacks:
        given.note("create_new_adapter", "mapped", "a new adapter is trained above those of adapter_name_or_path")
    else:
        given.off("create_new_adapter", why="it is off" if paths else "there is none yet")
    if stacks or not paths:
        _new(given)
    else:
        given.note("finetuning_type", "mapped", "the adapter at adapter.path has it")
        given.off(*OF_NEW, *OF_OFT, why="the adapter that is trained on has its own")
    _rates(given)
    if len(paths) == 1 and not stacks:
        given.set("adapter_name_or_path", "adapter.path", paths[0])
    elif paths:
        _stacked(given, paths, stacks)


def _new(given: KeyReader) -> None:
    if is_oft(given):
        _new_oft(given)
        return
    given.off(*OF_OFT, why="it is of finetuning_type oft")
    given.set("finetuning_type", "adapter.method", "lora")
    rank = given.count("lora_rank", RANK)
    given.set("lora_rank", "adapter.rank", rank)
    alpha = given.number("lora_alpha", 2.0 * rank)
    given.set("lora_alpha", "adapter.alpha", plain(alpha))
    if given.has("lora_dropout"):
        given.set("lora_dropout", "adapter.dropout", given.number("lora_dropout", 0.0))
    _targets(given, "lora_target")
    for key, to in (("use_rslora", "adapter.rslora"), ("use_dora", "adapter.dora")):
        if given.switch(key):
            given.set(key, to, True)
        else:
            given.off(key)
    _start(given)


def _new_oft(given: KeyReader) -> None:
    given.off(*(key for key in (*OF_NEW, *OF_RATES) if key != "additional_target"), why="it is of finetuning_type lora")
    given.set("finetuning_type", "adapter.method", "oft")
    given.off("oft_rank", why="blocks have the size oft_block_size")
    given.set("oft_block_size", "adapter.block_size", given.count("oft_block_size", BLOCK))
    if given.has("module_dropout"):
        given.set("module_dropout", "adapter.dropout", given.number("module_dropout", 0.0))
    _targets(given, "oft_target")


def _targets(given: KeyReader, key: str) -> None:
    targets = names_of(given, key)
    given.set(key, "adapter.targets", targets if targets and "all" not in targets else "all-linear")
    whole = names_of(given, "additional_target")
    if whole:
        given.set("additional_target", "adapter.train_also", whole)
    given.off(*(() if whole else ("additional_target",)))


def plain(value: float) -> float:
    """Returns a whole number as an int."""
    return int(value) if value.is_integer() else value


def _start(given: KeyReader) -> None:
    if not given.switch("pissa_init"):
        given.off("pissa_init", "pissa_iter", "pissa_convert")
        return
    rounds = given.count("pissa_iter", ROUNDS)
    exact = "" if rounds == -1 else f"from an exact decomposition, there a fast one of {rounds} rounds"
    given.set("pissa_init", "adapter.pissa", True, exact)
    given.note("pissa_iter", "changed" if exact else "mapped", exact or "the decomposition is exact")
    converts = given.switch("pissa_convert")
    given.note("pissa_convert", "mapped" if converts else "changed", "what is saved loads on the base as it was")


def _rates(given: KeyReader) -> None:
    """Translates LoRA+. In LLaMA-Factory every vector (the lengths that DoRA learns) has the rate of B too."""
    ratio = given.number("loraplus_lr_ratio", 0.0)
    if not ratio:
        given.off(*OF_RATES)
        return
    vectors = "what DoRA learns of lengths has the rate of A, there that of B" if given.switch("use_dora") else ""
    given.set("loraplus_lr_ratio", "adapter.lr_ratio", ratio, vectors)
    given.note("loraplus_lr_embedding", "changed", "B of an embedding has the rate of any B")


def _stacked(given: KeyReader, paths: Sequence[str], with_new: bool) -> None:
    """Sets a list of adapters: the trained one, above frozen ones."""
    found = given.found
    moved = {name: found.translation.settings.pop(name) for name in [*found.translation.settings] if _is_of(name)}
    moved = {name: found.defaults.pop(name).value for name in [*found.defaults] if _is_of(name)} | moved
    trained: dict[str, Any] = {name.removeprefix("adapter."): value for name, value in moved.items()}
    below = paths if with_new else paths[:-1]
    if not with_new:
        trained["path"] = paths[-1]
    blocks: list[dict[str, Any]] = [
        {"path": path, "trained": False, "name": f"below-{number}"} for number, path in enumerate(below, 1)
    ]
    why = "those below stay apart, with their dropout; there they are merged into the model"
    given.set("adapter_name_or_path", "adapter", [*blocks, trained], why)


def _is_of(name: str) -> bool:
    return name.startswith("adapter.")


def quantised(given: KeyReader) -> None:
    """Translates a base that lacking() accepts."""
    bits = given.count("quantization_bit", 0)
    if not bits:
        given.off(*OF_BASE, why="nothing is quantised")
        return
    why = "" if bits == 4 else WEIGHTS_ALONE
    given.set("quantization_bit", "quantised_base.format", FORMATS[bits], why)
    given.note("quantization_method", "mapped", "codes and scales are bitsandbytes'")
    given.off("quantization_device_map", why="each rank has its device")
    if bits == 4:
        given.note("quantization_type", "mapped", "quantised_base.format says it")
        given.set("double_quantization", "quantised_base.double", given.switch("double_quantization", True))
    else:
        given.off("quantization_type", "double_quantization", why="it is of 4 bits")
