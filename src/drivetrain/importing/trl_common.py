"""The common part of TRL's configurations: model, data, precision and recompute.

Sources of their meaning: TRL 1.16's trl/trainer/base_config.py, trl/trainer/model_config.py and trl/scripts/utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.config.translation import Handler, Translation, fated, if_on, lost
from drivetrain.importing.key_reader import KeyReader, switch
from drivetrain.importing.training_keys import ORDER
from drivetrain.importing.translated_file import Source

DATA = "workload.data"
LORA = ("lora_r", "lora_alpha", "lora_dropout")
SYNC = ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")
DATA_SETS = ("dataset_name", "dataset_train_split", "dataset_test_split")
TOGETHER = ("model_name_or_path", "use_peft", *LORA, "lora_target_modules", *SYNC, *DATA_SETS)


def _shuffled(key: str, value: Any, into: Translation) -> None:
    if value is None or switch(key, value):
        into.note(key, "unneeded", "the order is random, a function of seed and step")
    else:
        into.note(key, "refused", ORDER)


_DECIDED = fated("unneeded", "the run decides it")
KEYS: dict[str, Handler] = {
    "router_aux_loss_coef": if_on(lost("there is no loss of routers")),
    **dict.fromkeys(("pad_to_multiple_of", "model_init_kwargs"), fated("unneeded", "the run decides how it computes")),
    "shuffle_dataset": _shuffled,
    "trust_remote_code": if_on(fated("refused", "give workload.model.trust_remote_code once you have read the code")),
    **dict.fromkeys(("attn_implementation", "dtype", "torch_dtype"), _DECIDED),
    **dict.fromkeys(("model_revision", "dataset_config"), if_on(lost("give it in the run file: revision, subset"))),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), if_on(lost("give quantised_base"))),
}


def usual(source: Source, own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the defaults that differ from those of TrainingArguments."""
    is_fp16 = switch(f"{source.prefix}fp16", source.raw.get("fp16") or False)
    return {**own, "bf16": not is_fp16}


def recompute(given: KeyReader) -> None:
    key = "activation_checkpointing" if given.has("activation_checkpointing") else "gradient_checkpointing"
    given.set(key, "recompute", given.switch(key))


def reference(given: KeyReader, field: str) -> None:
    """Translates a reference that follows the model. field: of the block."""
    if not given.switch("sync_ref_model"):
        given.off(*SYNC)
        return
    given.set("ref_model_sync_steps", f"{field}.reference_every", given.count("ref_model_sync_steps", 512))
    given.set("ref_model_mixup_alpha", f"{field}.reference_mixing", given.number("ref_model_mixup_alpha", 0.6))
    given.found.translation.settings[f"{field}.reference"] = "copy"
    given.note("sync_ref_model", "mapped", f"{field}.reference_every")


def model(given: KeyReader) -> None:
    if given.has("model_name_or_path"):
        given.set("model_name_or_path", "workload.model.path", str(given.take("model_name_or_path")))
    if not given.switch("use_peft"):
        given.off("use_peft", *LORA, "lora_target_modules")
        return
    given.found.translation.settings["adapter.method"] = "lora"
    given.note("use_peft", "mapped", "adapter.method: lora")
    given.set("lora_r", "adapter.rank", given.count("lora_r", 16))
    given.set("lora_alpha", "adapter.alpha", given.count("lora_alpha", 32))
    given.set("lora_dropout", "adapter.dropout", given.number("lora_dropout", 0.05))
    targets = given.take("lora_target_modules")
    given.set("lora_target_modules", "adapter.targets", targets if targets else "all-linear")


def data(given: KeyReader) -> None:
    """Translates the data. Nothing is held out there: an evaluation has a split of its own."""
    if not given.has("dataset_name"):
        given.off("dataset_train_split", "dataset_test_split", why=f"{DATA} names the data")
        return
    name, train = str(given.take("dataset_name")), str(given.take("dataset_train_split", "train"))
    given.set("dataset_name", f"{DATA}.train", name if train == "train" else {"path": name, "split": train})
    given.note("dataset_train_split", "mapped", f"{DATA}.train: split: {train}")
    strategy = "eval_strategy" if given.has("eval_strategy") else "evaluation_strategy"
    if given.word(strategy, "no") in ("no", "false"):  # YAML reads no as false
        given.off("dataset_test_split", why="nothing is evaluated")
        given.found.translation.settings[f"{DATA}.evaluation_fraction"] = 0.0
        return
    test = {"path": name, "split": str(given.take("dataset_test_split", "test"))}
    given.found.translation.settings[f"{DATA}.evaluation"] = test
    given.note("dataset_test_split", "mapped", f"{DATA}.evaluation: split: {test['split']}")
