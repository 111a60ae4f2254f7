"""Translates TRL's configurations of DPO, KTO, reward models and GKD: JSON, or the YAML of its command line.

Sources of their meaning: TRL 1.16's trl/trainer/dpo_config.py, kto_config.py, reward_config.py,
trl/experimental/gkd/gkd_config.py and their trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from drivetrain.config.distillation import DISTILL, JS
from drivetrain.config.distillation import FIELD as DISTILLATION
from drivetrain.config.preference import DPO, KTO, LIKELIHOODS, LOSSES, REWARD
from drivetrain.config.translation import Handler, fated, if_on, lost
from drivetrain.errors import problem
from drivetrain.importing import training_arguments, trl_common
from drivetrain.importing.key_reader import KeyReader, in_turn
from drivetrain.importing.training_keys import KEYS as TRAINING_KEYS
from drivetrain.importing.translated_file import Source, TranslatedFile

FIELD = "workload.preference"
USUAL: dict[str, Any] = {"gradient_checkpointing": True, "logging_steps": 10}
LENGTH = 1024
SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")  # losses whose label_smoothing is read there
DIVERGENCES = {"reverse_kl": "reverse_kl", "forward_kl": "forward_kl"}
DIVERGENCES |= {"js_divergence": "js", "alpha_divergence": "alpha"}
CACHED = ("precompute_ref_log_probs", "precompute_ref_batch_size")
OF_TOKENIZER = ("chat_template_path", "eos_token")
SHARED = ("max_length", "activation_offloading", "disable_dropout")


@dataclass(frozen=True)
class Trainer:
    """One of TRL's trainers. own: keys that its loss reads. together: what its groups read. usual: defaults that
    differ from those of TrainingArguments. numbers: name there → (name here, default there). field: of their block."""

    title: str
    stage: str
    own: tuple[str, ...]
    usual: Mapping[str, Any]
    numbers: Mapping[str, tuple[str, float]]
    loss: Callable[[KeyReader], None]
    has_reference: bool = True
    field: str = FIELD

    @property
    def together(self) -> tuple[str, ...]:
        of_reference = (*CACHED, *trl_common.SYNC) if self.has_reference else ()
        return (*trl_common.TOGETHER, *SHARED, *self.own, *self.numbers, *of_reference, "loss_type")


def _pairs(given: KeyReader) -> None:
    names = given.take("loss_type", ["sigmoid"])
    listed = [str(name) for name in (names if isinstance(names, list) else [names])]
    if not listed:
        raise problem(f"{given.prefix}loss_type", "it names no loss", "name one, or leave it out for sigmoid")
    unknown = [name for name in listed if name not in LOSSES or DPO not in LOSSES[name].stages]
    if unknown:
        given.lose(
            "loss_type", f"{', '.join(unknown)}: there are {', '.join(n for n in LOSSES if DPO in LOSSES[n].stages)}"
        )
        return
    things = "1 loss" if len(listed) == 1 else f"{len(listed)} losses"
    weights = given.weights("loss_weights", len(listed), things) or [1.0] * len(listed)
    mixture = dict.fromkeys(listed, 0.0)
    for name, weight in zip(listed, weights, strict=True):
        mixture[name] += weight  # there a loss that is named twice is added up twice
    whole = [name for name in listed if LOSSES[name].whole_batch]
    why = f"{' and '.join(whole)} compares within the global batch, there within the micro-batch" if whole else ""
    given.set("loss_type", f"{FIELD}.loss", listed[0] if mixture == {listed[0]: 1.0} else mixture, why)
    given.note("loss_weights", "mapped", f"{FIELD}.loss")
    _smoothing(given, listed)
    _divergence(given)
    _if_read(given, "discopop_tau", listed, 0.05)
    if given.has("ld_alpha"):
        given.set("ld_alpha", f"{FIELD}.ld_alpha", given.number("ld_alpha", 1.0))
    if given.switch("use_weighting"):
        likelihoods = [name for name in listed if name in LIKELIHOODS]
        why = f"{' and '.join(likelihoods)} is not weighted, as it compares no answers" if likelihoods else ""
        given.set("use_weighting", f"{FIELD}.likelihood_weights", True, why)
    else:
        given.off("use_weighting")
    if given.word("truncation_mode", "keep_start") == "keep_start":
        why = "a long pair loses the beginning of its prompt, then the ends of its answers; there its end alone"
        given.note("truncation_mode", "changed", why)
    else:
        given.lose("truncation_mode", "a long pair loses the beginning of its prompt, the same on both sides")


def _smoothing(given: KeyReader, losses: list[str]) -> None:
    smoothing = given.number("label_smoothing", 0.0)
    read = [name for name in losses if name in SMOOTHED]
    if not (smoothing and read):
        given.off("label_smoothing", why="it is 0, or the loss does not read it there")
    elif any("label_smoothing" in LOSSES[name].takes for name in losses if name not in SMOOTHED):
        given.lose("label_smoothing", f"here {' and '.join(losses)} all read it, there {' and '.join(read)} alone")
    else:
        given.set("label_smoothing", f"{FIELD}.label_smoothing", smoothing)


def _divergence(given: KeyReader) -> None:
    kind = given.word("f_divergence_type", "reverse_kl")
    if kind not in DIVERGENCES:
        given.lose("f_divergence_type", f"{kind}: there are {', '.join(DIVERGENCES)}")
        return
    if DIVERGENCES[kind] == "reverse_kl":
        given.off("f_divergence_type", "f_alpha_divergence_coef", why="the reverse KL is taken")
        return
    given.set("f_divergence_type", f"{FIELD}.divergence", DIVERGENCES[kind])
    if DIVERGENCES[kind] == "alpha":
        alpha = given.number("f_alpha_divergence_coef", 0.5)
        given.set("f_alpha_divergence_coef", f"{FIELD}.divergence_alpha", alpha)
    else:
        given.off("f_alpha_divergence_coef", why="it is of alpha_divergence")


def _if_read(given: KeyReader, key: str, losses: list[str], usual: float) -> None:
    if any(key in LOSSES[name].takes for name in losses):
        given.set(key, f"{FIELD}.{key}", given.number(key, usual))
    else:
        given.off(key, why="the loss does not read it")


def _labelled(given: KeyReader) -> None:
    loss = given.word("loss_type", "kto")
    if loss not in LOSSES or KTO not in LOSSES[loss].stages:
        given.lose("loss_type", f"{loss}: there are kto and apo_zero_unpaired")
        return
    why = "the divergence is estimated over the global batch, there over each micro-batch" if loss == KTO else ""
    given.set("loss_type", f"{FIELD}.loss", loss, why)


def _scored(given: KeyReader) -> None:
    given.set("center_rewards_coefficient", f"{FIELD}.centring", given.number("center_rewards_coefficient", 0.0))
    _own_tokenizer(given)


def _own_tokenizer(given: KeyReader) -> None:
    for key in OF_TOKENIZER:
        if given.has(key) and given.take(key) != f"<{key.upper()}>":  # as the class hides tokens where it is written
            given.lose(key, "the tokenizer's own is taken; workload.data.template names another template")


def _distilled(given: KeyReader) -> None:
    """Translates GKD, whose beta of 0 and 1 are names of losses here."""
    beta = given.number("beta", 0.5)
    name = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, JS)
    given.found.translation.settings[f"{DISTILLATION}.loss"] = name
    if name == JS:
        given.set("beta", f"{DISTILLATION}.beta", beta)
    else:
        given.note("beta", "mapped", f"{DISTILLATION}.loss: {name}")
    share = given.number("lmbda", 0.5)
    given.set("lmbda", f"{DISTILLATION}.own_answers", share, "drawn for each sample, there for a batch at a time")
    if share:
        given.set("temperature", f"{DISTILLATION}.drawing_temperature", given.number("temperature", 0.9))
        given.set("max_new_tokens", f"{DISTILLATION}.max_new_tokens", given.count("max_new_tokens", 128))
    else:
        given.off("temperature", "max_new_tokens", why="all replies are those of the data")
    if given.has("teacher_model_name_or_path"):
        path = str(given.take("teacher_model_name_or_path"))
        given.set("teacher_model_name_or_path", f"{DISTILLATION}.teacher", path)
    if given.switch("seq_kd"):
        given.lose("seq_kd", "let the teacher write the replies with drivetrain predict, and train on its file")
    else:
        given.off("seq_kd")
    _own_tokenizer(given)
    given.off("loss_type", why="the divergence from the teacher is the loss")
    given.note("truncation_mode", "changed", "workload.data.too_long says what a long conversation loses")


TRAINERS = {
    "trl_dpo": Trainer(
        "TRL's DPO",
        DPO,
        own=(
            *("loss_weights", "label_smoothing", "f_divergence_type", "f_alpha_divergence_coef", "discopop_tau"),
            *("ld_alpha", "use_weighting", "truncation_mode"),
        ),
        usual={**USUAL, "learning_rate": 1e-6},
        numbers={"beta": ("beta", 0.1)},
        loss=_pairs,
    ),
    "trl_kto": Trainer(
        "TRL's KTO",
        KTO,
        own=(),
        usual={**USUAL, "learning_rate": 1e-6},
        numbers={
            "beta": ("beta", 0.1),
            "desirable_weight": ("desirable_weight", 1.0),
            "undesirable_weight": ("undesirable_weight", 1.0),
        },
        loss=_labelled,
    ),
    "trl_reward": Trainer(
        "TRL's reward model",
        REWARD,
        own=("center_rewards_coefficient", *OF_TOKENIZER),
        usual={**USUAL, "learning_rate": 1e-4},
        numbers={},
        loss=_scored,
        has_reference=False,
    ),
    "trl_gkd": Trainer(
        "TRL's GKD",
        DISTILL,
        own=(
            *("lmbda", "beta", "temperature", "max_new_tokens", "seq_kd", "teacher_model_name_or_path"),
            *("teacher_model_init_kwargs", "truncation_mode", *OF_TOKENIZER),
        ),
        usual={**USUAL, "learning_rate": 2e-5},
        numbers={},
        loss=_distilled,
        has_reference=False,
        field=DISTILLATION,
    ),
}
_REPLIES = fated("unneeded", "the divergence is of replies alone, as its collator has it")
KEYS: dict[str, Handler] = {
    **trl_common.KEYS,
    **dict.fromkeys(("dataset_num_proc", "pad_token"), fated("unneeded", "tokenised data and padding are the run's")),
    **dict.fromkeys(("packing", "packing_strategy", "eval_packing"), fated("unneeded", "samples are packed")),
    **dict.fromkeys(("completion_only_loss", "assistant_only_loss"), _REPLIES),
    **dict.fromkeys(("dataset_text_field", "dataset_kwargs"), fated("unneeded", "the data's own columns are seen")),
    "teacher_model_init_kwargs": if_on(lost("give workload.distillation.teacher: {path: ..., precision: bf16}")),
    "padding_free": fated("unneeded", "samples are packed where attention can"),
    "ignore_bias_buffers": fated("unneeded", "buffers are not averaged over ranks"),
    "dataset_streaming": if_on(lost("preferences are read whole")),
    "lora_modules_to_save": if_on(lost("give it as adapter.train_also")),
    "use_rslora": if_on(lost("give it as adapter.rslora")),
    "use_dora": if_on(lost("give it as adapter.dora")),
    "lora_target_parameters": if_on(lost("adapters are of modules: adapter.targets")),
    "lora_task_type": fated("unneeded", "the stage says it"),
    **dict.fromkeys(
        ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"),
        fated("unneeded", "it is of load_in_4bit"),
    ),
}


def translate(kind: str, source: Source, driver: str | None) -> TranslatedFile:
    """kind: of TRAINERS."""
    trainer, found = TRAINERS[kind], TranslatedFile(source)
    given = KeyReader(source.raw, found, source.prefix, usual=trl_common.usual(source, trainer.usual))
    groups = [partial(group, trainer=trainer) for group in (_workload, _reference)]
    of_training = training_arguments.groups(driver)
    in_turn(given, [*of_training, trl_common.recompute, *groups, _data, trl_common.model, trl_common.data])
    given.rest({**TRAINING_KEYS, **KEYS})
    return found


def _workload(given: KeyReader, trainer: Trainer) -> None:
    given.found.translation.settings |= {"workload.type": "language_model", "workload.stage": trainer.stage}
    trainer.loss(given)
    for key, (name, usual) in trainer.numbers.items():
        given.set(key, f"{trainer.field}.{name}", given.number(key, usual))


def _reference(given: KeyReader, trainer: Trainer) -> None:
    if not trainer.has_reference:
        return
    trl_common.reference(given, FIELD)
    if given.switch("precompute_ref_log_probs"):
        given.set("precompute_ref_log_probs", f"{FIELD}.reference", "cached")
    else:
        given.off("precompute_ref_log_probs")
    given.off("precompute_ref_batch_size", why="it computes as many samples at once as an evaluation")


def _data(given: KeyReader) -> None:
    """Translates the length, and what decides how samples are run."""
    if given.raw.get("max_length", LENGTH) is None:
        given.lose("max_length", f"samples have a longest length here: give {trl_common.DATA}.length")
    else:
        given.set("max_length", f"{trl_common.DATA}.length", given.count("max_length", LENGTH))
    given.set("activation_offloading", "offload_activations", given.switch("activation_offloading"))
    if given.switch("disable_dropout", True):
        why = "the model's own dropout is taken, which most language models do not have: set it to 0 in its config"
        given.note("disable_dropout", "changed", why)
    else:
        given.off("disable_dropout", why="the model's own dropout is taken")
