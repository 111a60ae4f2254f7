"""Translates LLaMA-Factory's losses of supervised fine-tuning (use_dft_loss, use_eaft_loss, use_asft_loss).

Sources of their meaning: FinetuningArguments of LLaMA-Factory 0.9.5 (hparams/finetuning_args.py), its
train/sft/trainer.py and train/trainer_utils.py.
"""

from __future__ import annotations

from drivetrain.config.fine_tuning import ASFT, EAFT, SFT, USUAL_ALPHA
from drivetrain.importing.key_reader import KeyReader
from drivetrain.importing.llama_preferences import NOT_ITS, reference

FIELD = "workload.sft"
SWITCHES = {"use_dft_loss": "dft", "use_eaft_loss": "eaft", "use_asft_loss": "asft"}  # the first that is on counts
ALPHAS = {EAFT: "eaft_alpha", ASFT: "asft_alpha"}
KEYS = (*SWITCHES, *ALPHAS.values())


def chosen(given: KeyReader) -> str | None:
    """Returns the switch that decides the loss; None where it is the cross-entropy."""
    is_sft = given.word("stage", SFT) == SFT
    return next((key for key in SWITCHES if given.switch(key)), None) if is_sft else None


def losses(given: KeyReader) -> None:
    key = chosen(given)
    if key is None:
        is_sft = given.word("stage", SFT) == SFT
        given.off(*KEYS, why="it is off" if is_sft else NOT_ITS)
        return
    loss = SWITCHES[key]
    given.found.translation.settings[f"{FIELD}.loss"] = loss
    why = "its mean is over the tokens of the global batch, there over each micro-batch's" if loss == ASFT else ""
    given.note(key, "changed" if why else "mapped", f"{FIELD}.loss: {loss}{'; ' if why else ''}{why}")
    if loss in ALPHAS:
        given.set(ALPHAS[loss], f"{FIELD}.alpha", given.number(ALPHAS[loss], USUAL_ALPHA[loss]))
    if loss == ASFT:
        reference(given, FIELD)
    given.off(*(each for each in KEYS if each not in (key, ALPHAS.get(loss))), why=f"the loss is {loss}")
