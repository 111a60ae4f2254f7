"""Reads a local model's folder, and translates LLaMA-Factory's keys of model and data that are independent of
others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drivetrain.config.files import read_json
from drivetrain.config.translation import Fate, Handler, Translation, fated, if_on, lost
from drivetrain.errors import UserError

# of a published config.json: what says how it came about, and what the run file says elsewhere
NOT_FIELDS = {"_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache"}


def published_config(path: str) -> dict[str, Any] | None:
    """Returns the fields of a Transformers folder's config.json; None if there is no such folder."""
    file = Path(path).expanduser() / "config.json"
    try:
        held = read_json(file) if file.is_file() else {}
    except UserError:
        return None
    return {key: value for key, value in held.items() if key not in NOT_FIELDS} or None


def context_of(path: str) -> int | None:
    """Returns the positions that the model in this folder was trained with, as far as its config.json states them."""
    config = published_config(path) or {}
    scaling = config.get("rope_scaling")
    first = scaling.get("original_max_position_embeddings") if isinstance(scaling, dict) else None
    found = first or config.get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _all(names: str, handler: Handler) -> dict[str, Handler]:
    return dict.fromkeys(names.split(), handler)


def only(value: Any, why: str, otherwise: str, fate: Fate = "refused", alters: bool = False) -> Handler:
    """Returns a handler of a key that needs no counterpart if it has this value."""

    def handle(key: str, given: Any, into: Translation) -> None:
        same = given == value
        into.note(key, "unneeded" if same else fate, why if same else otherwise, alters and not same)

    return handle


OWN_CLASSES = (
    "Transformers' own classes are taken; to run code that comes with the model, read it and give "
    "workload.model.trust_remote_code=true yourself"
)
TOKENIZERS = "tokenizers are fast ones"
INTERNAL = fated("unneeded", "LLaMA-Factory derives it itself")
NEWEST = "the newest is taken: download that one, and give its folder"
OWN_TEMPLATE = "the template has it"
TOKENS = if_on(lost("add them to the tokenizer, save it, and name its folder in workload.model.tokenizer"))

KEYS: dict[str, Handler] = {
    # model
    "model_revision": only("main", "it is the newest", NEWEST, alters=True),
    "trust_remote_code": if_on(fated("changed", OWN_CLASSES)),
    "cache_dir": fated("changed", "HF_HOME sets where the hub's files are kept"),
    "use_fast_tokenizer": only(True, TOKENIZERS, TOKENIZERS, "changed"),
    "low_cpu_mem_usage": fated("unneeded", "engine.meta spares the memory of ranks"),
    "split_special_tokens": if_on(lost("special tokens are never taken apart")),
    **_all("add_tokens add_special_tokens new_special_tokens_config", TOKENS),
    "init_special_tokens": only(
        "noise_init", "new rows are random around the others' mean", "new rows are random around the others' mean"
    ),
    "moe_aux_loss_coef": if_on(lost("the loss is that of the tokens")),
    **_all(
        "upcast_layernorm upcast_lmhead_output", if_on(fated("refused", "precision decides what is computed in fp32"))
    ),
    **_all("model_max_length block_diag_attn device_map compute_dtype use_kv_cache", INTERNAL),
    "use_v1_kernels": if_on(fated("refused", "the model's own kernels are taken")),
    # data
    "tokenized_path": lambda key, value, into: into.set(
        key, "workload.data.cache", str(value), "by content, and what LLaMA-Factory has saved there is not read"
    ),
    **_all(
        "preprocessing_num_workers preprocessing_batch_size",
        fated("unneeded", "the tokenizer takes the cores there are"),
    ),
    "ignore_pad_token_for_loss": only(True, "padding is no target", "padding is no target", alters=True),
    "eval_on_each_dataset": if_on(fated("refused", "metrics are of all evaluation data together")),
    "tool_format": lost(OWN_TEMPLATE),
    "enable_thinking": only(True, OWN_TEMPLATE, OWN_TEMPLATE, alters=True),
    "preserve_thinking": if_on(lost(OWN_TEMPLATE)),
    **_all("reasoning_effort efficient_eos", fated("unneeded", OWN_TEMPLATE)),
}
# what is read together with others
TOGETHER = (
    *("stage", "finetuning_type", "model_name_or_path", "train_from_scratch", "flash_attn", "resize_vocab"),
    *("enable_liger_kernel", "neftune_noise_alpha", "rope_scaling", "freeze_trainable_layers"),
    *("freeze_trainable_modules", "freeze_extra_modules", "use_llama_pro", "template", "default_system", "dataset"),
    *("dataset_dir", "eval_dataset", "val_size", "max_samples", "mix_strategy", "interleave_probs", "cutoff_len"),
    *("packing", "neat_packing", "streaming", "buffer_size", "train_on_prompt", "mask_history", "group_by_length"),
)
OF_TRAINING = ("neftune_noise_alpha", "group_by_length")  # of these TrainingArguments has the same
