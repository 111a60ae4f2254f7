"""Translates LLaMA-Factory's keys of preferences (stage: dpo, kto, rm).

Sources of their meaning: RLHFArguments of LLaMA-Factory 0.9 (hparams/finetuning_args.py) and its trainers (train/dpo,
train/kto, train/rm).
"""

from __future__ import annotations

from collections.abc import Callable

from drivetrain.config.fine_tuning import SFT
from drivetrain.config.preference import DPO, ORPO, SIMPO
from drivetrain.config.reinforcement import PPO
from drivetrain.errors import problem
from drivetrain.importing.key_reader import KeyReader

FIELD = "workload.preference"
LOSSES = ("sigmoid", "hinge", "ipo", "kto_pair")  # of stage dpo here; orpo and simpo are stages of their own
OF_PAIRS = ("pref_loss", "pref_ftx", "pref_bco_weight", "dpo_label_smoothing", "simpo_gamma", "ld_alpha")
OF_LABELS = ("kto_chosen_weight", "kto_rejected_weight")
OF_REFERENCE = ("ref_model", "ref_model_adapters", "ref_model_quantization_bit")
KEYS = ("pref_beta", *OF_PAIRS, *OF_LABELS, *OF_REFERENCE)
BETA = 0.1
NOT_ITS = "the stage does not read it"


def stage_of(given: KeyReader, stage: str) -> str:
    """Returns the training stage here. stage: LLaMA-Factory's, by its name here."""
    loss = given.word("pref_loss", "sigmoid")
    return loss if stage == DPO and loss in (ORPO, SIMPO) else stage


def preferences(given: KeyReader) -> None:
    stage = given.word("stage", "sft")
    translate = TRANSLATORS.get(stage)
    if translate is None:
        held = OF_REFERENCE if stage == PPO or (stage == SFT and given.switch("use_asft_loss")) else ()
        given.off(*(key for key in KEYS if key not in held), why=NOT_ITS)
        return
    translate(given)
    given.set("pref_beta", f"{FIELD}.beta", given.number("pref_beta", BETA))


def _of_pairs(given: KeyReader) -> None:
    if of_pairs(given) in LOSSES:
        reference(given)
    else:
        given.off(*OF_REFERENCE, why="the loss has no reference")
    given.off(*OF_LABELS, why=NOT_ITS)


def of_pairs(given: KeyReader) -> str:
    """Translates the loss over pairs and its settings; returns its name there."""
    loss = given.word("pref_loss", "sigmoid")
    if loss not in (*LOSSES, ORPO, SIMPO):
        raise problem(f"{given.prefix}pref_loss", f"{loss} was given", f"give {', '.join((*LOSSES, ORPO, SIMPO))}")
    mixture = {loss: 1.0}
    why = "the estimate of the KL is over the global batch, without gradient" if loss == "kto_pair" else ""
    likelihood, classifier = given.number("pref_ftx", 0.0), given.number("pref_bco_weight", 0.0)
    if likelihood:
        mixture["nll"] = likelihood
        given.note("pref_ftx", "mapped", "the weight of the loss nll")
    if classifier and loss in LOSSES:
        mixture["bco_pair"] = classifier
        given.note("pref_bco_weight", "changed", "the loss bco_pair, shifted by the global batch's mean reward")
    given.off(*(key for key in ("pref_ftx", "pref_bco_weight") if key not in _noted(given)))
    given.set("pref_loss", f"{FIELD}.loss", mixture if len(mixture) > 1 else loss, why)
    _settings(given, loss)
    return loss


def _settings(given: KeyReader, loss: str) -> None:
    smoothing = given.number("dpo_label_smoothing", 0.0)
    if smoothing and loss != "sigmoid":
        why = f"it is of the loss sigmoid, and pref_loss is {loss}"
        raise problem(f"{given.prefix}dpo_label_smoothing", why, "leave it out")
    if smoothing:
        given.set("dpo_label_smoothing", f"{FIELD}.label_smoothing", smoothing)
    if loss == SIMPO:
        given.set("simpo_gamma", f"{FIELD}.gamma", given.number("simpo_gamma", 0.5))
    if given.has("ld_alpha") and loss in LOSSES:
        why = "the reference's tokens are weighed too, as in the paper; there the model's alone"
        given.set("ld_alpha", f"{FIELD}.ld_alpha", given.number("ld_alpha", 1.0), why)
    given.off(
        *(key for key in ("dpo_label_smoothing", "simpo_gamma", "ld_alpha") if key not in _noted(given)),
        why=f"the loss {loss} does not read it, or it is off",
    )


def _of_labels(given: KeyReader) -> None:
    for key, name in zip(OF_LABELS, ("desirable_weight", "undesirable_weight"), strict=True):
        given.set(key, f"{FIELD}.{name}", given.number(key, 1.0))
    if given.number("pref_ftx", 0.0):
        given.lose("pref_ftx", "KTO has no likelihood term here")
    given.off(*(key for key in OF_PAIRS if key not in _noted(given)), why=NOT_ITS)
    reference(given)


def reference(given: KeyReader, field: str = FIELD) -> None:
    """Translates the reference: the model as it starts, or with lora the base without adapters. field: of the block."""
    model, other = given.take("model_name_or_path"), given.take("ref_model")
    if other is not None and other != model:
        given.set("ref_model", f"{field}.reference_model", str(other), "its tokens must be the model's")
    else:
        given.note("ref_model", "unneeded", "it is the model as it starts")
    for key in ("ref_model_adapters", "ref_model_quantization_bit"):
        if given.has(key):
            given.lose(key, "the reference is the model as it starts, or the base without adapters")
    if given.word("finetuning_type", "lora") == "lora" and given.has("adapter_name_or_path") and other in (None, model):
        given.found.translation.settings[f"{field}.reference"] = "adapters_off"  # not the model with the old adapter


def _noted(given: KeyReader) -> set[str]:
    return {note.key.removeprefix(given.prefix) for note in given.found.notes}


TRANSLATORS: dict[str, Callable[[KeyReader], None]] = {"dpo": _of_pairs, "kto": _of_labels}
