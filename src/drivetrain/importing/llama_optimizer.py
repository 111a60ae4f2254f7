"""Translates LLaMA-Factory's optimizers that are not the Trainer's: GaLore.

Sources of their meaning: hparams/finetuning_args.py and train/trainer_utils.py of LLaMA-Factory 0.9.
"""

from __future__ import annotations

from drivetrain.importing import training_arguments
from drivetrain.importing.key_reader import KeyReader
from drivetrain.importing.llama_weights import has_adapter
from drivetrain.importing.training_keys import OPTIMIZERS

OPTIONS = "optimizer.options"
OF_GALORE = (
    *("galore_target", "galore_rank", "galore_update_interval", "galore_scale", "galore_proj_type"),
    "galore_layerwise",
)
TOGETHER = ("use_galore", *OF_GALORE)


def optimizer(given: KeyReader) -> None:
    lacking = _lacking(given) if given.switch("use_galore") else "it is off"
    if lacking is None:
        _galore(given)
        return
    on = given.switch("use_galore")
    given.note("use_galore", "refused" if on else "unneeded", lacking, alters=on)
    given.off(*OF_GALORE, why="see use_galore")
    training_arguments.optimizer(given)


def _lacking(given: KeyReader) -> str | None:
    """Returns why GaLore is not translated."""
    if has_adapter(given):
        return "an adapter's matrices are small already: LLaMA-Factory refuses lora and GaLore together"
    over = given.word("optim", "adamw_torch")
    if OPTIMIZERS.get(over, ("",))[0] != "adamw":
        return f"{over}: GaLore's moments are AdamW's in fp32 here"
    return None


def _galore(given: KeyReader) -> None:
    training_arguments.rates(given)
    why = "every matrix is projected, embeddings and head too"
    given.set("use_galore", "optimizer.name", "galore", why)
    given.off("optim", "adafactor", why="GaLore is AdamW's")
    given.set("galore_rank", f"{OPTIONS}.rank", given.count("galore_rank", 16))
    given.set("galore_update_interval", f"{OPTIONS}.update_proj_gap", given.count("galore_update_interval", 200))
    given.set("galore_scale", f"{OPTIONS}.scale", given.number("galore_scale", 2.0))
    given.set("galore_proj_type", f"{OPTIONS}.projection_type", given.word("galore_proj_type", "std"))
    given.note("galore_target", "changed", why)
    if given.switch("galore_layerwise"):
        given.note("galore_layerwise", "changed", "all layers are updated together, once their gradients are clipped")
    else:
        given.off("galore_layerwise")
    training_arguments.adam(given)
